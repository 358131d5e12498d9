"""The promise: what experts over ranks cost is known and small.

Per layer and forward one exchange of counts and two of tokens, of which the backward repeats the two, as far as
somebody wants gradients; one read by the host per layer and forward, and none else. Nothing grows over steps.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from adapters import sent
from alive import Alive, alive, only_new
from cut_models import WIDTH, integers
from expert_models import Block, Experts, json_with
from marks import longer
from ranks import Pool
from torch.utils.checkpoint import checkpoint

import zero

READS = ("tolist", "item", "__bool__", "__int__", "__float__", "__index__")
LAYERS, COUNT = 2, 4
RECOMPUTE = {"zero": {"recompute": {"modules": ["Block"], "policy": "full"}}}


class OfTorch(Block):
    """Recomputed by torch's own checkpoint."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class Cost(NamedTuple):
    """Of all layers, in one step: exchanges and their bytes, and reads by the host."""

    forward: tuple[int, int]
    backward: tuple[int, int]
    forward_reads: int
    backward_reads: int


@contextlib.contextmanager
def reads() -> Iterator[list[str]]:
    """What the host reads of tensors inside, by the names of methods."""
    found: list[str] = []

    def noting(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        def read(*args: Any, **kwargs: Any) -> Any:
            found.append(name)
            return plain(*args, **kwargs)

        return read

    with pytest.MonkeyPatch.context() as patch:
        for name in READS:
            patch.setattr(torch.Tensor, name, noting(name, getattr(torch.Tensor, name)))
        yield found


def left(index: torch.Tensor) -> tuple[int, int]:
    """Rows that leave this rank for their experts, and on their way back."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    mine = torch.bincount(index.flatten() // (COUNT // ranks), minlength=ranks)
    told = torch.empty_like(mine)
    dist.all_to_all_single(told, mine)
    return int(mine.sum() - mine[rank]), int(told.sum() - told[rank])


def one_step(ways: str, frozen: tuple[str, ...], stage: int) -> tuple[Cost, tuple[int, int]]:
    """Of the second step: what it costs, and rows that leave this rank."""
    model, routes = Experts(COUNT, blocks=LAYERS), list[torch.Tensor]()
    for name, param in model.named_parameters():
        param.requires_grad_(not any(word in name for word in frozen))
    for block in model.blocks:
        block.mix.experts.register_forward_pre_hook(lambda _, args: routes.append(args[1]))
        block.__class__ = OfTorch if ways == "torch" else Block
    json = json_with(dist.get_world_size(), stage, comms_logger={"enabled": True})
    engine = zero.initialize(model=model, config=json | (RECOMPUTE if ways == "zero" else {}))[0]
    for number in range(2):
        routes.clear()
        batch, noted = integers(number, dist.get_rank()), [exchanged(engine)]
        with reads() as forward:
            loss = engine(**batch)
        noted.append(exchanged(engine))
        rows = [left(index) for index in routes]
        with reads() as backward:
            engine.backward(loss)
        noted.append(exchanged(engine))
        engine.step()
    engine.destroy()
    between = [tuple(b - a for a, b in zip(*pair, strict=True)) for pair in itertools.pairwise(noted)]
    return Cost(*between, len(forward), len(backward)), tuple(map(sum, zip(*rows, strict=True)))


def exchanged(engine: Any) -> tuple[int, int]:
    counts, rows = (sent(engine).get(name, (0, 0)) for name in ("expert counts", "expert exchange"))
    return counts[0] + rows[0], counts[1] + rows[1]


CASES: list[tuple[str, tuple[str, ...], int]] = [  # recomputed by, frozen, and exchanges of a layer in the backward
    ("", (), 2),
    ("zero", (), 4),
    ("torch", (), 5),  # which makes the counts anew: nothing says to a forward that it runs again
    ("", ("experts",), 2),
    ("", ("embed", "blocks.0"), 2),
]


@pytest.mark.parametrize(
    ("world", "stage", "ways", "frozen", "again"),
    [(2, 3, *CASES[1]), *longer(*((4, 3, *case) for case in CASES), (2, 0, *CASES[0]), (2, 2, *CASES[2]))],
)
def test_exchanges_bytes_and_reads(
    pool: Pool, world: int, stage: int, ways: str, frozen: tuple[str, ...], again: int
) -> None:
    for cost, rows in pool.run(world, one_step, ways, frozen, stage):
        counts = LAYERS * (world - 1) * COUNT // world * 8
        way = sum(rows) * WIDTH * 4
        assert cost.forward == (LAYERS * 3, counts + way)
        if "embed" in frozen:  # nobody wants gradients of the first block, nor of tokens that the second one gets
            assert cost.backward[0] == 1
        else:
            assert cost.backward == (LAYERS * again, way * (2 if ways else 1) + (counts if ways == "torch" else 0))
        assert cost.forward_reads == LAYERS
        assert cost.backward_reads == (LAYERS if ways == "torch" else 0)


@only_new()
def steady(stage: int, ways: str, steps: int) -> tuple[Alive, Alive]:
    json = json_with(2, stage, 2) | (RECOMPUTE if ways == "zero" else {})
    engine, found = zero.initialize(model=Experts(), config=json)[0], []
    for step in range(steps):
        with torch.no_grad():
            engine(**integers(step, dist.get_rank()))
        engine(**integers(step, dist.get_rank()))  # a loss that nobody wants
        for micro in range(2):
            engine.backward(engine(**integers(2 * step + micro, dist.get_rank())))
            engine.step()
        if step in (3, steps - 1):
            alive()
            found.append(alive())
    engine.destroy()
    return found[0], found[1]


@pytest.mark.parametrize(
    ("stage", "ways", "steps"),
    [(3, "zero", 8), *longer((0, "", 58), (3, "", 58), (2, "zero", 58))],
)
def test_nothing_grows(pool: Pool, stage: int, ways: str, steps: int) -> None:
    """In no tenth step, behind which the counts of tokens begin anew."""
    for early, late in pool.run(2, steady, stage, ways, steps):
        assert late[:2] == early[:2]
        assert {kind: count for kind, count in late.ours.items() if "experts" in kind or "recompute" in kind} == {
            kind: count for kind, count in early.ours.items() if "experts" in kind or "recompute" in kind
        }
        assert late.objects < early.objects + 20
