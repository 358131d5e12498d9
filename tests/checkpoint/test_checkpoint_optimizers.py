"""The promise: our optimizers and torch's go on from each other's states, begun or not, and with no half gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_small import Small, assert_equal, engine_of, held, saved, train
from closeness import error, ulps

OURS_AND_TORCHS = [
    (
        {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        lambda params: torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1),
    ),
    (
        {"type": "SGD", "params": {"lr": 1e-2, "momentum": 0.9}},
        lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9),
    ),
    (
        {"type": "Adagrad", "params": {"lr": 1e-2, "initial_accumulator_value": 0.5}},
        lambda params: torch.optim.Adagrad(params, lr=1e-2, initial_accumulator_value=0.5),
    ),
]


@pytest.mark.parametrize(("ours", "made"), OURS_AND_TORCHS, ids=["AdamW", "SGD", "Adagrad"])
@pytest.mark.parametrize("backwards", [False, True])
def test_our_optimizers_and_torchs_load_each_others_states(
    tmp_path: Path, ours: Any, made: Any, backwards: bool
) -> None:
    def ends() -> list[Any]:
        return [engine_of(Small(), optimizer=ours), engine_of(Small(), made=made)]

    source, other = reversed(ends()) if backwards else ends()
    saved(tmp_path, source)
    other.load_checkpoint(tmp_path)
    wanted, found = held(source), held(other)  # one of them may count steps that the other does not
    both = wanted.keys() & found.keys()
    assert_equal({name: found[name] for name in both}, {name: wanted[name] for name in both})
    ours_losses, theirs_losses = (train(engine, 3, first=7) for engine in (source, other))
    assert error(ours_losses, theirs_losses) <= ulps(8, theirs_losses)
    other.load_checkpoint(tmp_path, load_optimizer_states=False)
    fresh = held(ends()[0 if backwards else 1])
    for name, value in held(other).items():
        if name.startswith(("exp_avg", "momentum", "sum", "step")):
            assert torch.equal(value, fresh[name]), name


def test_before_the_first_step(tmp_path: Path) -> None:
    for ours, made in OURS_AND_TORCHS:
        for number, source in enumerate((engine_of(Small(), optimizer=ours), engine_of(Small(), made=made))):
            folder = tmp_path / f"{ours['type']}{number}"
            source.save_checkpoint(folder)
            for engine in (engine_of(Small(), optimizer=ours), engine_of(Small(), made=made)):
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
    assert not engine._sharded.reducer.holds_gradients
    assert train(engine, 4, first=9) == losses
