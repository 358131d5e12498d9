"""The promise: whatever an index says, with a checksum that is right, it is refused by name or loads what was saved.

Nothing else is raised, by `zero verify` neither; nothing waits; and the engine trains and loads afterwards.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import re
import shutil
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoint_cases import FORMATS, Case, settings, states
from checkpoint_small import BF16, Small, assert_equal, engine_of, held, saved, train
from hypothesis import given
from hypothesis import strategies as st
from marks import longer
from models import WIDE, make_net
from torch import nn

import zero
from zero.checkpoint.index import Damaged
from zero.checkpoint.model_files import consolidate
from zero.checkpoint.verify import verify
from zero.core.owner import set_cut
from zero.engine.checkpoint.load_units import UnitLoader
from zero.plan.cut import Box, Cut, cover_error

CASE = Case(1, 3, format=FORMATS[3])  # bf16, remainders, moments in 8 bits
DEEP: list[Any] = []
for _ in range(900):
    DEEP = [DEEP]
HOSTILE = [
    *(None, True, -1, 0, 1, 2.5, 1e308, 2**63, 10**4000, math.inf, math.nan, [], {}, [[1]], [-1], DEEP),
    *("", "x", "/etc/passwd", "../a", "fifo", {"$tensor": "x"}, {"$none": 0}, {"$size": ["x"]}, {"$float": "x"}),
]
ANY = re.compile(r"client|config|versions|tag|shared\.state\.|shared\.deepspeed|excluded|rotates")  # may say what it likes


class Whole(nn.Module):
    """A net of which one matrix lies in boxes, with a buffer and a state of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_net(width=WIDE, blocks=1)
        rows, columns = self.net.blocks[0].down.weight.shape
        first = (rows // 2, columns)
        boxes = (Box((0, 0), first), Box((rows // 2, 0), first))
        set_cut(self.net.blocks[0].down.weight, Cut((rows, columns), boxes))
        self.register_buffer("seen", torch.arange(3))

    def get_extra_state(self) -> Any:
        return {"turns": (1, torch.ones(2))}

    def set_extra_state(self, state: Any) -> None:
        self.turns = state["turns"]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.net(tokens, tokens)


def made() -> Any:
    more = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}}}
    data = [torch.arange(at, at + 5) for at in range(9)]
    return zero.initialize(model=Whole(), config=settings(CASE, Path()) | more, training_data=data)[0]


def go_on(engine: Any) -> None:
    for _ in range(engine.gradient_accumulation_steps()):
        engine.backward(engine(torch.arange(10).view(2, 5)))
        engine.step()


def whole(folder: Path) -> dict[str, Any]:
    """Two checkpoints, and what an engine has from each."""
    engine, found = made(), {}
    for tag in "ab":
        go_on(engine)
        engine.save_checkpoint(folder, tag=tag, client_state={"best": torch.ones(3), "at": [1, 2]})
        found[tag] = states(engine)
    engine.destroy()
    return found


def written(place: Path, values: Any) -> None:
    """An index with the checksum of what it says."""
    text = json.dumps({key: value for key, value in values.items() if key != "crc32"})[:-1]
    (place / "index.json").write_text(f'{text},"crc32":{zlib.crc32(text.encode())}}}')


def damaged(values: Any, chosen: random.Random) -> str:
    """Change one thing somewhere; what and where."""
    path, at = [], values
    while True:
        keys = list(at) if isinstance(at, dict) else range(len(at))
        key = chosen.choice([key for key in keys if key not in ("format", "version", "crc32")])
        path.append(str(key))
        below = at[key]
        if not isinstance(below, (dict, list)) or not below or chosen.random() < 0.15:
            break
        at = below
    how = chosen.choice(["gone", "other", "other", "other", "near", "twice", "swapped"])
    if how == "near" and isinstance(below, (int, float)) and not isinstance(below, bool):
        at[key] = below + chosen.choice([-1, 1, 4, 1 << 20])
    elif how == "twice" and isinstance(at, list):
        at.insert(key, json.loads(json.dumps(below)))
    elif how == "swapped":
        other = chosen.choice([each for each in keys if each not in ("format", "version", "crc32")])
        at[key], at[other] = at[other], at[key]
    elif how == "gone":
        del at[key]
    else:
        how = f"other, {len(HOSTILE)}"
        at[key] = chosen.choice(HOSTILE)
    return f"{'.'.join(path)}: {how}"


def unequal(found: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    return [
        f"{key} of {name}"
        for name, kept in wanted.items()
        for key, value in kept.items()
        if not torch.equal(torch.as_tensor(found[name][key]), torch.as_tensor(value))
    ]


def check_one(engine: Any, folder: Path, wanted: dict[str, Any], what: str) -> bool:
    """Whether the damaged checkpoint "b" was refused; asserts all else."""
    place, before, error = folder / "b", states(engine), None
    problems = verify(place)
    try:
        engine.load_checkpoint(folder, tag="b")
        assert not unequal(states(engine), wanted["b"]), what
    except ValueError as refused:
        error = refused
        assert "b" in str(error) and len(str(error)) < 20_000, what
        assert problems or not isinstance(error, Damaged), f"{what}: {error}"
        if engine._status.half_loaded is None:
            assert not unequal(states(engine), before), what
            go_on(engine)
    else:
        go_on(engine)
    model = make_net(seed=3, width=WIDE, blocks=1)
    try:
        zero.load_weights(model, place, strict=False, rename=lambda name: name.removeprefix("net."))
        values = dict(model.named_parameters())
        assert all(torch.equal(values[name[4:]], kept["exact"]) for name, kept in wanted["b"].items()), what
        consolidate(place, folder / "model.safetensors")
    except ValueError:
        assert error is not None, what
    assert engine.load_checkpoint(folder, tag="a")[0], what
    assert not unequal(states(engine), wanted["a"]), what
    go_on(engine)
    return error is not None


def all_damages(folder: Path, seeds: range) -> tuple[int, int]:
    """How many were refused, and how many loaded."""
    wanted = whole(folder)
    text = (folder / "b" / "index.json").read_text()
    os.mkfifo(folder / "b" / "fifo")
    engine, refused = made(), 0
    for seed in seeds:
        values = json.loads(text)
        assert values["version"] == 2
        what = f"seed {seed}: {damaged(values, random.Random(seed))}"
        written(folder / "b", values)
        refused += check_one(engine, folder, wanted, what)
    engine.destroy()
    return refused, len(seeds) - refused


@pytest.mark.parametrize("seeds", [range(30), *longer(*(range(at, at + 40) for at in range(30, 430, 40)))], ids=str)
def test_a_random_damage_is_refused_or_changes_nothing(pool: Any, tmp_path: Path, seeds: range) -> None:
    """On a rank of the pool, which ends one that waits."""
    ((refused, _),) = pool.run(1, all_damages, tmp_path, seeds)
    assert refused > len(seeds) // 3
