"""The promise: `engine.stream_weights` gives each weight whole, one unit at a time, on every stage and placement."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from marks import longer
from models import WIDTH, Block, TiedNet, config, step
from offload_cases import BOTH, OPTIMIZER, as_on_a_gpu
from stand_in_device import storage_of
from torch import nn

import zero

WHERE = {"0": {"stage": 0}, "1": {"stage": 1}, "2": {"stage": 2}, "3": {"stage": 3}}
WHERE |= {"1, host": {"stage": 1, **OPTIMIZER}, "3, host": {"stage": 3, **BOTH}}


class Adapted(nn.Module):
    """A frozen matrix and what is added to it: `up` x `down`."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down = nn.Linear(WIDTH, 2, bias=False)
        self.up = nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def merging(engine: Any) -> Any:
    """Bases with what their adapters add, under the names of a model that has none."""

    def merge(name: str, tensor: torch.Tensor) -> Any:
        if ".down." in name or ".up." in name:
            return None
        if name.endswith("base.weight"):
            block = engine.module.get_submodule(name.removesuffix(".base.weight"))
            with zero.GatheredParameters(block.parameters()):
                return name.replace("base.", ""), tensor + block.up.weight @ block.down.weight
        return tensor

    return merge


def alive(engine: Any, *given: torch.Tensor) -> int:
    """How many units of stage 3 are whole now, with what was given that lies in other memory."""
    params = [storage_of(param) for param in engine.module.parameters()]
    sizes = [param.numel() * param.itemsize for param in engine.module.parameters()]
    memory = {one.data_ptr() for one, size in zip(params, sizes, strict=True) if one.nbytes() >= size}
    return len(memory | {tensor.untyped_storage().data_ptr() for tensor in given})


@pytest.mark.ranks(2)
@pytest.mark.parametrize("where", ["3, host", *longer("0", "1", "2", "3", "1, host")])
def test_each_weight_comes_whole_and_once(where: str) -> None:
    torch.manual_seed(7)
    section = WHERE[where]
    with as_on_a_gpu():
        settings = config(section["stage"], 2, bf16={"enabled": True}, zero_optimization=section)
        model = TiedNet(Block, Adapted, Block, Adapted, frozen=2)
        engine = zero.initialize(model=model, config=settings)[0]
    step(engine, 0)
    engine.empty_partition_cache()
    first, wanted, merged, most = dist.get_rank() == 0, {}, {}, []
    assert section["stage"] < 3 or alive(engine) == 0
    for name, tensor in engine.stream_weights():
        wanted[name] = tensor.clone()
        most.append(alive(engine, tensor))
    for name, tensor in engine.stream_weights(merge=merging(engine)):
        merged[name] = tensor.clone()
        most.append(alive(engine, tensor))
    assert section["stage"] < 3 or 1 <= max(most) <= 2, "whole at once, with a copy of one weight"
    assert len([name for name in merged if "blocks.1." in name]) == 2
    state = engine.module_state_dict()
    assert list(state.pop("head.weight").shape) == [17, WIDTH]
    assert wanted.keys() == state.keys()
    assert all(torch.equal(wanted[name], state[name]) for name in state)
    for name in ("blocks.1", "blocks.3"):
        added = state[f"{name}.up.weight"] @ state[f"{name}.down.weight"]
        assert torch.equal(merged[f"{name}.weight"], state[f"{name}.base.weight"] + added)
        assert added.any()
    assert not any("up." in name and "blocks.1" in name for name in merged)
    few = dict(engine.stream_weights(torch.float64, ["head.*", "blocks.3.base.bias"], rank0_only=True))
    names = {"head.weight", "head.bias", "blocks.3.base.bias"} if first else set()
    assert few.keys() == names
    assert all(tensor.dtype == torch.float64 for tensor in few.values())
    assert not first or torch.equal(few["head.weight"], wanted["embed.weight"].double())
    for _ in engine.stream_weights(names="blocks.*"):
        if first:  # the others go on
            break
    with pytest.raises(ValueError, match=r"names=\.\.\.: \['nothing\.\*'\] match no parameter or buffer"):
        engine.stream_weights(names=["*.weight", "nothing.*"])
    assert section["stage"] < 3 or alive(engine) == 0
    step(engine, 1)
    assert engine.was_step_applied()
    engine.destroy()


def taken(where: str) -> None:
    """A consumer writes into all that it gets; an engine of the same weights that nobody asks says what is right."""
    torch.manual_seed(7)
    model = TiedNet(Block, Block)
    world = dist.get_world_size() if dist.is_initialized() else 1
    settings = config(WHERE[where]["stage"], world, zero_optimization=WHERE[where])
    engine, twin = (zero.initialize(model=one, config=settings)[0] for one in (model, copy.deepcopy(model)))
    before = {name: tensor.clone() for name, tensor in engine.module_state_dict().items()}

    for stream in (
        lambda: engine.stream_weights(),
        lambda: engine.stream_weights(torch.float32),
        lambda: engine.stream_weights(merge=lambda name, value: value.mul_(2)),
        lambda: engine.weight_updates(None),
    ):
        alive: list[weakref.ref[Any]] = []
        for item in stream():
            tensor = item[-1]
            alive = [*(each for each in alive if each() is not None), weakref.ref(tensor.untyped_storage())]
            assert len(alive) <= 2
            tensor.zero_()
            tensor.numpy().fill(3)  # of which torch knows nothing
            for change in (engine.step, lambda: engine.load_module_state_dict(before)):
                with pytest.raises(RuntimeError, match=r"inside a loop over engine\.stream_weights\(\)"):
                    change()
        assert all(torch.equal(tensor, before[name]) for name, tensor in engine.module_state_dict().items())
    for one in (engine, twin):
        step(one, 0)
    wanted = twin.module_state_dict()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in engine.module_state_dict().items())
    for one in (engine, twin):
        one.destroy()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("where", ["0", "3", *longer("1", "2", "1, host", "3, host")])
def test_what_is_given_is_the_callers_and_no_step_goes_between(where: str) -> None:
    taken(where)


def test_so_it_is_on_one_rank() -> None:
    taken("3")
