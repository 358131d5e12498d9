"""The promise: the formulas of activations are what torch keeps of the example's block, to the byte in fp32."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import zero
from zero.recompute.activations import (
    BlockSizes,
    full_nbytes,
    loss_peak_nbytes,
    selective_nbytes,
    tiled_loss_peak_nbytes,
    whole_nbytes,
)
from zero.tiled.slices import default_size

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from live import LiveBytes

SIZES = BlockSizes(tokens=2 * 64, width=48, heads=4)
PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


@pytest.fixture(scope="module")
def gpt():
    """The example with two blocks; its script finds `model` by its bare name."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "gpt"))
    try:
        import model
    finally:
        sys.path.pop(0)
    torch.manual_seed(0)
    yield model.GPT(model.Shape(SIZES.width, 2, SIZES.heads, SIZES.tokens // 2))
    sys.modules.pop("model")


def kept(gpt: nn.Module, run: Callable[..., torch.Tensor]) -> int:
    """Bytes that one of two blocks in a row keeps, run in this way."""
    x = torch.randn(2, SIZES.tokens // 2, SIZES.width)
    tables = [gpt.cos, gpt.sin]
    marks = []
    with LiveBytes([*gpt.parameters(), *tables]) as live:
        x = x.clone().requires_grad_()
        for block in gpt.blocks:
            x = run(block, x, *tables)
            marks.append(live.now)
    return marks[1] - marks[0]


def selective(every: int) -> Callable[..., torch.Tensor]:
    """Checkpointing that keeps attention and every so many of the products that backward needs."""

    def contexts() -> Any:
        counts = {False: 0, True: 0}

        def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            place = counts[ctx.is_recompute]
            counts[ctx.is_recompute] += op in PRODUCTS
            wanted = op in PRODUCTS and place % every == every - 1 and place < 3
            kept = wanted or "attention" in str(op)
            return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    return functools.partial(checkpoint, use_reentrant=False, context_fn=contexts)


def test_whole(gpt) -> None:
    assert kept(gpt, lambda block, *args: block(*args)) == whole_nbytes(SIZES)


def test_full(gpt) -> None:
    assert kept(gpt, functools.partial(checkpoint, use_reentrant=False)) == full_nbytes(SIZES)


@pytest.mark.parametrize("every", [1, 2, 3, 4])
def test_selective(gpt, every: int) -> None:
    assert kept(gpt, selective(every)) == selective_nbytes(SIZES, every)


def test_what_the_policies_save() -> None:
    sizes = BlockSizes(tokens=2048, width=1024, heads=16, itemsize=2, copied=False)
    assert full_nbytes(sizes) == 2 * 2048 * 1024
    assert selective_nbytes(sizes, 2) < selective_nbytes(sizes) < 0.7 * whole_nbytes(sizes)
    assert selective_nbytes(sizes, 2) < 0.5 * whole_nbytes(sizes)
    assert whole_nbytes(BlockSizes(10, 8, 2, inner=16)) < whole_nbytes(BlockSizes(10, 8, 2, inner=32))


def peak(loss: Callable[..., torch.Tensor], tokens: int, vocabulary: int, width: int) -> int:
    """The most that is alive in forward and backward, beyond what was there before."""
    hidden, weight = torch.randn(tokens, width), torch.randn(vocabulary, width)
    targets = torch.randint(0, vocabulary, (tokens,))
    with LiveBytes([hidden, weight, targets]) as live:
        loss(hidden.requires_grad_(), weight.requires_grad_(), targets).backward()
    return live.peak


@pytest.mark.parametrize(("tokens", "vocabulary", "width"), [(500, 3000, 16), (40, 900, 300)])
def test_peaks_of_the_loss(tokens: int, vocabulary: int, width: int) -> None:
    sizes = (tokens, vocabulary, width)
    plain = peak(lambda hidden, weight, targets: F.cross_entropy(F.linear(hidden, weight), targets), *sizes)
    tiled = peak(zero.tiled_cross_entropy, *sizes)
    rows = min(default_size(tokens, width, on_gpu=False), tokens)
    assert plain == pytest.approx(loss_peak_nbytes(*sizes), rel=0.02)
    assert tiled == pytest.approx(tiled_loss_peak_nbytes(*sizes, rows), rel=0.02)
