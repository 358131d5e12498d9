"""The promise: `"zero": {"recompute": ...}` changes no bit of a training, on any stage, in whatever way it runs."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from recomputing import Block, Net, inputs, make, result, same, settings, steps, trained
from torch import nn
from torch.utils.checkpoint import checkpoint

import zero
from zero.core import comm
from zero.recompute.modules import Recomputed

FULL = {"modules": ["Block"]}
SELECTIVE = {"modules": ["blocks.*"], "policy": "selective"}
HOST = {"cpu_checkpointing": True}
SLAB = {"contiguous_memory_optimization": True, "number_checkpoints": 3}
WAYS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (FULL, {}),
    (SELECTIVE, {}),
    ({**SELECTIVE, "products": 2}, {}),
    ({**FULL, "every": 2}, {}),
    ({**FULL, "policy": "auto", "budget": "20 KB"}, {}),
    (FULL, HOST),
    (FULL, SLAB),
    (SELECTIVE, {**HOST, **SLAB, "number_checkpoints": 2}),
]


def ways(stage: int, dtype: str, reduce: str) -> list[bool]:
    """Whether each way gives the bits of a training without recomputation."""
    more = {"bf16": {"enabled": dtype == "bf16"}, "zero": {"reduce": reduce}}
    base = trained(make(), settings(stage, {}, **more))
    found = []
    for section, rest in WAYS:
        made = trained(make(), settings(stage, section, activation_checkpointing=rest, **more))
        found.append(same(base, made))
    return found


@pytest.mark.parametrize(
    ("stage", "world", "dtype", "reduce"),
    [
        *((stage, 2, "fp32", "ranks") for stage in range(4)),
        *((0, 1, "fp32", "ranks"), (3, 1, "fp32", "ranks")),
        *((3, 2, "bf16", "ranks"), (2, 2, "fp32", "tree")),
    ],
)
def test_no_bit_changes(pool, stage, world, dtype, reduce):
    assert pool.run(world, ways, stage, dtype, reduce) == [[True] * len(WAYS)] * world


def gathers(section: dict[str, Any]) -> tuple[list[int], list[int]]:
    """Tags of the gathers of a step, which tell units, and how often each block's forward ran."""
    engine = zero.initialize(model=make(), config=settings(3, section))[0]
    steps(engine, 1)
    for block in engine.module.blocks:
        block.calls = 0
    tags, plain = [], comm.gather
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comm, "gather", lambda full, axis, tag: (tags.append(tag), plain(full, axis, tag))[1])
        steps(engine, 1)
    calls = [block.calls for block in engine.module.blocks]
    engine.destroy()
    return sorted(tags), calls


def both_gathers() -> list[tuple[list[int], list[int]]]:
    return [gathers(section) for section in ({}, FULL, SELECTIVE)]


def test_a_recomputed_unit_is_gathered_once(pool):
    (plain, once), (full, twice), (selective, again) = pool.run(2, both_gathers)[0]
    assert plain == full == selective
    assert once == [1, 1, 1]
    assert twice == again == [2, 2, 2]


def two_losses(engine: Any) -> list[float]:
    """Backward calls of several kinds: a graph run twice, two losses through one forward, one through two."""
    first = engine(*inputs(0))
    first.backward(retain_graph=True)
    first.backward()
    x = engine.module.embed(inputs(1)[0])
    second = engine.module.body(x)
    (second[:, 0].sum() * 0.1).backward(retain_graph=True)
    second.square().mean().backward()
    third = engine(*inputs(2)) + engine(*inputs(3))
    third.backward()
    engine.step()
    return [first.item(), second.sum().item(), third.item()]


def several(stage: int) -> list[bool]:
    found = []
    for section, rest in ({}, {}), (FULL, {}), (SELECTIVE, {}), (FULL, {**HOST, **SLAB}):
        engine = zero.initialize(model=make(), config=settings(stage, section, activation_checkpointing=rest))[0]
        torch.manual_seed(4)
        found.append(result(engine, [two_losses(engine), steps(engine, 1)]))
    return [same(found[0], other) for other in found[1:]]


@pytest.mark.parametrize("stage", [1, 3])
def test_backward_runs_several_times(pool, stage):
    assert pool.run(2, several, stage) == [[True] * 3] * 2


def accumulated() -> list[bool]:
    made = [trained(make(), settings(3, section, accumulation=2)) for section in ({}, FULL, SELECTIVE)]
    return [same(made[0], other) for other in made[1:]]


def test_micro_batches_add_up(pool):
    assert pool.run(2, accumulated) == [[True] * 2] * 2


class SelfCheckpointing(Net):
    """Recomputes its blocks, and parts of them, itself."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        for block in self.blocks:
            block.dropout = Again(block.dropout)

    def body(self, x: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            turn = (self.turn[0], self.turn[1])
            x = checkpoint(lambda y, b=block: b(y, turn, scale=self.turn[0, 0]), x, use_reentrant=number == 1)
        return x


class Again(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


def nested(stage: int) -> list[bool]:
    base = trained(make(), settings(stage, {}))
    sections = ({}, FULL, SELECTIVE, {**FULL, "policy": "auto", "budget": "20 KB"})
    sections = (*sections, {"modules": ["Again"]}, {"modules": ["SelfCheckpointing"]})
    made = [trained(make(SelfCheckpointing), settings(stage, section)) for section in sections]
    made.append(trained(make(SelfCheckpointing), settings(stage, FULL, activation_checkpointing=HOST)))
    renamed = [{**each, "params": {name.replace("inner.", ""): p for name, p in each["params"].items()}} for each in made]
    return [same(base, other) for other in renamed]


@pytest.mark.parametrize("stage", [0, 3])
def test_a_model_that_recomputes_itself(pool, stage):
    assert pool.run(2, nested, stage) == [[True] * 7] * 2


def compiled(stage: int, dropout: float) -> list[bool]:
    made = []
    for section in {}, FULL, SELECTIVE, {**FULL, "policy": "auto", "budget": "20 KB"}:
        torch._dynamo.reset()
        engine = zero.initialize(model=make(dropout=dropout), config=settings(stage, section))[0]
        engine.compile(backend="aot_eager")
        torch.manual_seed(9)
        made.append(result(engine, steps(engine, 3)))
        assert not any("forward" in block.__dict__ for block in engine.module.blocks)
    return [same(made[0], other) for other in made[1:]]


@pytest.mark.parametrize(("stage", "dropout"), [(0, 0.2), (3, 0.2)])
def test_compiled_blocks(pool, stage, dropout):
    assert pool.run(2, compiled, stage, dropout) == [[True] * 3] * 2


def without_gradients() -> tuple[list[int], list[int], bool]:
    engine = zero.initialize(model=make(), config=settings(3, FULL, activation_checkpointing=HOST))[0]
    engine.eval()
    with torch.no_grad():
        engine(*inputs(0))
    with torch.inference_mode():
        engine(*inputs(0))
    idle = [block.calls for block in engine.module.blocks]
    untouched = engine._recomputing.rest.slots.nbytes == 0
    loss = engine(*inputs(0))  # in eval with gradients, memory is wanted as in training
    loss.backward()
    busy = [block.calls for block in engine.module.blocks]
    engine.destroy()
    return idle, busy, untouched


def test_without_gradients_forward_is_plain(pool):
    assert pool.run(2, without_gradients) == [([2, 2, 2], [4, 4, 4], True)] * 2


class Fragile(Block):
    """Raises in its recomputation when told to."""

    fail_at = 0

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        out = super().forward(*args, **kwargs)
        if self.fail_at and self.calls == self.fail_at:
            raise ArithmeticError("no")
        return out


def after_exceptions(stage: int, section: dict[str, Any], rest: dict[str, Any]) -> bool:
    """A step fails in the recomputation of the middle block; what follows is as if it had not been."""
    base = trained(make(), settings(stage, {}))
    model = make()
    model.blocks[1].__class__ = Fragile
    values = settings(stage, section, activation_checkpointing=rest)
    engine = zero.initialize(model=model, config=values)[0]
    for call in engine.backward, torch.Tensor.backward:
        loss = engine(*inputs(7))
        model.blocks[1].fail_at = model.blocks[1].calls + 1
        # A recomputation ends where backward has all that it wants; the block's last line may be behind that.
        with torch.utils.checkpoint.set_checkpoint_early_stop(False):
            loss = engine(*inputs(7)) if model.blocks[1].fail_at == 0 else loss
        with pytest.raises(ArithmeticError):
            call(loss)
        model.blocks[1].fail_at = 0
    torch.manual_seed(100 + dist.get_rank())
    return same(base, result(engine, steps(engine, 3)))
