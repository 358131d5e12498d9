"""The promise: a script may do with what a cut operator gives what it does with any tensor, and ranks may part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cut_models import family
from marks import longer
from operator_models import WHOLE, Products, batch, config, engine_of
from sharing import needs_transformers
from torch import Tensor

import zero
from zero.utils import safe_get_full_grad

LIES = {"rows": ((4, 1), WHOLE), "columns": (WHOLE, (1, 4)), "parts": ((1, 4), (4, 1)), "whole": (WHOLE, WHOLE)}


def clamp(h: Tensor) -> Tensor:
    with torch.no_grad():
        h.clamp_(-3, 3)
    return h


def kept(h: Tensor) -> Tensor:
    before = h * 2
    h.mul_(3)
    return before + h


def put(h: Tensor) -> Tensor:
    h[:, 0] = 2
    return h


def dropped(h: Tensor) -> Tensor:
    h.relu_()
    return h


def hooked(h: Tensor) -> Tensor:
    h.register_hook(lambda grad: grad * 2)
    return h


WRITES: dict[str, Callable[[Tensor], Tensor]] = {
    "clamp without a graph": clamp,
    "what is made before a write": kept,
    "an element": put,
    "the result is not taken": dropped,
    "a hook": hooked,
    "split and joined": lambda h: torch.stack([*h]) + torch.cat(h.split(1)),
}


class Between(Products):
    """Something is done between two products."""

    def __init__(self, lies: str, change: str) -> None:
        super().__init__((LIES[lies],), ((WHOLE, (1, 4)),))
        self.change = WRITES[change]

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.two(self.change(self.one(x, self.w)), self.v) * y).sum() / 8


def same_gradients(engine: Any, plain: Any) -> None:
    plain(*batch(0)).backward()
    engine.backward(engine(*(each.chunk(4)[dist.get_rank()] for each in batch(0))))
    for name, param in engine.module.named_parameters():
        assert torch.equal(safe_get_full_grad(param).cpu() * 4, plain.get_parameter(name).grad), name


@pytest.mark.ranks(4)
@pytest.mark.parametrize("change", WRITES)
@pytest.mark.parametrize("lies", ["rows", "columns", *longer("parts", "whole")])
def test_what_is_done_between_two_operators(lies: str, change: str) -> None:
    engine = engine_of(Between(lies, change), 1)
    same_gradients(engine, Between(lies, change))
    engine.destroy()


@pytest.mark.ranks(4)
def test_the_gradient_of_a_result_is_kept_for_who_asks() -> None:
    model = Between("columns", "a hook")
    model.change = lambda h: (h.retain_grad(), setattr(model, "hidden", h), h)[-1]
    engine = engine_of(model, 1)
    same_gradients(engine, Products())
    assert tuple(model.hidden.grad.shape) == (8, 16)
    engine.destroy()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("full", [True, False])
def test_batches_that_ranks_cannot_share_are_evaluated_by_each_alone(full: bool) -> None:
    engine = engine_of(Products(((WHOLE, (1, 4)),), ((WHOLE, (1, 4)),)), 3, full_batch=full)
    own = [each[: 6 if full else dist.get_rank() + 1] for each in batch(1)]
    with torch.no_grad():
        assert torch.equal(engine(*own).cpu(), Products()(*own))
    if full:
        with pytest.raises(ValueError, match=r"4 ranks are given batches of the shapes \[\[6, 16\], \[6, 16\]\]"):
            engine(*own)
        engine.destroy()
        return
    with pytest.raises(
        ValueError, match=r"batches of the shapes \[\[\[1, 16\], \[1, 16\]\], \[\[2, 16\].*padded alike"
    ):
        engine(*own)
    same_gradients(engine, Products())
    engine.destroy()


@needs_transformers
@pytest.mark.ranks(4)
@pytest.mark.parametrize("stage", [3, *longer(1)])
def test_ranks_generate_texts_of_other_lengths(stage: int) -> None:
    shard = {"*.[qkv]_proj": [[1, 1, 1], [4, 1]], "*.down_proj": [[1, 1, 4], [1, 4]]}
    plain, rank = family("llama"), dist.get_rank()
    engine = zero.initialize(model=family("llama"), config=config(stage, shard=shard))[0]
    prompt = torch.arange(2, 5 + rank)[None].repeat(1 + rank % 2, 1)
    how = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 4 + rank, "do_sample": False}
    wanted = plain.generate(prompt, **how)
    assert torch.equal(engine.generate(prompt, **how)[:, : wanted.shape[1]].cpu(), wanted)
    with engine.gathered_for_generation() as whole:
        assert torch.equal(whole.generate(prompt, **how).cpu(), wanted)
    text = torch.arange(40).view(8, 5) % 60
    engine.backward(engine(input_ids=text.chunk(4)[rank], labels=text.chunk(4)[rank]).loss)
    plain(input_ids=text, labels=text).loss.backward()
    for name, param in engine.module.named_parameters():
        torch.testing.assert_close(safe_get_full_grad(param).cpu(), plain.get_parameter(name).grad, rtol=0, atol=1e-6)
    engine.destroy()
