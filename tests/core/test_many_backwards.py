"""The promise: who runs a schedule of many forwards and backwards says where a step ends, and gets the same bits.

Gradients of all its backwards stay on their rank until the schedule has ended, units are gathered once for all of
them, and `step()` counts no micro-batches.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from exact import WAYS, Exact
from marks import longer
from scenario import settings

import zero
from zero.utils import safe_get_full_fp32_param

MICRO_BATCHES, STEPS = 4, 3


def trained(way: str, stage: int, schedule: bool) -> tuple[list[float], dict[str, torch.Tensor], list[int]]:
    """Norms and weights; and how many gathers and reductions of units began in each step."""
    sizes, counts = WAYS[way].told(stage), []
    json = settings(
        {"stage": stage, "cut": True, "precision": "bf16", "accumulation": MICRO_BATCHES, "gradient_clipping": 1.0},
        WAYS[way].grid(4).size("dp_replicate", "dp_shard"),
    )
    engine = zero.initialize(model=Exact(WAYS[way]), config=json, mesh_param=sizes)[0]
    status, norms = engine._sharded.world.watchdog.status, []
    for step in range(STEPS):
        before, numbers = status.number, range(step * MICRO_BATCHES, (step + 1) * MICRO_BATCHES)
        if schedule:
            with engine._accumulation.schedule(), engine._sharded.held():
                losses = [engine(number) for number in numbers]
                for loss in reversed(losses):  # all forwards, then all backwards
                    engine.backward(loss)
            engine.step()
        else:
            for number in numbers:
                engine.backward(engine(number))
                engine.step()
        counts.append(status.number - before)
        norms.append(engine.get_global_grad_norm())
    assert engine.global_steps == STEPS
    found = {name: safe_get_full_fp32_param(param) for name, param in engine.module.named_parameters()}
    engine.destroy()
    return norms, found, counts


@pytest.mark.parametrize("way", ["pp 2 x dp 2", *longer("tp 2 x dp 2", "ep 2 x efsdp 2")])
@pytest.mark.parametrize("stage", [3, *longer(0, 1, 2)])
def test_a_schedule_has_the_bits_of_one_micro_batch_after_the_other_and_sends_once(pool: Any, way: str, stage: int):
    plain = pool.run(4, trained, way, stage, False)
    for (norms, weights, counts), (wanted, whole, before) in zip(
        pool.run(4, trained, way, stage, True), plain, strict=True
    ):
        assert norms == wanted and all(torch.equal(weights[name], whole[name]) for name in whole)
        assert counts[-1] < before[-1] if stage > 1 else counts[-1] <= before[-1]
