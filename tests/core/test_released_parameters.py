"""The promise: a released parameter keeps its shape and count, and whoever reads it is told its name."""

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
from torch import nn

import zero
from zero.core.released import Released, released_class

KEYWORDS = {"materialize_grads": False, "create_graph": False}  # that torch passes
NAME = "blocks.1.up.weight"
MESSAGE = (
    f"parameter '{NAME}' is released; read it inside zero.GatheredParameters(...), or in a method given to "
    "zero.register_forward_method(module, name); engine.module_state_dict() has the weights whole"
)


def weight(model: nn.Module) -> nn.Parameter:
    return model.get_parameter(NAME)


READERS: dict[str, Callable[[nn.Parameter], Any]] = {
    "add": lambda p: p + 1,
    "matmul": lambda p: torch.ones(2, p.shape[0]) @ p,
    "linear": lambda p: nn.functional.linear(torch.ones(p.shape[1]), p),
    "index": lambda p: p[0],
    "write": lambda p: p.__setitem__(0, 1.0),
    "fill": lambda p: p.fill_(0),
    "sum": lambda p: p.sum(),
    "compare": lambda p: p == p,
    "item": lambda p: p.tolist(),
    "numpy": lambda p: p.numpy(),
    "data": lambda p: setattr(p, "data", torch.zeros(p.shape)),
    "pointer": lambda p: p.data_ptr(),
    "storage": lambda p: p.untyped_storage(),
    "print": repr,
    "format": lambda p: f"{p}",
    "save": lambda p: torch.save(p, io.BytesIO()),
    "pickle": pickle.dumps,
    "copy": copy.deepcopy,
    "move": lambda p: p.to(torch.float64),
}


def engine_at_rest() -> Any:
    engine, *_ = zero.initialize(model=make_net(), config=config(3, 2))
    return engine


def read_all() -> dict[str, str]:
    engine, said = engine_at_rest(), {}
    for name, reader in READERS.items():
        try:
            reader(weight(engine.module))
            said[name] = "nothing"
        except RuntimeError as error:
            said[name] = str(error)
    engine.destroy()
    return said


def test_reading_raises_with_the_name(pool):
    for said in pool.run(2, read_all):
        for reader in READERS:
            assert said[reader] == MESSAGE, reader


@pytest.mark.ranks(2)
def test_metadata_is_true():
    engine, plain = engine_at_rest(), make_net()
    rows = []
    for name, wanted in plain.named_parameters():
        found = engine.module.get_parameter(name)
        found.some_attribute = 1
        rows.append(
            (
                isinstance(found, nn.Parameter),
                found.shape == wanted.shape,
                found.size() == wanted.size(),
                found.numel() == wanted.numel(),
                found.dtype == wanted.dtype,
                found.device == wanted.device,
                found.ndim == wanted.dim() == found.dim(),
                found.requires_grad and found.is_leaf and found.grad is None,
                found.is_floating_point() and torch.is_floating_point(found),
                len({found, found}) == 1 and found in {found},
                found.some_attribute == 1,
                torch.equal(torch.zeros_like(found), torch.zeros_like(wanted)),
                found.new_ones(found.shape).stride() == torch.rand_like(found).stride() == wanted.stride(),
            )
        )
    rows.append((sum(p.numel() for p in engine.parameters()) == sum(p.numel() for p in plain.parameters()),))
    engine.destroy()
    assert rows
    assert all(all(row) for row in rows), rows


@pytest.mark.ranks(2)
def test_parameters_of_two_engines_with_one_name():
    nets = [make_net(seed) for seed in (7, 8)]
    engines = [zero.initialize(model=net, config=config(3, 2))[0] for net in nets]
    with zero.GatheredParameters([weight(net) for net in nets]):
        equal = [torch.equal(weight(net), weight(make_net(seed))) for net, seed in zip(nets, (7, 8), strict=True)]
    for engine in engines:
        engine.destroy()
    assert equal == [True, True]


def backward_too_early() -> str:
    """A graph that reaches freed memory without passing an output of any hooked module."""
    engine, losses = engine_at_rest(), []

    def stash(module: nn.Linear, args: Any, output: torch.Tensor) -> None:
        losses.append((torch.ones(1, module.out_features, requires_grad=True) @ module.weight).sum())

    engine.module.blocks[1].up.register_forward_hook(stash)
    engine(*batch(0, 4))
    try:
        losses[0].backward()
        return "nothing"
    except RuntimeError as error:
        return str(error)
    finally:
        engine._sharded.abandon()
        engine.destroy()


def test_backward_into_freed_memory_raises_instead_of_crashing(pool):
    for said in pool.run(2, backward_too_early):
        assert "modified by an inplace operation" in said


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [2, *longer(0, 1)])
def test_below_stage_3_nothing_is_released(stage):
    engine, *_ = zero.initialize(model=make_net(), config=config(stage, 2))
    equal = torch.equal(weight(engine.module), weight(make_net()))
    copied = copy.deepcopy(engine.module)
    assert equal and torch.equal(weight(copied), weight(make_net())) and "tensor" in repr(weight(copied))


def test_a_single_parameter_is_what_gradients_are_asked_for_by():
    """As torch 2.11 hands it on, which is tested with that version only by test_backward_kinds.py."""
    param = nn.Parameter(torch.ones(3))
    loss = param.sum()
    param.__class__ = released_class(nn.Parameter, Released)
    (found,) = Released.__torch_function__(torch.autograd.grad, (), (loss, param), {**KEYWORDS, "retain_graph": True})
    assert torch.equal(found, torch.ones(3))
    Released.__torch_function__(torch.autograd.backward, (), (loss,), {"inputs": param})
    assert torch.equal(param.grad, torch.ones(3))
