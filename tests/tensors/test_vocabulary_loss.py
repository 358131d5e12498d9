"""The promise: the loss of a head whose rows lie on several ranks is that of the whole one, in slices of tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from cut_models import adam, family, full, json_of, words
from ranks import said_by
from sharing import needs_transformers
from torch import nn
from torch.nn import functional as F

import zero
from zero.plan.cut import Box, Cut

VOCABULARY, WIDTH, TOKENS = 13, 8, 11


class Head(nn.Module):
    """Rows of a head, parts of unequal size, and the hidden states it is given."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        weight, bias = torch.randn(VOCABULARY, WIDTH, generator=generator), torch.randn(VOCABULARY, generator=generator)
        rank, size = dist.get_rank(), dist.get_world_size()
        edges = [0, 9, VOCABULARY] if size == 2 else [0, 5, 12, VOCABULARY]
        first, stop = edges[rank], edges[rank + 1]
        self.weight, self.bias = nn.Parameter(weight[first:stop].to(dtype)), nn.Parameter(bias[first:stop].to(dtype))
        zero.set_cut(self.weight, Cut((VOCABULARY, WIDTH), (Box((first, 0), (stop - first, WIDTH)),)), module=self)
        zero.set_cut(self.bias, Cut((VOCABULARY,), (Box((first,), (stop - first,)),)), module=self)
        self.whole = weight, bias

    def forward(self, hidden: torch.Tensor, targets: torch.Tensor, **how: Any) -> torch.Tensor:
        return zero.tiled_cross_entropy(hidden, self.weight, targets, self.bias, **how)


def plain(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, targets: torch.Tensor, **how: Any) -> Any:
    drift = how.pop("z_loss", 0.0)
    how.pop("tile_size", None)
    logits = F.linear(hidden, weight, bias)
    loss = F.cross_entropy(logits, targets, **how)
    kept = targets != -100
    squares = logits.logsumexp(1)[kept].square()
    return loss + drift * (squares.sum() if how.get("reduction") == "sum" else squares.mean())


WAYS = [
    {},
    {"tile_size": 1, "label_smoothing": 0.2},
    {"tile_size": 7, "z_loss": 0.1},
    {"tile_size": 50, "reduction": "sum", "label_smoothing": 0.1, "z_loss": 0.01},
]


def compared(stage: int) -> None:
    head = Head()
    weight, bias = head.whole
    engine, *_ = zero.initialize(
        model=head, config=json_of(1, stage, tensor_parallel={"autotp_size": dist.get_world_size()})
    )
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator)
    some = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
    some[3] = -100
    for targets in (some, torch.full((TOKENS,), VOCABULARY - 1), torch.zeros(TOKENS, dtype=torch.long)):
        for how in WAYS:
            given = hidden.clone().requires_grad_()
            loss = engine(given, targets, **how)
            loss.backward()
            exact = [each.double().requires_grad_() for each in (hidden, weight, bias)]
            single = [each.clone().requires_grad_() for each in (hidden, weight, bias)]
            wanted, rounded = plain(*exact, targets, **how), plain(*single, targets, **how)
            wanted.backward()
            rounded.backward()
            allowed = 2 * max(float((rounded - wanted).abs()), 2**-23 * abs(wanted.item()))  # at least one last bit
            assert abs(loss.item() - wanted.item()) <= allowed
            error = 2 * float((single[0].grad - exact[0].grad).abs().max()) + 1e-6
            assert (given.grad - exact[0].grad).abs().max() <= error
            every = [torch.empty_like(given.grad) for _ in range(dist.get_world_size())]
            dist.all_gather(every, given.grad)
            assert all(torch.equal(each, every[0]) for each in every)
            found = [zero.utils.safe_get_full_grad(param) for param in (engine.module.weight, engine.module.bias)]
            for grad, whole, other in zip(found, exact[1:], single[1:], strict=True):
                assert (grad - whole.grad).abs().max() <= 2 * float((other.grad - whole.grad).abs().max()) + 1e-6
            engine.zero_grad()
    engine.destroy()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [0, 3])
def test_megatron_7452_ce_and_torchtitan_3412_loss_of_a_head_in_unequal_parts(stage: int) -> None:
    """It has no log(tp) in it, as one fed with gathered logits had; what slices of tokens give is no part of a sum."""
    compared(stage)


@pytest.mark.long
@pytest.mark.ranks(3)
def test_three_ranks_of_which_one_has_one_row() -> None:
    compared(1)


@pytest.mark.ranks(2)
def test_another_part_than_rows_is_refused() -> None:
    weight = nn.Parameter(torch.zeros(VOCABULARY, 4))
    zero.set_cut(weight, Cut((VOCABULARY, 8), (Box((0, 0), (VOCABULARY, 4)),)))
    said = said_by(lambda: zero.tiled_cross_entropy(torch.zeros(2, 4), weight, torch.zeros(2, dtype=torch.long)))
    assert said.startswith("ValueError: tiled_cross_entropy(weight=...): got a part of a weight (13, 8)")


def tiled(tp: int, stage: int) -> tuple[list[float], Any]:
    model = zero.tile_loss(family("llama"))
    engine, *_ = zero.initialize(model=model, config=json_of(tp, stage, **adam()))
    losses = []
    for step in range(2):
        loss = engine(**words(step, 0)).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    found = losses, full(engine)
    engine.destroy()
    return found


@needs_transformers
@pytest.mark.ranks(2)
def test_a_model_of_transformers_with_a_tiled_loss() -> None:
    model = family("llama")
    first = model(**words(0, 0)).loss.item()
    (losses, weights), (others, same) = tiled(2, 3), tiled(2, 0)
    assert losses == others and all(torch.equal(weights[name], same[name]) for name in weights)
    assert losses[0] == pytest.approx(first, rel=1e-6)
