"""The promise: a checkpoint loads at any number of ranks, stage, placement, precision and format of the state.

Exact values and moments come back bit by bit (moments in fewer bits: their rounding), and so do the losses of the steps
that follow, wherever the order of sums is the same: with the same ranks, and under zero.reduce "tree" with others.

A pair of configurations load each other's checkpoint; among the long tests each that of one other, and with other
formats those of two more.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoint_cases import FORMATS, PLACES, Case, differing, engine_of, states, step
from marks import longer
from models import WIDE, make_net

FIRST, MORE = 3, 5  # steps before the first save, and after each


def cases(seed: int) -> list[Case]:
    """All numbers of ranks, stages and placements, in an order in which neighbours differ, each with some format."""
    found = [Case(world, stage, place) for world in (1, 2, 3, 4) for stage, place in PLACES]
    random.Random(seed).shuffle(found)
    return [case._replace(format=FORMATS[(index // 3 + seed) % len(FORMATS)]) for index, case in enumerate(found)]


def same_sums(one: Case, other: Case) -> bool:
    """Whether both add up in one order and round alike."""
    return one.format == other.format and (one.world == other.world or 3 not in (one.world, other.world))


def save_first(case: Case, folder: Path) -> None:
    """Some steps, a checkpoint, and what the uninterrupted run does after it."""
    with engine_of(case, folder) as engine:
        for number in range(FIRST):
            step(engine, number)
        keep(engine, folder)


def keep(engine: Any, folder: Path) -> None:
    """Save; leave beside it what there is and what comes."""
    engine.save_checkpoint(folder, tag="all")
    found = states(engine)
    losses = [step(engine, FIRST + number) for number in range(MORE)]
    if dist.get_rank() == 0:
        torch.save((found, losses), folder / "facts")
    dist.barrier()


def look(engine: Any, case: Case, folder: Path, before: Case) -> list[str]:
    """Load what `before` has saved in `folder`; what is wrong."""
    path, _ = engine.load_checkpoint(folder)
    saved, losses = torch.load(folder / "facts")
    lines = differing(states(engine), saved, case, before)
    lines += [] if path == str(folder / "all") else [f"path {path}"]
    lines += [] if engine.global_steps == FIRST else [f"{engine.global_steps} steps"]
    if same_sums(case, before):
        found = [step(engine, FIRST + number) for number in range(MORE)]
        lines += [] if found == losses else [f"losses {found}, not {losses}"]
    return lines


def link(case: Case, folder: Path, before: Case, its: Path) -> list[str]:
    """Load it twice, the second time over a trained engine, and save it again."""
    with engine_of(case, folder, make_net(seed=8, width=WIDE, blocks=1)) as engine:
        lines = look(engine, case, its, before)
        step(engine, 99)
        engine.load_checkpoint(its)
        keep(engine, folder)
    return lines


def folders(tmp_path: Path, count: int) -> list[Path]:
    found = [tmp_path / str(index) for index in range(count)]
    for folder in found:
        folder.mkdir()
    return found


SEEDS = (4, 5, 6)
PARTS = 24
SHORT = (12, 4)  # four ranks and two, stages 3 and 2, in files and apart from the device
LONG = [(part, seed) for seed in SEEDS for part in range(PARTS) if (part, seed) != SHORT]


@pytest.mark.parametrize(("part", "seed"), [SHORT, *longer(*LONG)])
def test_every_configuration_loads_what_another_saved(pool: Any, tmp_path: Path, part: int, seed: int) -> None:
    chosen = cases(seed)[part::PARTS]
    places = folders(tmp_path, len(chosen) + 1)
    pool.run(chosen[-1].world, save_first, chosen[-1], places[-1])
    before, its = chosen[-1], places[-1]
    for case, folder in zip(chosen, places, strict=False):
        for lines in pool.run(case.world, link, case, folder, before, its):
            assert not lines, f"{case} from {before}: {lines}"
        before, its = case, folder
