"""Offloaded training is the same training: bit by bit, wherever optimizer state and parameters rest."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from marks import longer
from models import CODED, WIDE, WIDTH, config, make_net, train
from offload_cases import BOTH, HALF, OPTIMIZER, PARAMS, as_on_a_gpu
from ranks import Pool

BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True, "loss_scale": 128}}
TREE = {**BF16, "zero": {"reduce": "tree"}}


def moments(kind: str) -> dict[str, Any]:
    params = {"lr": 1e-2, "weight_decay": 0.1, "zero": {"moments": kind}}
    return {**BF16, "optimizer": {"type": "AdamW", "params": params}}


class Case(NamedTuple):
    """A training; `apart`: as on a GPU, where what the host updates is a copy of what the device computes with."""

    stage: int
    world: int
    accumulation: int = 1
    clipping: float = 0.5
    more: dict[str, Any] | None = None  # further sections of the JSON
    apart: bool = False
    steps: int = 3
    section: dict[str, Any] | None = None  # further keys of zero_optimization


def placements(stage: int, folder: str) -> list[dict[str, Any]]:
    """Sections of the JSON; parameters leave the device at stage 3 only."""

    def state(**more: Any) -> dict[str, Any]:
        return {"offload_optimizer": {"device": "nvme", "nvme_path": folder, **more}}

    def params(**more: Any) -> dict[str, Any]:
        return {"offload_param": {"device": "nvme", "nvme_path": folder, "max_in_cpu": 0, **more}}

    found = [OPTIMIZER, HALF, state(), state(buffer_count=1)]
    found.append(state(buffer_count=2, pipeline_read=False, pipeline_write=False, ratio=0.5))
    if stage == 3:
        found += [PARAMS, params(), BOTH, {**params(), **state()}, {**PARAMS, **state(buffer_count=1)}]
        found += [{**params(buffer_count=2), **OPTIMIZER}, {**params(max_in_cpu=500, buffer_count=1), **state()}]
    return found


def differing(case: Case, folder: str, placements: Any = placements) -> list[dict[str, Any]]:
    """The placements whose run differs from that which keeps all on the device."""

    def run(section: dict[str, Any]) -> dict[str, Any]:
        settings = config(case.stage, world, accumulation=case.accumulation, **(case.more or {}))
        section = {"stage": case.stage, **(case.section or {}), **section}
        settings |= {"gradient_clipping": case.clipping, "zero_optimization": section}
        return train(make_net(blocks=2, width=width), world, settings, case.steps)

    world, width = dist.get_world_size(), WIDE if "optimizer" in (case.more or {}) else WIDTH
    with as_on_a_gpu(case.apart):
        wanted, wrong = run({}), []
        assert len(set(wanted["losses"])) > 1, "it does not learn"
        for section in placements(case.stage, folder):
            found = run(section)
            same = all(torch.equal(found["params"][name], value) for name, value in wanted["params"].items())
            if not same or any(found[key] != wanted[key] for key in ("losses", "norms")):
                wrong.append(section)
    return wrong


CASES = [
    Case(1, 2),
    Case(2, 3, 3, more=BF16),
    Case(3, 2),
    Case(3, 1, clipping=0.0),
    Case(1, 2, 3, clipping=0.0, more=FP16, apart=True),
    Case(2, 2, more=moments("bf16")),
    Case(3, 2, more=moments("8bit"), apart=True),
    Case(2, 2, 4, more=TREE),
    Case(1, 2, 4, more=TREE, apart=True),
]
LONG = [
    Case(3, 3, 3, clipping=0.0, more=BF16, apart=True),
    *(Case(3, 2, 2, more=BF16, apart=apart, section=CODED) for apart in (False, True)),
    *(Case(stage, 2, steps=20) for stage in (1, 2, 3)),
    *(Case(stage, 2, more=moments(kind)) for stage, kind in ((3, "bf16"), (2, "8bit"))),
    *itertools.starmap(Case, itertools.product((1, 2, 3), (1, 2, 3), (1, 3), (0.5,), (None, BF16), (False, True))),
]


@pytest.mark.parametrize("case", [*CASES, *longer(*((case,) for case in LONG))], ids=str)
def test_losses_norms_and_weights_are_those_of_the_device(pool: Pool, tmp_path: Path, case: Case) -> None:
    assert pool.run(case.world, differing, case, str(tmp_path)) == [[]] * case.world
