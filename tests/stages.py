"""Train one model under every stage on two ranks, and as the oracle in plain torch; then compare.

In fp32 the stages must agree to the bit, and their error against plain fp64 may be what closeness.py says.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from models import config
from oracle import Training, backward, near
from torch import nn

import zero

STEPS = 3
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


def run(kind: Callable[[], nn.Module], loop: Loop, stage: int, section: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Train under `stage`; further keys of `zero_optimization` in `section`."""
    model, rank = build(kind), dist.get_rank()
    settings = config(stage, dist.get_world_size(), **more)
    settings["zero_optimization"].update(section)
    engine, *_ = zero.initialize(model=model, config=settings)
    losses = []
    for step in range(STEPS * settings["gradient_accumulation_steps"]):
        losses.append(loop(engine, inputs(step, rank), rank, 1.0))
        engine.step()
    engine.destroy()
    return {"losses": losses, "params": {name: param.detach() for name, param in model.named_parameters()}}


def run_all(kind: Callable[[], nn.Module], loop: Loop, section: dict[str, Any], more: dict[str, Any]) -> list[Any]:
    """`run` under all stages."""
    return [run(kind, loop, stage, section, **more) for stage in range(4)]


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two runs have bitwise the same losses and parameters."""
    losses = all(torch.equal(a, b) for a, b in zip(one["losses"], other["losses"], strict=True))
    return losses and all(torch.equal(one["params"][name], other["params"][name]) for name in one["params"])


def check(
    pool: Any,
    kind: Callable[[], nn.Module],
    loop: Loop = one_backward,
    section: dict[str, Any] | None = None,
    accumulation: int = 1,
    plain: Loop | None = None,
) -> None:
    """Every stage against stage 0, and stage 0 against plain torch, which runs `plain`, or else the same loop."""

    def micro(model: Any, number: int, rank: int, world: int, factor: float) -> torch.Tensor:
        x = inputs(number, rank).to(next(model.parameters()).dtype)
        return (plain or loop)(model, x, rank, factor)

    training = Training(2, STEPS, accumulation, build=lambda: build(kind), micro=micro)
    # Where micro-batches add up before they are reduced, sums have another order than where they do not.
    more = {"accumulation": accumulation, "zero": {"reduce_every_micro_batch": True}}
    for rank, stages in enumerate(pool.run(2, run_all, kind, loop, section or {}, more)):
        assert near(stages[0]["params"], training), f"rank {rank}"
        for stage in (1, 2, 3):
            assert same(stages[0], stages[stage]), f"stage {stage} on rank {rank}"
