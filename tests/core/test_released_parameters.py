"""The promise: a released parameter, and what `state_dict()` has of it, keep name, shape and dtype, and no values.

Whoever reads, copies or saves one is told the parameter's name.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from marks import longer
from models import batch, config, make_net
from safetensors.torch import save
from torch import nn

import zero

pytestmark = pytest.mark.ranks(2)
NAME = "blocks.1.up.weight"
MESSAGE = (
    f"parameter '{NAME}' is released; read it inside zero.GatheredParameters(...), or in a method given to "
    "zero.register_forward_method(module, name); engine.module_state_dict() has the weights whole"
)
Readers = dict[str, Callable[[Any], Any]]

# What reads values, of a parameter as of an entry of a state_dict; each must name the parameter.
READERS: Readers = {
    "add": lambda t: t + 1,
    "linear": lambda t: nn.functional.linear(torch.ones(t.shape[1]), t),
    "write into": lambda t: t.fill_(0),
    "index": lambda t: t[0],
    "sum": lambda t: t.sum(),
    "list": lambda t: t.tolist(),
    "numpy": lambda t: t.numpy(),
    "replace its data": lambda t: setattr(t, "data", torch.zeros(t.shape)),
    "pointer": lambda t: t.data_ptr(),
    "torch.save": lambda t: torch.save(t, io.BytesIO()),
    "pickle": pickle.dumps,
    "deepcopy": copy.deepcopy,
}
OF_PARAMETERS: Readers = {
    "matmul": lambda p: torch.ones(2, p.shape[0]) @ p,
    "write": lambda p: p.__setitem__(0, 1.0),
    "storage": lambda p: p.untyped_storage(),
    "print": repr,
    "format": lambda p: f"{p}",
}
OF_ENTRIES: Readers = {
    "add to another": lambda t: torch.zeros(t.shape) + t,
    "below Python's classes": lambda t: torch.ops.aten.add.Tensor(torch.zeros(t.shape), t),
    "copy from": lambda t: torch.zeros(t.shape).copy_(t),
    "out": lambda t: torch.add(torch.zeros(t.shape), 1, out=t),
    "clone": lambda t: t.clone(),
    "data": lambda t: t.data + 1,
    "stack": lambda t: torch.stack([torch.zeros(t.shape), t]),
    "item": lambda t: t.max().item(),
    "share": lambda t: t.share_memory_(),
    "parameter": nn.Parameter,
    "copy": copy.copy,
    "safetensors": lambda t: save({"t": t}),
}
# What goes past Python's classes and raises all the same, without the name.
BELOW: Readers = {
    "data of another": lambda t: setattr(torch.zeros(t.shape), "data", t),
    "storage of another": lambda t: torch.zeros(t.shape).set_(t),
    "dlpack": torch.utils.dlpack.to_dlpack,
    "tensor": lambda t: torch.tensor(t).tolist(),
}
WHOLE: Readers = {
    "torch.save of all": lambda every: torch.save(every, io.BytesIO()),
    "safetensors of all": save,
    "deepcopy of all": copy.deepcopy,
    "into a plain module": lambda every: make_net().load_state_dict(every),
}


def said_by(read: Callable[..., Any], *args: Any) -> str:
    try:
        return f"nothing; gave {type(read(*args))}"
    except (RuntimeError, NotImplementedError, BufferError, TypeError) as error:
        return str(error)


def made(built: bool, **more: Any) -> tuple[nn.Module, Callable[[], None]]:
    """A net whose parameters are away: one that is built under `Init`, or that of an engine; and how to end."""
    if built:
        with zero.Init():
            return make_net(), lambda: None
    engine, *_ = zero.initialize(model=make_net(), config=config(3, torch.distributed.get_world_size(), **more))
    return engine.module, engine.destroy


def test_whoever_reads_a_parameter_is_told_its_name():
    module, end = made(False)
    for name, read in (READERS | OF_PARAMETERS).items():
        assert said_by(read, module.get_parameter(NAME)) == MESSAGE, name
    end()


@pytest.mark.parametrize("built", [False, True])
def test_whoever_reads_an_entry_of_a_state_dict_is_told_its_name(built: bool) -> None:
    module, end = made(built)
    state, kept = module.state_dict(), module.state_dict(keep_vars=True)
    for name, read in (READERS | OF_ENTRIES).items():
        assert f"'{NAME}' " in (text := said_by(read, state[NAME])), f"{name}: {text}"
    for name, read in BELOW.items():
        assert "nothing" not in said_by(read, state[NAME]), name
    for each in (state, kept):
        for name, read in {**WHOLE, "into itself": module.load_state_dict}.items():
            if not (built and each is kept and read is copy.deepcopy):  # which gives parameters that are away, too
                assert "released" in (text := said_by(read, each)), f"{name}: {text}"
    with zero.GatheredParameters(module.get_parameter(NAME), modifier_rank=0), torch.no_grad():
        assert f"'{NAME}' " in said_by(module.get_parameter(NAME).copy_, state[NAME])
    # Last, as torch notes it in the state_dict.
    assert f"'{NAME}' " in said_by(lambda: make_net().load_state_dict(state, assign=True))
    end()


def answers(each: torch.Tensor) -> tuple[Any, ...]:
    return (
        *(each.shape, each.size(), each.size(0), each.dtype, each.device, each.layout, each.ndim, each.dim()),
        *(each.numel(), len(each), each.nbytes, each.itemsize, each.is_floating_point(), each.is_complex()),
        *(each.is_cpu, each.is_cuda, each.is_meta, each.get_device(), each.requires_grad, each.is_leaf),
        *(each.grad, each.grad_fn, torch.is_floating_point(each), torch.rand_like(each).stride()),
        *((new.shape, new.dtype, new.device) for new in (torch.empty_like(each), each.new_empty(3))),
        *torch.zeros_like(each, device="meta").shape,
    )


@pytest.mark.parametrize(("built", "dtype"), [(False, "bfloat16"), (True, "float32"), *longer((False, "float32"))])
def test_what_both_are_asked_they_answer_as_the_plain_tensor(built: bool, dtype: str) -> None:
    module, end = made(built, **({} if dtype == "float32" else {"bf16": {"enabled": True}}))
    plain = make_net().to(getattr(torch, dtype))
    state, wanted = module.state_dict(), plain.state_dict()
    assert list(state) == list(wanted)
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in state.values()}
    assert list(storages.values()) == [each.nbytes for each in wanted.values()]
    for name, value in wanted.items():
        entry, param = state[name], module.get_parameter(name)
        assert answers(entry) == answers(value), name
        assert f"'{name}'" in repr(entry) == f"{entry}" and entry in {entry} and entry.detach() is entry
        assert answers(param) == answers(plain.get_parameter(name)), name
        param.some_attribute = 1
        assert isinstance(param, nn.Parameter) and param in {param} and param.some_attribute == 1
    end()


@pytest.mark.parametrize("built", [False, True])
def test_data_that_is_assigned_back_unchanged_changes_nothing(built: bool) -> None:
    """Heads of masked language models pad their bias so; whatever else is assigned is an error."""
    module, end = made(built)
    param, other = module.get_parameter(NAME), module.get_parameter("blocks.0.up.weight")
    kept, pad = param.data, nn.functional.pad
    for same in (kept, pad(param.data, (0, 0), "constant", 0), param.data.contiguous(), param.detach()):
        param.data = same
    wrong: Readers = {
        "padded": lambda p: setattr(p, "data", pad(p.data, (0, 1))),
        "cut off": lambda p: setattr(p, "data", pad(p.data, (0, -1))),
        "of another": lambda p: setattr(p, "data", other.data),
        "turned twice": lambda p: setattr(p, "data", p.data.transpose(0, 1).transpose(0, 1)),
        "written in place": lambda p: p.data.zero_(),
        "written in part": lambda p: p.data[:1].zero_(),
        "copied from": lambda p: torch.zeros(p.shape).copy_(p.data),
    }
    for name, assign in wrong.items():
        assert f"'{NAME}' " in (text := said_by(assign, param)), f"{name}: {text}"
    with zero.GatheredParameters(param, modifier_rank=0):
        assert torch.equal(param, make_net().get_parameter(NAME))
        nn.init.ones_(param)
    assert f"'{NAME}' " in said_by(lambda: setattr(param, "data", kept))  # which plain torch may have copied before
    with zero.GatheredParameters(param):
        assert torch.equal(param, torch.ones_like(param))
    end()


def test_values_are_there_where_parameters_can_be_read() -> None:
    """Gathered, in a forward, at the end, and at any stage below 3; of two engines each has its own."""
    module, end = made(False)
    other = zero.initialize(model=make_net(8), config=config(3, 2))[0].module
    plain = make_net().state_dict()

    def compare(state: dict[str, torch.Tensor], where: str) -> None:
        assert [name for name, value in state.items() if not torch.equal(value, plain[name])] == [], where

    with zero.GatheredParameters([*module.parameters(), *other.parameters()]):
        compare(module.state_dict(), "gathered")
        copied = copy.deepcopy(module.state_dict())
        assert torch.equal(other.get_parameter(NAME), make_net(8).get_parameter(NAME))
    compare(copied, "copied")
    seen: list[dict[str, torch.Tensor]] = []

    def note(block: nn.Module, args: Any) -> None:
        seen.append({f"blocks.0.{name}": value.clone() for name, value in block.state_dict().items()})

    handle = module.blocks[0].register_forward_pre_hook(note)
    with torch.no_grad():
        module(*batch(0, 2))
    handle.remove()
    compare(seen[0], "in a forward")
    end()
    compare(module.state_dict(), "after destroy")
    for stage in (0, 1, 2):
        engine, *_ = zero.initialize(model=make_net(), config=config(stage, 2))
        compare(engine.module.state_dict(), f"at stage {stage}")
        compare(copy.deepcopy(engine.module).state_dict(), f"of a copy at stage {stage}")
        assert "tensor" in repr(engine.module.get_parameter(NAME))
        engine.destroy()


def test_backward_into_freed_memory_raises_instead_of_crashing():
    """A graph that reaches freed memory without passing an output of any hooked module."""
    module, _ = made(False)
    losses = []

    def stash(module: nn.Linear, args: Any, output: torch.Tensor) -> None:
        losses.append((torch.ones(1, module.out_features, requires_grad=True) @ module.weight).sum())

    module.blocks[1].up.register_forward_hook(stash)
    module(*batch(0, 4))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        losses[0].backward()
