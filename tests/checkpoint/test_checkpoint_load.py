"""The promise: what a load brings is what was saved, whichever way it takes, and a bad byte is noticed on each."""

from __future__ import annotations

import zlib
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_small import BF16, Small, assert_equal, engine_of, held, saved, train
from closeness import error, ulps
from marks import each_once

from zero.checkpoint.index import CHUNK, Damaged, Part
from zero.checkpoint.safe_file import read_part

SIZE = 3 * CHUNK + 1234


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "bytes"
    found.write_bytes(torch.randint(0, 256, (SIZE,), dtype=torch.uint8).numpy().tobytes())
    return found


@pytest.mark.parametrize("skip", [0, 5, CHUNK, CHUNK + 17])
def test_every_chunk_that_is_wanted_is_checked(path: Path, skip: int) -> None:
    """Whole ones in their place, and those of which a part is wanted beside it."""
    data = path.read_bytes()
    sums = tuple(zlib.crc32(data[begin : begin + CHUNK]) for begin in range(0, SIZE, CHUNK))
    part = Part(0, SIZE, path.name, 0, sums)
    for nbytes in (SIZE - skip, SIZE - skip - 3, CHUNK + 9):
        target = bytearray(nbytes)
        with open(path, "rb") as file:
            read_part(file.fileno(), part, skip, memoryview(target), 1, "weight")
            assert target == data[skip : skip + nbytes]
            for number in range(skip // CHUNK, -(-(skip + nbytes) // CHUNK)):
                wrong = part._replace(crc32=tuple(one ^ (place == number) for place, one in enumerate(sums)))
                with pytest.raises(Damaged, match=f"bytes {number * CHUNK} to .* are not what was saved"):
                    read_part(file.fileno(), wrong, skip, memoryview(bytearray(nbytes)), 1, "weight")


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("stage", "more"), each_once([1, 2], [{}, BF16]))
def test_parameters_that_ranks_keep_whole_are_loaded_whole(tmp_path: Path, stage: int, more: dict[str, Any]) -> None:
    engine = saved(tmp_path, engine_of(Small(), stage=stage, **more))
    wanted, losses = held(engine), train(engine, 2, first=7)
    train(engine, 1, first=20)
    engine.load_checkpoint(tmp_path)
    # Each rank's own copy, which is what it computes with, and not what a gather would bring.
    for name, param in engine.module.named_parameters():
        assert torch.equal(param.detach(), wanted[name]), name
    assert_equal(held(engine), wanted)
    assert train(engine, 2, first=7) == losses
    engine.destroy()


class Seeing(torch.nn.Identity):
    """Its state beside the buffers is a tensor."""

    seen = torch.zeros(2)

    def get_extra_state(self) -> torch.Tensor:
        return self.seen

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.seen = state


class Telling(Small):
    """Gives a state of its own in three ways, none of which is a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.words, self.eye = 0.0, ["none"], Seeing()

    def get_extra_state(self) -> Any:
        return {"words": self.words}

    def set_extra_state(self, state: Any) -> None:
        self.words = state["words"]

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}count"] = torch.tensor(self.count)

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        self.count = state.pop(f"{prefix}count", torch.tensor(self.count)).item()
        super()._load_from_state_dict(state, prefix, *rest)


@pytest.mark.parametrize("only", [False, True])
def test_what_modules_make_for_a_state_dict_they_get_back(tmp_path: Path, only: bool) -> None:
    model = Telling()
    engine = engine_of(model)
    model.count, model.words, model.eye.seen = 3.5, ["some"], torch.ones(2)
    saved(tmp_path, engine)
    other = Telling()
    loaded = engine_of(other)
    loaded.load_checkpoint(tmp_path, load_module_only=only)
    assert (other.count, other.words, other.eye.seen.tolist()) == (3.5, ["some"], [1.0, 1.0])
    assert torch.equal(other.norm.running_var, model.norm.running_var)


def test_buffers_that_no_file_holds(tmp_path: Path) -> None:
    saved(tmp_path, engine_of(Small()))
    model = Small()
    model.register_buffer("turns", torch.ones(2, dtype=torch.complex64))
    engine = engine_of(model)
    with pytest.raises(ValueError, match=r"not in the checkpoint: 'turns'"):
        engine.load_checkpoint(tmp_path)
    engine.load_checkpoint(tmp_path, load_module_strict=False)
    assert engine.global_steps == 2


# Our optimizers and torch's go on from each other's states, begun or not, and with no half gradients.
OURS_AND_TORCHS = [
    ("AdamW", {"lr": 1e-2, "weight_decay": 0.1}),
    ("SGD", {"lr": 1e-2, "momentum": 0.9}),
    ("Adagrad", {"lr": 1e-2, "initial_accumulator_value": 0.5}),
]


def ends(kind: str, params: dict[str, float]) -> list[Any]:
    """An engine with our optimizer, and one with torch's."""
    made = partial(getattr(torch.optim, kind), **params)
    return [engine_of(Small(), optimizer={"type": kind, "params": params}), engine_of(Small(), made=made)]


@pytest.mark.parametrize(("kind", "params"), OURS_AND_TORCHS)
@pytest.mark.parametrize("backwards", [False, True])
def test_our_optimizers_and_torchs_load_each_others_states(
    tmp_path: Path, kind: str, params: dict[str, float], backwards: bool
) -> None:
    source, other = reversed(ends(kind, params)) if backwards else ends(kind, params)
    saved(tmp_path, source)
    other.load_checkpoint(tmp_path)
    wanted, found = held(source), held(other)  # one of them may count steps that the other does not
    both = wanted.keys() & found.keys()
    assert_equal({name: found[name] for name in both}, {name: wanted[name] for name in both})
    ours_losses, theirs_losses = (train(engine, 3, first=7) for engine in (source, other))
    assert error(ours_losses, theirs_losses) <= ulps(8, theirs_losses)
    other.load_checkpoint(tmp_path, load_optimizer_states=False)
    fresh = held(ends(kind, params)[0 if backwards else 1])
    for name, value in held(other).items():
        if name.startswith(("exp_avg", "momentum", "sum", "step")):
            assert torch.equal(value, fresh[name]), name


def test_before_the_first_step(tmp_path: Path) -> None:
    for kind, params in OURS_AND_TORCHS:
        for number, source in enumerate(ends(kind, params)):
            folder = tmp_path / f"{kind}{number}"
            source.save_checkpoint(folder)
            for engine in ends(kind, params):
                begun = held(engine)
                train(engine)
                engine.load_checkpoint(folder)
                assert_equal(held(engine), begun)


def test_an_open_window_is_dropped(tmp_path: Path) -> None:
    engine = engine_of(Small(), gradient_accumulation_steps=2)
    train(engine, 4)
    engine.save_checkpoint(tmp_path)
    wanted, losses = held(engine), train(engine, 4, first=9)
    engine.load_checkpoint(tmp_path)
    train(engine, 1, first=30)
    engine.load_checkpoint(tmp_path)
    assert_equal(held(engine), wanted)
    assert train(engine, 4, first=9) == losses
