"""The promise: the tiled loss is the plain one on every stage and in every precision, and never holds all logits."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from closeness import allowed, error, ulps
from marks import each_once
from models import Net, config, share
from oracle import Training, near
from scenario import Json, Model, Record, differences, run
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import zero

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from live import LiveBytes

Loss = Callable[..., Tensor]


def plain(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None = None, **how: Any) -> Tensor:
    """What it stands for, with all logits at once."""
    z_loss, logits = how.pop("z_loss", 0.0), F.linear(hidden, weight, bias).flatten(0, -2)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    loss = F.cross_entropy(logits, targets.flatten(), **how)
    kept = targets.flatten() != how.get("ignore_index", -100)
    squares = logits.logsumexp(-1).square()[kept] if z_loss else None
    if squares is None:
        return loss
    return loss + z_loss * (squares.mean() if how.get("reduction", "mean") == "mean" else squares.sum())


def case(tokens: int, vocabulary: int, width: int, ignored: int = 0, bias: bool = True) -> dict[str, Tensor]:
    """Arguments in fp32; every `ignored`-th target is to be ignored."""
    generator = torch.Generator().manual_seed(tokens * 1000 + vocabulary)
    made = {
        "hidden": torch.randn(tokens, width, generator=generator),
        "weight": torch.randn(vocabulary, width, generator=generator) / 4,
        "targets": torch.randint(0, vocabulary, (tokens,), generator=generator),
    }
    if ignored:
        made["targets"][::ignored] = -100
    return made | ({"bias": torch.randn(vocabulary, generator=generator)} if bias else {})


def results(loss: Loss, given: dict[str, Tensor], dtype: torch.dtype, scale: float = 1.0, **how: Any) -> list[Tensor]:
    """The loss, and the gradients of `scale` times it, divided by that again in fp64."""
    leaves = {name: value.to(dtype).requires_grad_() for name, value in given.items() if name != "targets"}
    found = loss(**{**given, **leaves}, **how)
    (found * scale).backward()
    return [found.detach(), *(leaf.grad if scale == 1.0 else leaf.grad.double() / scale for leaf in leaves.values())]


def equal(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.isnan(), other.isnan()) and torch.equal(one.nan_to_num(), other.nan_to_num())


# Slices.


@pytest.mark.parametrize("tile_size", [16, 31, 64])
def test_slices_are_as_exact_as_plain_torch(tile_size: int) -> None:
    given = case(211, 61, 12, ignored=5)
    exact = results(plain, {k: v.double() if v.is_floating_point() else v for k, v in given.items()}, torch.float64)
    ours = results(zero.tiled_cross_entropy, given, torch.float32, tile_size=tile_size)
    theirs = results(plain, given, torch.float32)
    for mine, their, right in zip(ours, theirs, exact, strict=True):
        assert error([mine], [right]) <= allowed([right], [their])


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("tile_size", [1, 3, 16, 50, 1000, None])
def test_any_slices_give_the_same_in_double_precision(tile_size: int | None, reduction: str) -> None:
    for how in ({}, {"label_smoothing": 0.3}, {"z_loss": 0.1}, {"label_smoothing": 0.1, "z_loss": 1e-3}):
        given = case(53, 17, 5, ignored=4)
        ours = results(zero.tiled_cross_entropy, given, torch.float64, tile_size=tile_size, reduction=reduction, **how)
        for mine, their in zip(ours, results(plain, given, torch.float64, reduction=reduction, **how), strict=True):
            torch.testing.assert_close(mine, their, rtol=1e-12, atol=1e-14)


# Precision.


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(("dtype", "scale"), [(torch.bfloat16, 1.0), (torch.float16, 2.0**14)])
def test_sixteen_bits_are_no_worse_than_plain(dtype: torch.dtype, scale: float, autocast: bool) -> None:
    check_sixteen_bits(case(300, 501, 24, ignored=7), dtype, scale, autocast)


def check_sixteen_bits(given: dict[str, Tensor], dtype: torch.dtype, scale: float, autocast: bool) -> None:
    given = {name: value.to(dtype).float() if value.is_floating_point() else value for name, value in given.items()}
    exact = results(plain, given, torch.float64)
    kept = torch.float32 if autocast else dtype
    with torch.autocast(given["hidden"].device.type, dtype, enabled=autocast):
        ours = results(zero.tiled_cross_entropy, given, kept, scale, tile_size=64)
        theirs = results(plain, given, kept, scale)
    assert ours[0].dtype == torch.float32
    for mine, their, right in zip(ours, theirs, exact, strict=True):
        assert error([mine], [right]) <= allowed([right], [their])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; torch sees none")
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(("dtype", "scale"), [(torch.bfloat16, 1.0), (torch.float16, 2.0**14)])
def test_sixteen_bits_on_a_gpu(dtype: torch.dtype, scale: float, autocast: bool) -> None:
    given = {name: value.cuda() for name, value in case(300, 1501, 64, ignored=7).items()}
    check_sixteen_bits(given, dtype, scale, autocast)


# Autograd.


def test_a_graph_can_be_run_again_and_in_a_recomputation() -> None:
    given = case(70, 19, 6)
    leaves = {name: value.requires_grad_() for name, value in given.items() if name != "targets"}

    def loss(hidden: Tensor) -> Tensor:
        rest = {**given, "hidden": hidden.tanh()}
        return zero.tiled_cross_entropy(**rest, tile_size=16)

    once = torch.autograd.grad(loss(leaves["hidden"]), leaves.values())
    kept = loss(leaves["hidden"])
    for retain in (True, True, False):
        again = torch.autograd.grad(kept, leaves.values(), retain_graph=retain)
        assert all(torch.equal(one, other) for one, other in zip(once, again, strict=True))
    for reentrant in (True, False):
        recomputed = checkpoint(loss, leaves["hidden"], use_reentrant=reentrant)
        recomputed.backward()
        assert all(torch.equal(one, leaf.grad) for one, leaf in zip(once, leaves.values(), strict=True))
        for leaf in leaves.values():
            leaf.grad = None


def test_a_second_derivative_is_refused() -> None:
    given = case(10, 7, 3)
    given["hidden"].requires_grad_()
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(zero.tiled_cross_entropy(**given), given["hidden"], create_graph=True)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"targets": torch.zeros(9, dtype=torch.int64)}, r"targets=.*\(9,\); wanted torch.int64 \(10,\)"),
        ({"targets": torch.zeros(10)}, "targets=.*float32"),
        ({"targets": torch.full((10,), 7)}, r"targets=.*got 7; wanted 0 to 6, or ignore_index, which is -100"),
        ({"targets": torch.full((10,), -1)}, r"targets=.*got -1"),
        ({"weight": torch.zeros(7, 4)}, r"hidden \(10, 3\) and weight \(7, 4\)"),
        ({"weight": torch.zeros(7)}, r"weight \(7,\)"),
        ({"weight": None}, r"weight=.*NoneType"),
        ({"weight": torch.zeros(7, 3, dtype=torch.float64)}, "wanted one floating dtype"),
        ({"bias": torch.zeros(3)}, r"bias=.*got \(3,\); wanted \(7,\)"),
        ({"tile_size": 0}, "tile_size=.*got 0"),
        ({"tile_size": 2.5}, "tile_size=.*got 2.5"),
        ({"reduction": "none"}, "reduction=.*got 'none'; wanted 'mean' or 'sum'"),
        ({"label_smoothing": 1.5}, "label_smoothing=.*got 1.5"),
        ({"z_loss": -1.0}, "z_loss=.*got -1.0"),
    ],
)
def test_arguments_that_do_not_fit_are_named(wrong: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        zero.tiled_cross_entropy(**{**case(10, 7, 3, bias=False), **wrong})


# Memory.


def peak(loss: Loss, given: dict[str, Tensor]) -> int:
    leaves = {name: value.requires_grad_() for name, value in given.items() if name != "targets"}
    with LiveBytes(given.values()) as live:
        loss(**given).backward()
    for leaf in leaves.values():
        leaf.grad = None
    return live.peak


def test_the_peak_is_below_a_quarter_of_the_plain_one() -> None:
    tokens, vocabulary, width = 768, 50_304, 32
    given = case(tokens, vocabulary, width, bias=False)
    ours, theirs = peak(zero.tiled_cross_entropy, given), peak(plain, given)
    assert theirs >= 3 * 4 * tokens * vocabulary, "the count of the plain one misses something"
    assert ours < theirs / 4


# Engines.


class TiledNet(Net):
    """A Net whose head is read by its root, which calls the tiled loss."""

    def __init__(self, tile_size: int | None, tied: bool) -> None:
        super().__init__()
        self.tile_size = tile_size
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        x, weight, bias = self.norm(x), self.head.weight, self.head.bias
        if self.tile_size is None:
            return plain(x, weight, targets, bias)
        return zero.tiled_cross_entropy(x, weight, targets, bias, tile_size=self.tile_size)


def net(tile_size: int | None, tied: bool) -> TiledNet:
    torch.manual_seed(7)
    return TiledNet(tile_size, tied)


def trained(tile_size: int | None, tied: bool, json: Json, steps: int = 3) -> Record:
    return run(Model(lambda: net(tile_size, tied), lambda number, part: share(number)), json, steps)


@pytest.mark.ranks
@pytest.mark.parametrize(("world", "tied"), each_once([1, 2], [False, True]))
def test_training_in_one_slice_has_the_bits_of_plain_training(world: int, tied: bool) -> None:
    for stage in range(4):
        assert differences(trained(100, tied, stage), trained(None, tied, stage)) == [], f"stage {stage}"


@pytest.mark.ranks(2)
def test_training_in_slices_is_as_exact_as_plain_training() -> None:
    training = Training(2, 3, build=lambda: net(None, True))
    stages = [trained(3, True, stage) for stage in range(4)]
    assert all(near(found.weights, training) for found in stages)
    assert all(found.losses == stages[0].losses for found in stages)


@pytest.mark.ranks(2)
def test_a_released_head_outside_of_a_forward_is_named() -> None:
    engine, *_ = zero.initialize(model=net(4, False), config=config(3, 2))
    hidden, targets = torch.zeros(2, 12), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(RuntimeError, match=r"^parameter 'head.weight' is released; read it inside zero.GatheredParam"):
        zero.tiled_cross_entropy(hidden, engine.module.head.weight, targets)
    engine.destroy()


def test_another_ignored_index_and_leading_dims() -> None:
    given = case(60, 9, 4)
    shaped = {**given, "hidden": given["hidden"].view(4, 15, 4), "targets": given["targets"].view(4, 15)}
    ours = results(zero.tiled_cross_entropy, shaped, torch.float64, tile_size=16, ignore_index=3)
    theirs = results(plain, given, torch.float64, ignore_index=3)
    for mine, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.flatten(), their.flatten(), rtol=1e-12, atol=1e-14)


def test_nothing_but_ignored_tokens_gives_no_gradient() -> None:
    given = case(40, 9, 4, ignored=1)
    for ours, theirs in zip(
        results(zero.tiled_cross_entropy, given, torch.float32, tile_size=16),
        results(plain, given, torch.float32),
        strict=True,
    ):
        assert equal(ours, theirs)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("dtype", "precision"),
    [
        (torch.bfloat16, {"bf16": {"enabled": True}}),
        (torch.float16, {"fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 12}}),
    ],
    ids=["bf16", "fp16"],
)
def test_training_in_sixteen_bits(dtype: torch.dtype, precision: dict[str, Any]) -> None:
    """Losses in slices on stages 0 and 3, all at once, and all at once in fp32."""
    runs = [(0, precision, 4), (3, precision, 4), (0, precision, None), (0, {}, None)]
    losses = [trained(size, True, {"stage": stage, **more}, 4).losses for stage, more, size in runs]
    tiled, tiled3, whole, right = losses
    assert tiled == tiled3
    # Four losses are few: both errors have been half an ulp, one of them a third of the other.
    assert 0 < error(tiled, right) <= max(allowed(right, whole), ulps(2, right, dtype))
