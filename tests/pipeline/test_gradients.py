"""The promise: gradients of stages are those of plain torch; each counts once, and hooks on parameters see it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from marks import longer
from pipelines import batches, chain, compare, json_of, pipelined
from states import weights_of
from torch import nn

MICRO_BATCHES = 8
SGD = {"optimizer": {"type": "SGD", "params": {"lr": 1.0}}, "gradient_clipping": 0.0}
SCHEDULES = ("gpipe", "interleaved", "zero_bubble", "dualpipev")


def plain() -> dict[str, torch.Tensor]:
    """The weights behind a step of plain torch, over the mean of the losses of all micro-batches."""
    model, stream = chain(), batches(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    sum(
        F.cross_entropy(model(x), y) / MICRO_BATCHES for x, y in (next(stream) for _ in range(MICRO_BATCHES))
    ).backward()
    optimizer.step()
    return {name: param.detach() for name, param in model.named_parameters()}


@pytest.mark.parametrize("gather", ["use", *longer("step")])
@pytest.mark.parametrize(("stage", "schedule"), [(0, "1f1b"), (2, "zbv"), *longer(*((3, each) for each in SCHEDULES))])
def test_deepspeed_8154_and_fast_llm_550_the_mean_over_micro_batches(pool: Any, stage, schedule, gather):
    """Not divided again on each stage; not those of the last micro-batch only."""
    section = {"stages": 4, "schedule": schedule, "gather": gather}
    json = json_of(stage, 1, MICRO_BATCHES, pipeline=section) | SGD
    found = {}
    for each in pool.run(4, pipelined, json, steps=1, state=weights_of):
        found |= each.state
    wanted = plain()
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6)  # some roundings of values below one


def hooked(kind: str) -> nn.Module:
    """A model whose gradients others change, as they land, and count."""
    model = chain()
    model.landed = []

    def halve(grad: torch.Tensor) -> torch.Tensor:
        model.landed.append(math.prod(grad.shape))
        return grad / 2

    def halve_in_place(param: nn.Parameter) -> None:
        param.grad = halve(param.grad)

    for param in model.parameters():
        if kind == "tensor":
            param.register_hook(halve)
        else:
            param.register_post_accumulate_grad_hook(halve_in_place)
    return model


def before() -> nn.Module:
    return hooked("tensor")


def behind() -> nn.Module:
    return hooked("accumulated")


def counting(engine: Any) -> Any:
    return lambda: sum(engine.module.landed)


@pytest.mark.parametrize("make", [before, behind])
@pytest.mark.parametrize("stage", [1, *longer(3)])
@pytest.mark.parametrize("schedule", ["zbv", *longer("zero_bubble", "dualpipev")])
def test_pytorch_144530_hooks_on_parameters_see_each_gradient_of_a_backward_in_parts(pool, schedule, stage, make):
    json = json_of(stage, 1, MICRO_BATCHES, pipeline={"stages": 2, "schedule": schedule})
    found = pool.run(2, pipelined, json, make, watch=counting)
    whole = json | {"pipeline": {"stages": 2, "schedule": "gpipe"}}
    wanted = pool.run(2, pipelined, whole, make, watch=counting)
    together = wanted[0]._replace(state=wanted[0].state | wanted[1].state)
    compare(found, together)
    numel = sum(param.numel() for param in chain().parameters())
    assert sum(each.seen for each in found) == sum(each.seen for each in wanted) == 3 * MICRO_BATCHES * numel
    unhooked = pool.run(2, pipelined, whole)
    torch.testing.assert_close([2 * each for each in found[0].norms[:1]], unhooked[0].norms[:1], rtol=1e-6, atol=0)
