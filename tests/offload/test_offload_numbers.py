"""Offloaded training is the same training: bit by bit, wherever optimizer state and parameters rest."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from models import config, make_net, train

CPU = {"device": "cpu"}
STEPS = 20


def placements(stage: int, folder: str) -> dict[str, dict[str, Any]]:
    """Sections of the JSON by what is said of them; parameters leave the device at stage 3 only."""
    nvme = {"device": "nvme", "nvme_path": folder}
    found = {
        "optimizer on cpu": {"offload_optimizer": CPU},
        "half of the optimizer on cpu": {"offload_optimizer": {**CPU, "ratio": 0.5}},
        "optimizer on nvme": {"offload_optimizer": nvme},
    }
    if stage == 3:
        shards = {**nvme, "max_in_cpu": 0}
        found |= {
            "parameters on cpu": {"offload_param": CPU},
            "parameters on nvme": {"offload_param": shards},
            "both on cpu": {"offload_param": CPU, "offload_optimizer": CPU},
            "both on nvme": {"offload_param": shards, "offload_optimizer": nvme},
        }
    return found


def differing(
    stages: list[int], cases: list[tuple[int, float]], steps: int, folder: str, mirrored: bool, more: dict[str, Any]
) -> tuple[int, list[str]]:
    """How many offloaded runs there were, and which of them differ from the run that keeps all on the device."""
    import torch.distributed as dist

    import zero.core.offload

    world, count, wrong = dist.get_world_size(), 0, []
    patch = pytest.MonkeyPatch()
    if mirrored:  # as on a GPU: what the host updates is a copy of what the device computes with
        patch.setattr(zero.core.offload, "has_own_memory", lambda device: True)
    for stage, (accumulation, clipping) in itertools.product(stages, cases):

        def run(section: dict[str, Any], stage: int = stage, a: int = accumulation, c: float = clipping) -> dict:
            zero_section = {"stage": stage, **section}
            settings = config(stage, world, accumulation=a, **{**more, "gradient_clipping": c})
            return train(make_net(blocks=2), world, {**settings, "zero_optimization": zero_section}, steps)

        wanted = run({})
        for name, section in placements(stage, folder).items():
            got, count = run(section), count + 1
            same = all(torch.equal(got["params"][key], wanted["params"][key]) for key in wanted["params"])
            if not same or got["losses"] != wanted["losses"] or got["norms"] != wanted["norms"]:
                wrong.append(f"stage {stage}, {name}, accumulation {accumulation}, clipping {clipping}")
    patch.undo()
    return count, wrong


def check(pool: Any, world: int, *args: Any) -> None:
    """All ranks must have run something, and found no difference."""
    found = pool.run(world, differing, *args)
    assert all(count > 0 for count, _ in found)
    assert [wrong for _, wrong in found] == [[]] * world


@pytest.mark.parametrize("world", [1, 2, 3])
def test_losses_norms_and_weights_are_those_of_the_device(pool: Any, tmp_path: Any, world: int) -> None:
    check(pool, world, [1, 2, 3], [(1, 0.5)], STEPS if world == 2 else 4, str(tmp_path), False, {})


@pytest.mark.parametrize("world", [1, 3])
def test_accumulation_and_clipping_change_nothing(pool: Any, tmp_path: Any, world: int) -> None:
    check(pool, world, [2, 3], [(1, 0.0), (3, 0.5)], 3, str(tmp_path), False, {})


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_device_with_memory_of_its_own(pool: Any, tmp_path: Any, precision: str) -> None:
    more = {} if precision == "fp32" else {precision: {"enabled": True}}
    check(pool, 2, [1, 3], [(1, 0.5), (3, 0.0)], 3, str(tmp_path), True, more)


@pytest.mark.parametrize("moments", ["bf16", "8bit"])
def test_moments_in_fewer_bits(pool: Any, tmp_path: Any, moments: str) -> None:
    params = {"lr": 1e-2, "weight_decay": 0.1, "zero": {"moments": moments}}
    more = {"bf16": {"enabled": True}, "optimizer": {"type": "AdamW", "params": params}}
    check(pool, 2, [2, 3], [(1, 0.5)], 4, str(tmp_path), False, more)


@pytest.mark.parametrize("world", [1, 2])
def test_micro_batches_that_add_up_as_a_tree(pool: Any, tmp_path: Any, world: int) -> None:
    more = {"bf16": {"enabled": True}, "zero": {"reduce": "tree"}}
    check(pool, world, [2], [(4, 0.5)], 2, str(tmp_path), False, more)
    check(pool, world, [1], [(4, 0.5)], 2, str(tmp_path), True, more)
