"""The promise: an `initialize` that fails half-way leaves a plain model, which the next one takes."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import config, make_net
from scenario import Model, run, same

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


def failed(stage: int, ranks: tuple[int, ...], late: bool = False) -> str:
    """What a failure says, in the third unit, or behind the last in what comes of them; the model is plain again."""
    net = make_net()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    with pytest.MonkeyPatch.context() as patch:
        if late:
            patch.setattr(importlib.import_module("zero.engine.initialize"), "Engine", lambda *_: 1 / 0)
        else:
            fail_at(patch, 2, ranks)
        with pytest.raises((MemoryError, RuntimeError, ZeroDivisionError)) as caught:
            zero.initialize(model=net, config=config(stage, 2, zero={"timeout": 60}))
    assert not any(hasattr(param, "_zero_owner") for param in net.parameters())
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in net.modules())
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    if len(ranks) == 2:  # where one rank has failed the process group is lost, and with it the next engine
        assert same(run(Model(lambda: net), stage), run("net", stage))
    return f"{caught.typename}: {caught.value}"


@pytest.mark.parametrize(("stage", "late"), [(0, False), (3, False), (2, True), (3, True)])
def test_a_model_is_plain_again_after_a_failure_on_all_ranks(pool, stage, late):
    said = "ZeroDivisionError: division by zero" if late else "MemoryError: no memory for this unit"
    assert pool.run(2, failed, stage, (0, 1), late) == [said, said]


def test_a_model_is_plain_again_after_a_failure_on_one_rank(pool):
    first, second = pool.run(2, failed, 1, (1,))
    assert "MemoryError: no memory for this unit" in first
    assert second == "MemoryError: no memory for this unit"


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
