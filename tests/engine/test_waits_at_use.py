"""The promise: a step of stages 1 and 2 ends with the gathers of new parameters in flight; who reads some waits for it.

And nobody reads old values: whatever way a parameter is read after `step()`, the values are those of all ranks.
"""

from __future__ import annotations

import copy
import ctypes
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import make_net, share
from scenario import settings
from torch import nn

import zero
from zero.core import comm, late_gather
from zero.core.param_buffer import State
from zero.core.unit import Unit


def recorded(patch: pytest.MonkeyPatch) -> list[str]:
    """From now on the names of units, each as a message of its is waited for."""
    seen: list[str] = []
    wait = Unit._wait_transfer

    def waited(unit: Unit) -> None:
        if unit._transfer is not None and unit._transfer.works:
            seen.append(unit.plan.name)
        wait(unit)

    patch.setattr(Unit, "_wait_transfer", waited)
    return seen


def trained(stage: int, model: nn.Module | None = None, **more: Any) -> Any:
    """An engine after one step."""
    model = make_net(blocks=3) if model is None else model
    engine, *_ = zero.initialize(model=model, config=settings(stage, 2, zero={"units": ["blocks.*"]}, **more))
    train(engine, 0)
    return engine


def train(engine: Any, step: int) -> None:
    engine.backward(engine(*share(step)))
    engine.step()


def coming(engine: Any) -> list[str]:
    return [unit.plan.name for unit in engine._sharded.units if unit.state is State.GATHERING]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_forward_begins_before_what_it_reads_last_has_come(stage):
    more = {"section": {"stage3_param_persistence_threshold": 10**6, "stage3_model_persistence_threshold": 10**6}}
    engine = trained(stage, **(more if stage == 3 else {}))
    names = [unit.plan.name for unit in engine._sharded.units]
    assert set(coming(engine)) == set(names) and len(names) == 4
    with pytest.MonkeyPatch.context() as patch:
        order = recorded(patch)
        for name in names[1:]:
            block = engine.module.get_submodule(name)
            block.up.register_forward_pre_hook(lambda *_, name=name: order.append(f"in {name}"))
        loss = engine(*share(1))
    assert order.index("in blocks.0") < order.index("blocks.1") < order.index("in blocks.1") < order.index("blocks.2")
    engine.backward(loss)
    engine.step()
    engine.destroy()


def values(module: nn.Module) -> list[torch.Tensor]:
    return [param.detach().clone() for param in module.parameters()]


READS: dict[str, Callable[[nn.Module], list[torch.Tensor]]] = {
    "data": lambda module: [param.data.clone() for param in module.parameters()],
    "state_dict": lambda module: [value.clone() for value in module.state_dict().values()],
    "numpy": lambda module: [torch.from_numpy(param.detach().numpy().copy()) for param in module.parameters()],
    "deepcopy": lambda module: values(copy.deepcopy(module)),
    "list": lambda module: list(torch._foreach_mul(list(module.parameters()), 1.0)),
    "address": lambda module: [
        torch.frombuffer((ctypes.c_float * param.numel()).from_address(param.data_ptr()), dtype=param.dtype)
        .view(param.shape)
        .clone()
        for param in module.parameters()
    ],
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("way", READS)
def test_every_read_behind_a_step_gives_new_values(way):
    whole, late = trained(0), trained(2)
    assert len(coming(late)) == 4 and not coming(whole)
    for expected, found in zip(values(whole.module), READS[way](late.module), strict=True):
        assert torch.equal(expected, found)
    assert not coming(late)


@pytest.mark.ranks(2)
def test_torch_distributed_is_given_new_values():
    """Its backends read memory without asking a tensor; of a parameter that is cut it says so, and reads nothing."""
    whole, late, cut = trained(0), trained(2), trained(3)
    names = ("up.weight", "up.bias", "down.weight", "down.bias")
    expected, found, away = (
        [engine.module.blocks[0].get_parameter(name) for name in names] for engine in (whole, late, cut)
    )
    rows = [torch.empty_like(expected[0]) for _ in range(2)]
    assert coming(late) == ["<root>", "blocks.0", "blocks.1", "blocks.2"]
    dist.all_gather(rows, found[0])
    assert all(torch.equal(row, expected[0]) for row in rows) and "blocks.0" not in coming(late)
    train(whole, 1)
    train(late, 1)
    with torch.no_grad():
        dist.broadcast(found[1], 0)
    assert torch.equal(expected[1], found[1])
    with pytest.raises(RuntimeError, match="is released"):
        dist.broadcast(away[1], 0)


@pytest.mark.ranks(2)
def test_views_that_somebody_keeps_are_new_when_the_step_returns():
    """A `state_dict()` from before training, or a list of `.data`; once they are gone, steps leave gathers again."""
    whole, late = trained(0), trained(2)
    old = late.module.blocks[1].state_dict()
    train(whole, 1)
    train(late, 1)
    assert "blocks.1" not in coming(late) and len(coming(late)) == 3
    for name, expected in whole.module.blocks[1].state_dict().items():
        assert torch.equal(expected, old[name])
    del old
    train(late, 2)
    assert len(coming(late)) == 4


@pytest.mark.ranks(2)
def test_compiled_code_sees_plain_parameters():
    """What is compiled before has no hooks; what is compiled later comes at once from then on, in one piece."""
    before = make_net(blocks=3)
    before.compile(backend="eager", fullgraph=True)
    assert not coming(trained(2, before))
    whole, late = trained(0), trained(2)
    torch.compiler.reset()  # which drops what is to be done before a compilation
    run = torch.compile(lambda *batch: late.module(*batch), backend="eager", fullgraph=True)
    losses = []
    for step in range(1, 3):
        loss = whole(*share(step))
        losses.append((run(*share(step)), loss))
        whole.backward(loss)
        late.backward(losses[-1][0])
        whole.step()
        late.step()
    assert all(torch.equal(*pair) for pair in losses)
    assert not coming(late)


@pytest.mark.ranks(2)
def test_a_function_that_is_compiled_between_steps_reads_new_values():
    """And code that is generated for it reads memory without asking: from then on all is there at the step's end."""
    engine = trained(2)
    norm = torch.compile(lambda weight: weight.square().sum(), backend="aot_eager")
    train(engine, 1)
    weight = engine.module.blocks[2].up.weight
    assert coming(engine)
    for step in (2, 3):
        found = norm(weight)
        assert type(weight) is nn.Parameter and not coming(engine)
        assert torch.equal(found, weight.square().sum())
        train(engine, step)


@pytest.mark.ranks(2)
def test_what_asks_for_hooks_finds_none():
    layer = nn.TransformerEncoderLayer(12, 2, batch_first=True)
    net = make_net(blocks=3)
    net.blocks[1] = layer
    engine = trained(2, net)
    assert not any(module._forward_pre_hooks for module in layer.modules())
    assert coming(engine) and all(
        unit.late.awaited for unit in engine._sharded.units if unit.plan.name in coming(engine)
    )
    assert not any(param._zero_owner.unit.late.awaited for param in layer.parameters())


@pytest.mark.ranks(2)
def test_a_forked_process_and_one_without_the_engine_have_new_values():
    whole, late = trained(0), trained(2)
    expected = values(whole.module)
    child = os.fork()
    if not child:
        same = all(map(torch.equal, expected, (param.detach() for param in late.module.parameters())))
        os._exit(0 if same else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    train(whole, 1)
    train(late, 1)
    assert coming(late)
    model = late.module
    del late
    assert all(type(param) is nn.Parameter for param in model.parameters())
    assert all(map(torch.equal, values(whole.module), values(model)))


@pytest.mark.ranks(2)
def test_a_rank_that_is_left_alone_has_no_values_of_two_steps():
    late = trained(2)
    unit = next(unit for unit in late._sharded.units if unit.plan.name == "blocks.1")
    own = unit.shard.values.clone()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comm.Transfer, "done", property(lambda transfer: False))
        late._sharded.dissolve(broken=True)
    for index, param in enumerate(unit.params):
        flat, part = param.detach().flatten(), unit.shard.fragment(index)
        assert torch.equal(flat.narrow(0, part.start, part.numel), own.narrow(0, part.at, part.numel))
        assert flat.isnan().sum() == len(flat) - part.numel


@pytest.mark.ranks(2)
def test_a_stream_that_reads_first_has_the_loops_stream_wait_too():
    """The next step then ends with all values, as other streams may read without being noticed."""
    engine = trained(2)
    waited: list[str] = []
    loop, side = SimpleNamespace(wait_event=waited.append), SimpleNamespace()
    with pytest.MonkeyPatch.context() as patch:
        queued = SimpleNamespace(recorded="what the side stream has queued")
        patch.setattr(late_gather, "record_event", lambda device: queued)
        patch.setattr(late_gather, "current_stream", lambda device: loop)
        train(engine, 1)
        weight = engine.module.blocks[2].up.weight
        patch.setattr(late_gather, "current_stream", lambda device: side)
        weight.sum()
        assert waited == ["what the side stream has queued"]
        patch.setattr(late_gather, "current_stream", lambda device: loop)
        train(engine, 2)
        engine.module.blocks[0].up.weight.sum()
    assert len(waited) == 1
    assert coming(engine) == ["<root>", "blocks.1"]


@pytest.mark.ranks(2)
def test_share_memory_behind_a_step_shares():
    """It is a conversion that changes no value; what is on its way takes part."""
    late = trained(2)
    assert late.module.share_memory() is late.module
    assert all(param.is_shared() for param in late.module.parameters())
