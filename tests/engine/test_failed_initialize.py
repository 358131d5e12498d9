"""The promise: an `initialize` that fails half-way leaves a plain model, which the next one takes."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import batch, config, make_net

import zero
from zero.core.unit import Unit
from zero.memory.file_store import SwapFile
from zero.memory.pinned_arena import PinnedArena


def fail_at(patch: pytest.MonkeyPatch, index: int, ranks: tuple[int, ...]) -> None:
    """Let the unit with this index find no memory, on these ranks."""
    adopt = Unit.adopt

    def wrong(unit: Unit, *args: Any, **kwargs: Any) -> None:
        if unit.index == index and dist.get_rank() in ranks:
            raise MemoryError("no memory for this unit")
        adopt(unit, *args, **kwargs)

    patch.setattr(Unit, "adopt", wrong)


def losses_of(net: torch.nn.Module, stage: int) -> list[float]:
    engine, *_ = zero.initialize(model=net, config=config(stage, 2))
    losses = []
    for number in range(3):
        loss = engine(*(each[2 * dist.get_rank() :][:2] for each in batch(number, 4)))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.destroy()
    return losses


def failed(stage: int, ranks: tuple[int, ...], late: bool) -> dict[str, Any]:
    """What a failure leaves, in the third unit, or behind the last in what comes of them."""
    net = make_net()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    with pytest.MonkeyPatch.context() as patch:
        if late:
            patch.setattr(importlib.import_module("zero.engine.initialize"), "Engine", lambda *_: 1 / 0)
        else:
            fail_at(patch, 2, ranks)
        with pytest.raises((MemoryError, RuntimeError, ZeroDivisionError)) as caught:
            zero.initialize(model=net, config=config(stage, 2, zero={"timeout": 60}))
    return {
        "said": str(caught.value),
        "plain": not any(hasattr(param, "_zero_owner") for param in net.parameters()),
        "hooks": sum(len(module._forward_pre_hooks) + len(module._forward_hooks) for module in net.modules()),
        "equal": all(torch.equal(value, before[name]) for name, value in net.state_dict().items()),
        # Where one rank has failed the process group is lost, and with it the next engine.
        "trains": len(ranks) < 2 or losses_of(net, stage) == losses_of(make_net(), stage),
    }


@pytest.mark.parametrize(("stage", "late"), [(0, False), (3, False), (2, True), (3, True)])
def test_a_model_is_plain_again_after_a_failure_on_all_ranks(pool, stage, late):
    for after in pool.run(2, failed, stage, (0, 1), late):
        assert after.pop("said") == ("division by zero" if late else "no memory for this unit")
        assert after == {"plain": True, "hooks": 0, "equal": True, "trains": True}


def test_a_model_is_plain_again_after_a_failure_on_one_rank(pool):
    first, second = pool.run(2, failed, 1, (1,), False)
    assert "MemoryError: no memory for this unit" in first.pop("said")
    assert second.pop("said") == "no memory for this unit"
    assert first == second == {"plain": True, "hooks": 0, "equal": True, "trains": True}


@pytest.mark.ranks(2)
def test_what_is_kept_off_the_device_is_given_back_at_once(tmp_path):
    closed = []
    nvme = {"offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}, "offload_param": {"device": "cpu"}}
    with pytest.MonkeyPatch.context() as patch:
        for kind in (SwapFile, PinnedArena):
            patch.setattr(kind, "close", lambda each, close=kind.close: (closed.append(type(each)), close(each)))
        fail_at(patch, 2, (0, 1))
        with pytest.raises(MemoryError):
            zero.initialize(model=make_net(), config=config(3, 2, zero_optimization={"stage": 3, **nvme}))
        assert closed == [SwapFile, PinnedArena]
    assert list(tmp_path.iterdir()) == []
