"""The promise: ranks that own different numbers of engines, in different groups, watch, save and name each other."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from models import batch, config, make_net
from ranks import Pool

import zero


def engine_in(group: dist.ProcessGroup, stage: int) -> Any:
    mpu = SimpleNamespace(get_data_parallel_group=lambda: group)
    return zero.initialize(model=make_net(), config=config(stage, dist.get_world_size(group)), mpu=mpu)[0]


def train(engine: Any, number: int) -> None:
    engine.backward(engine(*batch(number, 2)))
    engine.step()


def refuse(module: Any, args: Any) -> None:
    raise ValueError("bad batch")


def in_pairs(folder: str) -> dict[str, Any]:
    """Ranks 0 and 1 have an engine of their own, 2 and 3 have two, of two groups, and all four have one more."""
    rank = dist.get_rank()
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [2, 3])]
    engines = {str(index): engine_in(groups[index], 3) for index in ((0,) if rank < 2 else (1, 2))}
    engines["all"] = engine_in(dist.group.WORLD, 1)
    for name, engine in reversed(engines.items()):
        train(engine, 0)
        engine.save_checkpoint(f"{folder}/{name}")
    for name, engine in engines.items():
        engine.load_checkpoint(f"{folder}/{name}")
        train(engine, 1)

    text = ""
    if rank >= 2:  # the others go on
        engine = engines.pop("2")
        if rank == 3:
            engine.module.blocks[1].register_forward_pre_hook(refuse)
        try:
            train(engine, 2)
        except (RuntimeError, ValueError) as error:
            text = str(error)
    for engine in engines.values():
        train(engine, 2)
        engine.destroy()
    return {"text": text, "saved": sorted(os.listdir(folder))}


def test_ranks_that_own_different_numbers_of_engines(pool: Pool, tmp_path: Path) -> None:
    found = pool.run(4, in_pairs, str(tmp_path))
    assert [each["saved"] for each in found] == [["0", "1", "2", "all"]] * 4
    assert found[2]["text"].startswith("rank 3 raised ValueError: bad batch"), "global ranks are named"
