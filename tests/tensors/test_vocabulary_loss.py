"""The promise: the loss of a head whose rows lie on several ranks is that of the whole one, in slices of tokens."""

from __future__ import annotations

import contextlib
import math
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cut_models import adam, family, full, json_of, place_of, plain, trained, words
from marks import longer
from ranks import said_by
from sharing import needs_transformers
from torch import nn
from torch.nn import functional as F
from transformer_models import NO_DROPOUT, tiny

import zero
from zero.core.mesh import Mesh, Meshes
from zero.core.owner import Owner
from zero.core.world import make_world
from zero.plan.cut import Box, Cut
from zero.plan.grid import PARTS, Grid
from zero.plan.sharding import Sharding
from zero.tiled.vocabulary import Vocabulary

VOCABULARY, WIDTH, TOKENS = 13, 8, 11
EDGES = {2: [0, 9, 13], 3: [0, 5, 12, 13], 4: [0, 4, 5, 9, 13]}  # of the rows of each rank, by how many there are


class Head(nn.Module):
    """Rows of a head, parts of unequal size, and the hidden states it is given."""

    def __init__(self, dtype: torch.dtype = torch.float32, masked: bool = False) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        weight, bias = (torch.randn(*size, generator=generator) for size in ((VOCABULARY, WIDTH), (VOCABULARY,)))
        weight, bias = (each.to(dtype).float() if dtype != torch.float64 else each.double() for each in (weight, bias))
        if masked:
            bias[EDGES[dist.get_world_size()][-2] :] = -torch.inf
        rank = dist.get_rank()
        first, stop = EDGES[dist.get_world_size()][rank : rank + 2]
        self.weight, self.bias = nn.Parameter(weight[first:stop].to(dtype)), nn.Parameter(bias[first:stop].to(dtype))
        zero.set_cut(self.weight, Cut((VOCABULARY, WIDTH), (Box((first, 0), (stop - first, WIDTH)),)), module=self)
        zero.set_cut(self.bias, Cut((VOCABULARY,), (Box((first,), (stop - first,)),)), module=self)
        self.whole = weight, bias

    def forward(self, hidden: torch.Tensor, targets: torch.Tensor, **how: Any) -> torch.Tensor:
        return zero.tiled_cross_entropy(hidden, self.weight, targets, self.bias, **how)


def of_all(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, targets: torch.Tensor, **how: Any) -> Any:
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


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("world", "stage", "dtype"),
    [
        *((2, 0, torch.float32), (2, 3, torch.float32), (2, 3, torch.bfloat16)),
        *longer(*((3, 1, torch.float32), (4, 1, torch.float32), (4, 1, torch.bfloat16))),  # of which one has one row
    ],
)
def test_megatron_7452_ce_and_torchtitan_3412_loss_of_a_head_in_unequal_parts(
    world: int, stage: int, dtype: torch.dtype
) -> None:
    """It has no log(tp) in it, as one fed with gathered logits had; what slices of tokens give is no part of a sum.

    In 16 bits only the gradient is rounded.
    """
    head, tp = Head(dtype), dist.get_world_size()
    weight, bias = head.whole
    more = {"bf16": {"enabled": True}} if dtype == torch.bfloat16 else {}
    engine, *_ = zero.initialize(model=head, config=json_of(1, stage, tensor_parallel={"autotp_size": tp}, **more))
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator).to(dtype).float()
    some = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
    some[3] = -100
    last_bit = torch.finfo(dtype).eps
    for targets in (some, torch.full((TOKENS,), VOCABULARY - 1), torch.zeros(TOKENS, dtype=torch.long)):
        for how in WAYS:
            given = hidden.to(dtype, copy=True).requires_grad_()
            loss = engine(given, targets, **how)
            loss.backward()
            exact = [each.double().requires_grad_() for each in (hidden, weight, bias)]
            single = [each.clone().requires_grad_() for each in (hidden, weight, bias)]
            wanted, rounded = of_all(*exact, targets, **how), of_all(*single, targets, **how)
            wanted.backward()
            rounded.backward()
            allowed = 2 * max(abs(rounded.item() - wanted.item()), 2**-23 * abs(wanted.item()))  # at least one last bit
            assert loss.dtype == torch.float32 and abs(loss.item() - wanted.item()) <= allowed
            every = [torch.empty_like(given.grad) for _ in range(tp)]
            dist.all_gather(every, given.grad)
            assert all(torch.equal(each, every[0]) for each in every)
            params = engine.module.weight, engine.module.bias
            found = [given.grad, *(zero.utils.safe_get_full_grad(param) for param in params)]
            for grad, whole, other in zip(found, exact, single, strict=True):
                error = 2 * float((other.grad - whole.grad).abs().max()) + 1e-6
                error += last_bit * float(whole.grad.abs().max()) * (dtype == torch.bfloat16)
                assert (grad - whole.grad).abs().max() <= error
            engine.zero_grad()
    engine.destroy()


@contextlib.contextmanager
def mesh_of_parts() -> Iterator[Mesh]:
    """That of an engine whose ranks all have other rows."""
    world = make_world()
    try:
        yield Meshes(world, Grid(world.size, {"tp": world.size}), Sharding.of_stage(0)).of(PARTS)
    finally:
        world.watchdog.close()


def unit_of(mesh: Any) -> Any:
    return types.SimpleNamespace(mesh=mesh, engine=lambda: None)


def in_double_precision() -> None:
    """Rows of a rank that are all masked, and targets that are all ignored, or of no token, too."""
    hidden = torch.randn(TOKENS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    targets = torch.arange(TOKENS) * 5 % EDGES[dist.get_world_size()][-2]
    masked = [{}, {"tile_size": 4, "z_loss": 0.1}]
    with mesh_of_parts() as mesh:
        for head, ways in ((Head(torch.float64), WAYS), (Head(torch.float64, masked=True), masked)):
            for param in (head.weight, head.bias):
                param._zero_owner = Owner("", unit_of(mesh), 0)
            for kept in (targets, targets.where(targets > 3, -100), targets * 0 - 100, targets[:0]):
                for how in ways:
                    given, *whole = (each.clone().requires_grad_() for each in (hidden[: len(kept)], *head.whole))
                    wanted = of_all(given, *whole, kept, **how)
                    wanted.backward()
                    right = [given.grad.nan_to_num(), *(each.grad.nan_to_num() for each in whole)]
                    given.grad = head.weight.grad = head.bias.grad = None
                    loss = head(given, kept, **how)
                    loss.backward()
                    torch.testing.assert_close(loss, wanted, rtol=1e-13, atol=1e-13, equal_nan=True)
                    parts: list[Any] = [None] * dist.get_world_size()
                    dist.all_gather_object(parts, (head.weight.grad, head.bias.grad))
                    found = [given.grad, *map(torch.cat, zip(*parts, strict=True))]
                    for mine, theirs in zip(found, right, strict=True):
                        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("world", [2, *longer(3, 4)])
def test_any_cut_is_exact_in_double_precision(pool: Any, world: int) -> None:
    pool.run(world, in_double_precision)


@pytest.mark.ranks(2)
def test_a_target_that_nobody_has() -> None:
    """On a CPU it is an error; a GPU is not waited for, and has an infinite loss."""
    outside = torch.full((2,), VOCABULARY)
    with mesh_of_parts() as mesh:
        head = Head()
        for param in (head.weight, head.bias):
            param._zero_owner = Owner("", unit_of(mesh), 0)
        said = said_by(lambda: head(torch.zeros(2, WIDTH), outside))
        assert said.startswith("ValueError: tiled_cross_entropy(targets=...): got 13; wanted 0 to 12, or ignore_index")
        rows = Vocabulary.of(head.weight, head.bias)
        assert (
            rows is not None and rows.normalize(torch.ones(2, len(head.bias)), outside[:, None], False)[0].max() < -1e9
        )


def cut_as(shape: tuple[int, ...], *boxes: Box, ranks: int = 2) -> nn.Parameter:
    """A parameter of zeros that is cut so, of an engine with so many ranks; 0: of none."""
    param = nn.Parameter(torch.zeros(sum(box.numel for box in boxes)).view(-1, *boxes[0].sizes[1:]))
    zero.set_cut(param, Cut(shape, boxes))
    if ranks:
        mesh = types.SimpleNamespace(peers=types.SimpleNamespace(size=ranks))
        param._zero_owner = Owner("", unit_of(mesh), 0)
    return param


HALF = Box((0, 0), (4, 3))


@pytest.mark.parametrize(
    ("weight", "bias", "said"),
    [
        (lambda: cut_as((4, 6), HALF), None, "a part of a weight (4, 6); wanted some of its rows, cut over the ranks"),
        (lambda: cut_as((8, 3), Box((0, 0), (2, 3)), Box((4, 0), (2, 3))), None, "a part of a weight (8, 3); wanted"),
        (lambda: cut_as((8, 3), HALF, ranks=0), None, "cut over the ranks of an engine"),
        (lambda: cut_as((8, 3), HALF, ranks=1), None, "cut over the ranks of an engine"),
        (
            lambda: cut_as((8, 3), HALF),
            lambda: cut_as((8,), Box((4,), (4,))),
            "got weight (0, 8) and bias (4, 8) of (first row, of all rows); wanted the same rows",
        ),
        (lambda: cut_as((8, 3), HALF), lambda: nn.Parameter(torch.zeros(4)), "weight (0, 8) and bias all of"),
    ],
)
def test_other_cuts_are_refused(weight: Callable[[], Any], bias: Callable[[], Any] | None, said: str) -> None:
    """Also those of which no engine knows who has the rest."""
    given = torch.zeros(2, 3), weight(), torch.zeros(2, dtype=torch.long), bias and bias()
    error = said_by(lambda: zero.tiled_cross_entropy(*given))
    assert error.startswith("ValueError: tiled_cross_entropy") and said in error


def test_a_cut_that_is_the_whole_is_plain() -> None:
    weight = cut_as((8, 3), Box((0, 0), (8, 3)), ranks=0)
    loss = zero.tiled_cross_entropy(torch.zeros(2, 3), weight, torch.zeros(2, dtype=torch.long))
    assert loss.item() == pytest.approx(math.log(8))


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


def phi() -> Any:
    """Its head has a bias."""
    sizes = {"vocab_size": 67, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    return tiny("PhiForCausalLM", 0, **sizes, **NO_DROPOUT, num_attention_heads=4, attention_dropout=0.0)


def llama() -> Any:
    return family("llama")


def gradients(make: Callable[[], Any], stage: int, more: dict[str, Any]) -> None:
    def batch(number: int, place: int) -> dict[str, Any]:
        given = words(number, place)
        return given | {"labels": given["labels"].where(given["labels"] > 9, -100)}

    json = json_of(2, stage, tensor_parallel=more)
    places, place = dist.get_world_size() // 2, place_of(2)
    found = trained(lambda: zero.tile_loss(make()), json, batch, place)
    right = plain(make, batch, places)
    assert found["losses"][0] == pytest.approx(make()(**batch(0, place)).loss.item(), rel=1e-6)
    for name, grad in right["grads"].items():
        torch.testing.assert_close(found["grads"][name], grad, rtol=1e-4, atol=1e-6, msg=name)
    assert found["shapes"]["lm_head.weight"][0] in (33, 34)


@needs_transformers
@pytest.mark.parametrize(
    ("world", "make", "stage", "more"),
    [
        (2, phi, 0, {}),
        *longer((4, llama, 3, {}), (2, llama, 1, {"sequence_parallel": True}), (4, phi, 2, {})),
    ],
)
def test_gradients_of_models_of_transformers(pool: Any, world: int, make: Any, stage: int, more: Any) -> None:
    """That of what goes into the head is summed over the ranks once, and so are those before it."""
    pool.run(world, gradients, make, stage, more)


@needs_transformers
@pytest.mark.ranks(2)
def test_a_tiled_loss_beside_sums_of_a_tree_is_refused() -> None:
    json = json_of(2, 1, tensor_parallel={"reduce": "tree", "blocks": 2}, zero={"reduce": "tree"})
    engine, *_ = zero.initialize(model=zero.tile_loss(family("llama", vocab_size=68)), config=json)
    said = said_by(lambda: engine(**words(0, 0)))
    assert "got a part of a weight (68, 32) with tensor_parallel.reduce 'tree', whose sums a tiled loss has not" in said
    engine.destroy()
