"""The promise: a program that calls `step()` at boundaries only, as Accelerate does, trains as one that always does.

Bit for bit, with the counters, the leaves of `"reduce": "tree"` and the seeds of dropout per micro-batch.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from marks import each_once
from models import WIDTH, Block, config
from torch import nn

import zero

WINDOWS = (4, 8, 4)  # micro-batches of all ranks in each optimizer step
TREE = {"reduce": "tree"}


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())
        self.dropout = nn.Dropout(0.4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.blocks(x)).square().mean()


def made(stage: int, **more: Any) -> Any:
    world = dist.get_world_size() if dist.is_initialized() else 1
    torch.manual_seed(5)
    return zero.initialize(model=Dropping(), config=config(stage, world, accumulation=4 // world, **more))[0]


def inputs(number: int) -> torch.Tensor:
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(number))


def stepping(engine: Any, x: torch.Tensor, last: bool) -> None:
    """Every micro-batch has its step; the boundary is said before it."""
    engine.set_gradient_accumulation_boundary(last)
    engine.backward(engine(x))
    engine.step()


def twice(engine: Any, x: torch.Tensor, last: bool) -> None:
    """Two backwards in a micro-batch, each of a forward of its own."""
    engine.set_gradient_accumulation_boundary(last)
    for _ in range(2):
        engine.backward(engine(x))
    engine.step()


def as_accelerate(engine: Any, x: torch.Tensor, last: bool) -> None:
    """The boundary is said between forward and backward, inside `no_sync` where that is; steps at boundaries only."""
    quiet = not last and engine.zero_optimization_stage() < 2 and not engine._sharded.sharding.grads
    with engine.no_sync() if quiet else contextlib.nullcontext():
        loss = engine(x)
        engine.set_gradient_accumulation_boundary(last)
        engine.backward(loss)
    if last:
        engine.step()


def early(engine: Any, x: torch.Tensor, last: bool) -> None:
    """As that, with the boundary said before the forward, and torch's own backward."""
    engine.set_gradient_accumulation_boundary(last)
    engine(x).backward()
    if last:
        engine.step()


LOOPS = {loop.__name__: loop for loop in (stepping, as_accelerate, early, twice)}


def trained(loop: str, stage: int, tree: bool) -> dict[str, Any]:
    """Counters and norms after each window, the leaves that backwards had, and the parameters in the end."""
    rank, world = dist.get_rank(), dist.get_world_size()
    engine = made(stage, **({"zero": TREE} if tree else {}))
    leaves: list[Any] = []
    engine._sharded.reducer.on_flush.append(lambda: leaves.append(engine._sharded.reducer.leaf.micro_batch))
    torch.manual_seed(100 + rank)  # of dropout, where micro-batches have no seed of their own
    counters, number = [], rank
    for window in WINDOWS:
        for index in range(window // world):
            LOOPS[loop](engine, inputs(number), index == window // world - 1)
            number += world
        counters.append((engine.micro_steps, engine.global_steps, engine.get_global_grad_norm()))
    engine.destroy()
    params = {name: param.detach() for name, param in engine.module.named_parameters()}
    return {"counters": counters, "leaves": leaves, "params": params}


def equal(found: dict[str, Any], wanted: dict[str, Any]) -> bool:
    pairs = zip(found["params"].values(), wanted["params"].values(), strict=True)
    return found["counters"] == wanted["counters"] and all(torch.equal(mine, theirs) for mine, theirs in pairs)


def compared(loop: str, stage: int, tree: bool) -> list[str]:
    found, wanted = trained(loop, stage, tree), trained("stepping", stage, tree)
    counts = [window // dist.get_world_size() for window in WINDOWS]
    wrong = [] if equal(found, wanted) else [f"{found['counters']}, {wanted['counters']}"]
    wrong += (
        [] if [micro for micro, *_ in wanted["counters"]] == [sum(counts[: n + 1]) for n in range(3)] else ["oracle"]
    )
    wrong += [] if found["leaves"] == [leaf for count in counts for leaf in range(count)] else [str(found["leaves"])]
    return wrong


@pytest.mark.parametrize(("loop", "stage", "tree"), each_once(["as_accelerate", "early"], [0, 1, 2, 3], [False, True]))
def test_steps_may_be_left_out_off_the_boundary(pool: Any, loop: str, stage: int, tree: bool) -> None:
    assert pool.run(2, compared, loop, stage, tree) == [[], []]


def both(stage: int) -> list[Any]:
    found = [trained(loop, stage, True) for loop in ("as_accelerate", "twice")]
    return [
        [norm for *_, norm in each["counters"]]
        + [value.view(torch.int32).tolist() for value in each["params"].values()]
        for each in found
    ]


@pytest.mark.parametrize("stage", [2, *(pytest.param(stage, marks=pytest.mark.long) for stage in (0, 3))])
def test_the_tree_has_the_same_bits_at_any_world_size(pool: Any, stage: int) -> None:
    (wanted,) = pool.run(1, both, stage)
    for world in (2, 4):
        assert all(found == wanted for found in pool.run(world, both, stage))


def test_counters_between_forward_and_step() -> None:
    engine, seen = made(2), []

    def note() -> None:
        seen.append((engine.micro_steps, engine._sharded.reducer.leaf.micro_batch))

    for last in (False, False, True):
        loss = engine(inputs(0))
        engine.set_gradient_accumulation_boundary(last)
        note()
        engine.backward(loss)
        note()
    engine.step()
    note()
    assert seen == [(0, 0), (1, 0), (1, 1), (2, 1), (2, 2), (2, 2), (3, 0)]
    engine.set_gradient_accumulation_boundary(False)
    engine.backward(engine(inputs(0)))
    with torch.no_grad():
        engine(inputs(0))  # a look at the model is no micro-batch
    engine.backward(engine(inputs(0)))  # nor is another backward, unless the boundary is said again
    assert engine.micro_steps == 4
    engine.set_gradient_accumulation_boundary(None)
    assert not engine.is_gradient_accumulation_boundary()  # the first of four runs
    engine.step()
    assert (engine.micro_steps, engine.global_steps) == (4, 1)
    engine.destroy()


def test_an_exception_begins_the_window_anew() -> None:
    engine = made(2)
    for failing in (True, False):
        for last in (False, False, True):
            loss = engine(inputs(0))
            engine.set_gradient_accumulation_boundary(last)
            engine.backward(loss)
            if failing and engine.micro_steps == 2:
                with pytest.raises(TypeError):
                    engine()
                assert (engine.micro_steps, engine._sharded.reducer.leaf.micro_batch) == (0, 0)
                break
        else:
            engine.step()
    assert (engine.micro_steps, engine.global_steps) == (3, 1)
    engine.destroy()
