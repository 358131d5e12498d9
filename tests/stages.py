"""Train one model under stages 0, 2 and 3 on two ranks, and as the oracle in plain torch; then compare.

In fp32 the stages must agree to the bit, and their error against plain fp64 may be what closeness.py says. Stage 1
differs from 2 in when it reduces alone, which test_same_numbers.py looks at.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from oracle import Training, backward, near
from scenario import Model, differences, runs
from torch import nn

STEPS = 3
STAGES = (0, 2, 3)
Loop = Callable[[Any, torch.Tensor, int, float], torch.Tensor]  # (model or engine, x, rank, factor of the loss) -> loss


def inputs(step: int, rank: int, width: int = 12) -> torch.Tensor:
    """One rank's micro-batch [2, width]; row sums tell ranks apart."""
    return torch.randn(2, width, generator=torch.Generator().manual_seed(10 * step + rank))


def one_backward(model: nn.Module, x: torch.Tensor, rank: int, factor: float) -> torch.Tensor:
    """The usual: one forward, one backward; `factor` is 1 under an engine."""
    return backward(model(x, rank), factor)


def build(kind: Callable[[], nn.Module]) -> nn.Module:
    """The model with seeded weights."""
    torch.manual_seed(3)
    return kind()


def _inputs(number: int, part: int) -> tuple[torch.Tensor, int]:
    return inputs(number, part), part


def _under(loop: Loop, engine: Any, number: int, args: tuple[torch.Tensor, int]) -> torch.Tensor:
    return loop(engine, *args, 1.0)


def check(
    pool: Any,
    kind: Callable[[], nn.Module],
    loop: Loop = one_backward,
    section: dict[str, Any] | None = None,
    accumulation: int = 1,
    plain: Loop | None = None,
) -> None:
    """Stages 2 and 3 against stage 0, and stage 0 against plain torch, which runs `plain`, or else the same loop."""

    def micro(model: Any, number: int, rank: int, world: int, factor: float) -> torch.Tensor:
        x = inputs(number, rank).to(next(model.parameters()).dtype)
        return (plain or loop)(model, x, rank, factor)

    training = Training(2, STEPS, accumulation, build=lambda: build(kind), micro=micro)
    # Where micro-batches add up before they are reduced, sums have another order than where they do not.
    json = {"accumulation": accumulation, "section": section or {}, "zero": {"reduce_every_micro_batch": True}}
    how = {"steps": STEPS, "loop": functools.partial(_under, loop)}
    model = Model(functools.partial(build, kind), _inputs)
    cases = [((model, {"stage": stage, **json}), how) for stage in STAGES]
    for rank, records in enumerate(pool.run(2, runs, cases)):
        assert near(records[0].weights, training), f"rank {rank}"
        for stage, record in zip(STAGES, records, strict=True):
            assert not differences(record, records[0]), f"stage {stage} on rank {rank}"
