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

import numpy.random  # noqa: F401 - only where it is imported is its generator in a checkpoint
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


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of one rank in bf16, at step 2."""
    folder = tmp_path_factory.mktemp("small")
    saved(folder, engine_of(Small(), **BF16))
    return folder / "global_step2"


def out_of(values: Any, *keys: str) -> Any:
    """Take this out of the index, and return it."""
    for key in keys[:-1]:
        values = values[key]
    return values.pop(keys[-1])


def other(value: Any, *keys: Any) -> Callable[[Any, Path], Any]:
    """Something else stands in this place of the index."""

    def change(values: Any, place: Path) -> None:
        for key in keys[:-1]:
            values = values[key]
        values[keys[-1]] = value

    return change


def moment_of_another(values: Any, place: Path) -> None:
    """Each of them is whole, and has as many elements as the header says."""
    moments = values["parameters"]["first.weight"]["moments"]
    moments["exp_avg"]["shape"] = moments["exp_avg"]["shape"][::-1]


def masters_gone(values: Any, place: Path) -> None:
    """Of all, with their file."""
    for parameter in values["parameters"].values():
        del parameter["master"]
    values["files"] = {name: size for name, size in values["files"].items() if not name.startswith("masters")}


def a_pipe(values: Any, place: Path) -> None:
    """For a file with the name of one that a save has made."""
    name = next(name for name in values["files"] if name.startswith("weights"))
    (place / name).unlink()
    os.mkfifo(place / name)


PART = ("parameters", "first.weight", "weight", "parts", 0)
RANDOM = ("ranks", 0, "state", "random")
# What is done to the index, and what is said of it.
WRONG: dict[str, tuple[Callable[[Any, Path], Any], str]] = {
    "a moment of another shape": (moment_of_another, r"exp_avg of 'first.weight' has shape \(6, 5\), and the weight"),
    "a master taken out": (
        lambda values, place: out_of(values, "parameters", "first.weight", "master"),
        r"the header of masters\S* has 'master/first.weight', and the index does not",
    ),
    "all masters and their file taken out": (
        masters_gone,
        r"masters\S* is of this save, and the index does not name it",
    ),
    "a moment taken out": (
        lambda values, place: out_of(values, "parameters", "first.bias", "moments", "exp_avg"),
        r"has 'exp_avg/first.bias', and the index does not",
    ),
    "too few checksums": (other([], *PART, 4), r"has 0 checksums of its 60 bytes there"),
    "no checksums": (other(None, *PART, 4), r"has 0 checksums of its 60 bytes there"),
    "a file of the system": (other(9, "files", "/etc/passwd"), r"String should match.*got '/etc/passwd'"),
    "a pipe": (a_pipe, r"weights\S* is no file"),
    "a size of 2^63": (other([2**63], "buffers", "norm.running_mean", "shape"), "less than 9223372036854775808"),
    "many sizes": (other([1] * 10**5, "buffers", "norm.running_mean", "shape"), "at most 64 items"),
    "a step that is infinite": (
        other(math.inf, "parameters", "first.bias", "numbers", "step"),
        "Infinity is no number",
    ),
    "half a step of a parameter": (
        other(2.5, "parameters", "first.bias", "numbers", "step"),
        "step of 'first.bias' is 2.5",
    ),
    "half a step": (other(2.5, "shared", "global_steps"), "shared.global_steps: Input should be a valid integer"),
    "a counter below 0": (
        other(-1, "shared", "state", "counters", "global_steps"),
        "counters.global_steps.*equal to 0",
    ),
    "another counter": (other(3, "shared", "state", "counters", "global_steps"), "has step 3, and the index 2"),
    "a counter of 1e308": (other(1e308, "shared", "state", "counters", "micro_steps"), "counters.micro_steps"),
    "nesting": (other(DEEP, "config"), "levels deep"),
    "another generator": (other("default_rng", *RANDOM, "numpy", "bit_generator"), "'MT19937', 'PCG64', 'PCG64DXSM'"),
    "a place outside of a generator": (other(10**6, *RANDOM, "numpy", "state", "pos"), "a place outside of its words"),
    "a rank without a state": (other({}, "ranks", 0), "there is no state of rank 0"),
    "a tensor that nothing uses": (other(None, "ranks", 0, "state"), "'rank_state/0/0' is there and not used"),
    "more ranks than files say": (lambda values, place: values["ranks"].append(None), "is no file of save"),
    "a group that is not there": (other(7, "parameters", "first.bias", "group"), "parameters are in group 7"),
}


@pytest.mark.parametrize("what", WRONG)
def test_it_is_named_before_anything_changes(tmp_path: Path, small: Path, what: str) -> None:
    place = tmp_path / small.name
    shutil.copytree(small, place)
    (values, (change, text)) = json.loads((place / "index.json").read_text()), WRONG[what]
    change(values, place)
    written(place, values)
    assert any(re.search(text, problem) for problem in verify(place)), verify(place)
    engine = engine_of(Small(), **BF16)
    train(engine, 1)
    before = held(engine)
    with pytest.raises(ValueError, match=str(tmp_path)) as caught:
        engine.load_checkpoint(tmp_path, tag=small.name)
    # What does not fit the engine is told before headers are read.
    assert re.search(text, str(caught.value)) or what in ("a moment taken out", "a group that is not there")
    assert_equal(held(engine), before)
    train(engine, 1)
    assert engine.load_checkpoint(small.parent, tag=small.name)[0]
    engine.destroy()


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [("lr", None, "TypeError"), ("lr", -1, "wanted a finite number"), ("betas", [0.9], "not enough values")],
)
def test_hyperparameters_that_no_step_can_use(tmp_path: Path, small: Path, key: str, value: Any, text: str) -> None:
    shutil.copytree(small, tmp_path / "x")
    values = json.loads((tmp_path / "x" / "index.json").read_text())
    values["shared"]["state"]["groups"][0][key] = value
    written(tmp_path / "x", values)
    engine = engine_of(Small(), **BF16)
    before = held(engine)
    with pytest.raises(ValueError, match=f"parameter group 0 is of no use: .*{text}"):
        engine.load_checkpoint(tmp_path, tag="x")
    assert_equal(held(engine), before)
    engine.load_checkpoint(tmp_path, tag="x", load_optimizer_states=False, load_lr_scheduler_states=False)


def refuse(*args: Any, **kwargs: Any) -> None:
    raise IndexError("tuple index out of range")


class Refusing(Small):
    """Raises on rank 1 when it gets its state."""

    def get_extra_state(self) -> Any:
        return {}

    def set_extra_state(self, state: Any) -> None:
        if dist.get_rank() == 1 and state.get("now", True):
            raise KeyError("turns")


@contextlib.contextmanager
def breaking(where: str, engine: Any) -> Iterator[dict[str, Any]]:
    """On rank 1 a load raises an error that no checkpoint should cause; gives arguments of the load."""
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1 and where in ("look", "read", "random numbers"):
            target, name = {
                "look": (engine._loading, "_fitted"),
                "read": (UnitLoader, "load"),
                "random numbers": (random, "setstate"),
            }[where]
            patch.setattr(target, name, refuse)
        function = refuse if dist.get_rank() == 1 else lambda src, dst: None
        yield {"custom_load_fn": function} if where == "custom_load_fn" else {}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("where", ["look", "read", "random numbers", "custom_load_fn", *longer("module")])
def test_any_error_of_one_rank_is_told_to_all(tmp_path: Path, where: str) -> None:
    """And the next load is right, after which training goes on."""
    stage = 1 if where == "read" else 3
    engine = saved(tmp_path, engine_of((Refusing if where == "module" else Small)(), stage=stage))
    wanted, losses = held(engine), train(engine, 1, first=7)
    kind = "KeyError: 'turns'" if where == "module" else "IndexError: tuple index out of range"
    with breaking(where, engine) as options, pytest.raises(ValueError, match=f"^load_checkpoint: .*{kind}"):
        engine.load_checkpoint(tmp_path, **options)
    if where == "module":
        engine.module.set_extra_state = lambda state: None
    if where == "look":
        train(engine, 1)
    else:
        with pytest.raises(RuntimeError, match="half loaded"):
            engine.step()
    engine.load_checkpoint(tmp_path)
    assert_equal(held(engine), wanted)
    assert train(engine, 1, first=7) == losses
    engine.destroy()


@st.composite
def boxes_of(draw: Any) -> tuple[tuple[int, ...], list[Box]]:
    """A small shape, and boxes that may be all of it: cut again and again, and some changed."""
    shape = tuple(draw(st.lists(st.integers(1, 4), max_size=3)))
    boxes = [Box((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 6)) if shape else 0):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        first = draw(st.integers(0, box.sizes[dim]))
        for offset, size in ((0, first), (first, box.sizes[dim] - first)):
            if size:
                offsets = [at + offset * (axis == dim) for axis, at in enumerate(box.offset)]
                boxes.append(Box(tuple(offsets), (*box.sizes[:dim], size, *box.sizes[dim + 1 :])))
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, len(boxes) - 1))
        sizes = tuple(draw(st.integers(1, size - first)) for first, size in zip(boxes[at].offset, shape, strict=True))
        boxes[at] = Box(boxes[at].offset, sizes)
    return shape, boxes


@given(boxes_of())
def test_boxes_are_all_of_a_tensor_once(case: tuple[tuple[int, ...], list[Box]]) -> None:
    """Against counting for each element."""
    shape, boxes = case
    counts = torch.zeros(shape, dtype=torch.int64)
    for box in boxes:
        counts[tuple(slice(at, at + size) for at, size in zip(*box, strict=True))] += 1
    error = cover_error(shape, boxes)
    assert (error is None) == bool((counts == 1).all())
    if error is not None:
        element = tuple(map(int, re.findall(r"\d+", error.partition(")")[0])))
        assert f"lies in {counts[element].item()} of its {len(boxes)} boxes" in error


def test_many_boxes_are_not_compared_in_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, plain = [0], Box.intersect

    def counted(one: Box, other: Box) -> Box | None:
        calls[0] += 1
        return plain(one, other)

    monkeypatch.setattr(Box, "intersect", counted)
    boxes = [Box((row, column), (1, 1)) for row in range(50) for column in range(50)]
    assert cover_error((50, 50), boxes) is None
    assert cover_error((50, 50), boxes[:-1]) == "element (49, 49) lies in 0 of its 2499 boxes, not in 1"
    assert "lies in 2 of" in cover_error((50, 50), [*boxes, boxes[7]])
    assert calls[0] < 4 * len(boxes)
