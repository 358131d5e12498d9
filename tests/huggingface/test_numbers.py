"""The promise: one Trainer script has the same losses, bit for bit, on every stage, with and without offload.

Without any of this Trainer has them, too, but for the order of sums.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from huggingface_cases import all_trained, settings
from ranks import Pool

OPTIMIZER = {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")}
CPU = {"device": "cpu"}


def configs() -> list[dict[str, Any]]:
    plain = [settings(number) for number in range(4)]
    offloaded = [settings(number, offload_optimizer=CPU) for number in (1, 2, 3)]
    away = settings(3, offload_optimizer=CPU, offload_param=CPU)
    every = {"zero": {"reduce_every_micro_batch": True}, "optimizer": OPTIMIZER}
    return [{**config, **every} for config in [*plain, *offloaded, away]]


@pytest.mark.long
@pytest.mark.parametrize(("world", "accumulation"), [(2, 1), (2, 2), (1, 1), (1, 2)])
def test_losses_are_the_same_bits_on_all_stages(
    door: Pool, tiny: Path, tmp_path: Path, world: int, accumulation: int
) -> None:
    more = {"gradient_accumulation_steps": accumulation}
    runs = door.run(world, run_all, str(tiny), str(tmp_path), configs(), more)[0]
    plain, (first, *others) = runs[-1], runs[:-1]
    assert len(first[0]) == 10
    for other in others:
        assert other == first
    assert first[0] == pytest.approx(plain[0], rel=1e-5, abs=0)


def run_all(model: str, out: str, some: list[dict[str, Any]], more: dict[str, Any]) -> list[Any]:
    return all_trained(model, out, [*some, None], **more)
