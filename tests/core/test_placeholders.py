"""The promise: `state_dict()` of a model whose parameters are away has names, shapes and dtypes, and no values.

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
from zero.core.released import Placeholder

NAME = "blocks.1.up.weight"

Readers = dict[str, Callable[[torch.Tensor], Any]]

# What reads values; each must name the parameter.
READERS: Readers = {
    "add": lambda t: t + 1,
    "add to another": lambda t: torch.zeros(t.shape) + t,
    "linear": lambda t: nn.functional.linear(torch.ones(t.shape[1]), t),
    "below Python's classes": lambda t: torch.ops.aten.add.Tensor(torch.zeros(t.shape), t),
    "copy from": lambda t: torch.zeros(t.shape).copy_(t),
    "write into": lambda t: t.fill_(0),
    "out": lambda t: torch.add(torch.zeros(t.shape), 1, out=t),
    "index": lambda t: t[0],
    "flatten": lambda t: t.flatten(),
    "transpose": lambda t: t.T,
    "clone": lambda t: t.clone(),
    "move": lambda t: t.to("cpu"),
    "convert": lambda t: t.float(),
    "data": lambda t: t.data + 1,
    "write into its data": lambda t: t.data.normal_(),
    "replace its data": lambda t: setattr(t, "data", torch.zeros(t.shape)),
    "stack": lambda t: torch.stack([torch.zeros(t.shape), t]),
    "foreach": lambda t: torch._foreach_add([t], 1.0),
    "sum": lambda t: t.sum(),
    "equal": lambda t: torch.equal(t, t),
    "compare": lambda t: t == t,
    "isnan": lambda t: t.isnan(),
    "item": lambda t: t.max().item(),
    "list": lambda t: t.tolist(),
    "numpy": lambda t: t.numpy(),
    "pointer": lambda t: t.data_ptr(),
    "storage": lambda t: t.storage(),
    "share": lambda t: t.share_memory_(),
    "parameter": nn.Parameter,
    "require grad": lambda t: t.requires_grad_(),
    "pickle": pickle.dumps,
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "torch.save": lambda t: torch.save(t, io.BytesIO()),
    "safetensors": lambda t: save({"t": t}),
}
# What goes past Python's classes and raises all the same, without the name.
BELOW: Readers = {
    "data of another": lambda t: setattr(torch.zeros(t.shape), "data", t),
    "gradient of another": lambda t: setattr(torch.zeros(t.shape), "grad", t),
    "storage of another": lambda t: torch.zeros(t.shape).set_(t),
    "dlpack": torch.utils.dlpack.to_dlpack,
    "tensor": lambda t: torch.tensor(t).tolist(),
    "plain class": lambda t: t.as_subclass(torch.Tensor).tolist(),
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


def readers(built: bool) -> list[str]:
    """What each way to a value says, if not what it must."""
    module, end = made(built)
    state = module.state_dict()
    wrong = [
        f"{name}: {text}" for name, read in READERS.items() if f"'{NAME}' " not in (text := said_by(read, state[NAME]))
    ]
    wrong += [f"{name}: {text}" for name, read in BELOW.items() if "nothing" in (text := said_by(read, state[NAME]))]
    whole: Readers = {
        "torch.save of all": lambda every: torch.save(every, io.BytesIO()),
        "safetensors of all": save,
        "deepcopy of all": copy.deepcopy,
        "into a plain module": make_net().load_state_dict,
        "into itself": module.load_state_dict,
    }
    kept = module.state_dict(keep_vars=True)
    for each in (state, kept):
        for name, read in whole.items():
            if built and each is kept and read is copy.deepcopy:
                continue  # gives parameters that are away, too
            if "released" not in (text := said_by(read, each)):
                wrong.append(f"{name}: {text}")
    text = said_by(lambda: make_net().load_state_dict(state, assign=True))  # last, as torch notes it in the state_dict
    wrong += [] if f"'{NAME}' " in text else [f"assigned to a plain module: {text}"]
    with zero.GatheredParameters(module.get_parameter(NAME), modifier_rank=0), torch.no_grad():
        text = said_by(module.get_parameter(NAME).copy_, state[NAME])
        wrong += [] if f"'{NAME}' " in text else [f"into the parameter itself: {text}"]
    end()
    return wrong


@pytest.mark.parametrize("built", [False, True])
def test_nobody_gets_a_value(pool: Any, built: bool) -> None:
    assert pool.run(2, readers, built) == [[], []]


def questions(built: bool, dtype: str) -> list[str]:
    """What a placeholder says otherwise than the plain model's tensor."""
    module, end = made(built, **({} if dtype == "float32" else {"bf16": {"enabled": True}}))
    state, wanted = module.state_dict(), make_net().to(getattr(torch, "float32" if built else dtype)).state_dict()
    wrong = [] if list(state) == list(wanted) else [f"names {list(state)}"]
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in state.values()}
    wrong += [] if list(storages.values()) == [each.nbytes for each in wanted.values()] else ["storages"]
    for name, plain in wanted.items():
        found = state[name]
        answers = [
            (
                *(each.shape, each.size(), each.size(0), each.dtype, each.device, each.layout, each.ndim, each.dim()),
                *(each.numel(), len(each), each.nbytes, each.itemsize, each.is_floating_point(), each.is_complex()),
                *(each.is_cpu, each.is_cuda, each.is_meta, each.get_device(), each.requires_grad, each.is_leaf),
                *(each.grad, each.grad_fn),
                *((new.shape, new.dtype, new.device) for new in (torch.empty_like(each), each.new_empty(3))),
                *torch.zeros_like(each, device="meta").shape,
            )
            for each in (found, plain)
        ]
        wrong += [] if answers[0] == answers[1] else [f"{name}: {answers}"]
        wrong += [] if f"'{name}'" in repr(found) == f"{found}" and found in {found} else [repr(found)]
        wrong += [] if isinstance(found, Placeholder) and found.detach() is found else [type(found).__name__]
    end()
    return wrong


@pytest.mark.parametrize(("built", "dtype"), [(False, "bfloat16"), (True, "float32"), *longer((False, "float32"))])
def test_what_it_is_asked_it_answers_as_the_plain_tensor(pool: Any, built: bool, dtype: str) -> None:
    assert pool.run(2, questions, built, dtype) == [[], []]


# What splits and joins, as programs do with weights before one rank saves them.
ARRANGERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "chunk": lambda t: [*torch.chunk(t, 2), *t.chunk(2, dim=1)],
    "split": lambda t: [*torch.split(t, 3), *t.split([1, t.shape[0] - 1])],
    "join": lambda t: [torch.cat([t, t], dim=1), torch.stack([t, t])],
    "unbind": lambda t: [*torch.unbind(t), *t.unbind(1), *t],
    "turn": lambda t: [torch.transpose(t, 0, 1).contiguous(), t.transpose(0, 1)],
    "reshape": lambda t: [t.reshape(-1), torch.reshape(t, (1, -1)), t.view(1, *t.shape)],
    "more and fewer dimensions": lambda t: [t.unsqueeze(0), torch.squeeze(t.unsqueeze(0), 0), t.permute(1, 0)],
}


def arranged() -> list[str]:
    """Where what is arranged of a placeholder is otherwise than of the plain tensor, or can be read."""
    module, end = made(False)
    found, plain, wrong = module.state_dict()[NAME], make_net().state_dict()[NAME], []
    for name, arrange in ARRANGERS.items():
        for ours, wanted in zip(arrange(found), arrange(plain), strict=True):
            if (ours.shape, ours.dtype, ours.device) != (wanted.shape, wanted.dtype, wanted.device):
                wrong.append(f"{name}: {ours}, wanted {wanted.shape}")
            for reader in ("add", "clone", "torch.save"):
                if f"'{NAME}' " not in (text := said_by(READERS[reader], ours)):
                    wrong.append(f"{name}, then {reader}: {text}")
    end()
    return wrong


def test_what_is_arranged_of_it_has_its_shape_and_no_values(pool: Any) -> None:
    assert pool.run(2, arranged) == [[], []]


@pytest.mark.ranks(2)
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


def whole_where_they_are() -> list[str]:
    """A state_dict has values wherever parameters are readable: gathered, in a forward, on stage 2, and at the end."""
    module, end = made(False)
    plain, wrong = make_net().state_dict(), []

    def compare(state: dict[str, torch.Tensor], where: str) -> None:
        wrong.extend(f"{name} {where}" for name, value in state.items() if not torch.equal(value, plain[name]))

    with zero.GatheredParameters(module.parameters()):
        compare(module.state_dict(), "gathered")
        copied = copy.deepcopy(module.state_dict())
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
    engine, *_ = zero.initialize(model=make_net(), config=config(2, 2))
    compare(engine.module.state_dict(), "at stage 2")
    engine.destroy()
    return wrong


def test_values_are_there_where_parameters_can_be_read(pool: Any) -> None:
    assert pool.run(2, whole_where_they_are) == [[], []]


def offloaded() -> str:
    engine, *_ = zero.initialize(model=make_net(), config=config(3, 2))
    engine.offload_states()
    text = said_by(engine.module.state_dict)
    engine.destroy()
    return text


def test_offloaded_states_say_what_to_do(pool: Any) -> None:
    for text in pool.run(2, offloaded):
        assert "call engine.reload_states() first" in text
