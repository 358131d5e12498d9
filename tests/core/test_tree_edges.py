"""The promise: the tree keeps its bits in awkward steps, and is as near to fp64 as plain torch.

Awkward are windows of any length, blocks that only some micro-batches use, several backwards in a micro-batch,
recomputed dropout, and exceptions. The pairs of runs here differ in the number of ranks alone.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from marks import longer
from models import WIDTH, Block, batch, config, make_net, train
from oracle import Training, near
from torch import nn
from torch.utils.checkpoint import checkpoint

import zero
from zero.config import ConfigError, load
from zero.core import comm
from zero.core.accumulator import TreeAccumulator
from zero.core.world import Axis
from zero.core.tree import Leaf, sum_tree

WINDOWS = (4, 20, 12)  # micro-batches of all ranks in each optimizer step: not always a power of two
TREE = {"reduce": "tree"}


class Routed(nn.Module):
    """Blocks of which micro-batch `number` uses some: the second is for one in 16, or with `level` for four in a row.

    Where parameters are cut, ranks must gather them together, and so use the same blocks in a micro-step.
    """

    def __init__(self, recompute: bool, level: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.dropout = nn.Dropout(0.4)
        self.head = nn.Linear(WIDTH, 1)
        self.scale = nn.Parameter(torch.tensor([-0.0, 1.0]))
        self.recompute = recompute
        self.level = level

    def forward(self, x: torch.Tensor, number: int) -> torch.Tensor:
        chosen = number // 4 % 4 == 1 if self.level else number % 16 == 7
        for index, block in enumerate(self.blocks):
            if index != 1 or chosen:
                x = checkpoint(self._run, block, x, use_reentrant=False) if self.recompute else self._run(block, x)
        if number % 5 == 0:  # a gradient of -0.0 here, none elsewhere
            x = x + self.scale[1] + self.scale[0] * -0.0
        return self.head(x).square().mean()

    def _run(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(block(x))


def routed(stage: int, bf16: bool, how: str) -> list[Any]:
    """Train on the windows; exact bits of what came out, and the norms."""
    rank, world = dist.get_rank(), dist.get_world_size()
    kind = {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9}}
    settings = config(stage, world, accumulation=4 // world, bf16={"enabled": bf16}, zero=TREE, optimizer=kind)
    torch.manual_seed(11)
    model = Routed(how == "recompute", stage == 3)
    engine, *_ = zero.initialize(model=model, config=settings)
    number, norms = rank, []
    for window in WINDOWS:
        for index in range(window // world):
            x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(number))
            engine.set_gradient_accumulation_boundary(index == window // world - 1)
            engine.backward(engine(x.bfloat16() if bf16 else x, number))
            if how == "twice":
                engine.backward(engine(x.bfloat16() if bf16 else x, number) * 0.5)
            if how == "forgotten" and window == 12 and index == 8 // world - 1:
                engine.zero_grad()
            engine.step()
            number += world
        norms.append(engine.get_global_grad_norm())
    engine.destroy()
    values = [param.detach().double().view(-1) for param in model.parameters()]
    return [norms, torch.cat(values).view(torch.int64).tolist()]


@pytest.mark.parametrize(
    ("how", "stages"),
    [
        *(("recompute", (3,)), ("forgotten", (0, 2, 3))),
        *longer(("recompute", (0, 2)), ("once", (0, 2, 3)), ("twice", (0, 2, 3))),
    ],
)
def test_awkward_steps_have_the_same_bits_at_any_world_size(pool, how, stages):
    for stage, bf16 in ((stage, stage == 2) for stage in stages):
        found = [result for world in (1, 2, 4) for result in pool.run(world, routed, stage, bf16, how)]
        assert all(result == found[0] for result in found), f"stage {stage}"
        if how == "recompute":
            assert pool.run(2, routed, stage, bf16, "once")[0] == found[0]


def trained(stages: tuple[int, ...], accumulation: int) -> list[dict[str, Any]]:
    world = dist.get_world_size()
    return [train(make_net(), world, wanted(stage, world, accumulation)) for stage in stages]


def wanted(stage: int, world: int, accumulation: int) -> dict[str, Any]:
    return config(stage, world, accumulation=accumulation, gradient_clipping=0.3, zero=TREE)


@pytest.mark.parametrize(("world", "accumulation"), [(4, 1), *longer((1, 4), (2, 4))])
def test_the_error_is_at_most_twice_that_of_plain_torch(pool, world, accumulation):
    for result in pool.run(world, trained, (0, 3), accumulation)[0]:
        assert near(result["params"], Training(world, 6, accumulation, 0.3))


# --- sums ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_rows_are_added_in_pairs(count, dtype):
    rows = torch.randn(count, 37, generator=torch.Generator().manual_seed(count)).to(dtype)
    kept, out = rows.clone(), torch.empty(37)
    sum_tree(list(rows), out)
    level = list(rows.float())
    while len(level) > 1:
        level = [left + right for left, right in zip(level[::2], level[1::2], strict=True)]
    assert torch.equal(out, level[0])
    assert torch.equal(rows, kept)


def test_no_sum_is_left_at_minus_zero():
    accumulator = TreeAccumulator(torch.float32)
    assert accumulator.total() is None
    for leaf, values in ((Leaf(0), [-0.0, 1.0]), (Leaf(2, 1), [-0.0, -1.0])):
        accumulator.leaf = leaf
        accumulator.add(torch.tensor(values))
    assert len(accumulator.parts()) == 2
    total = accumulator.total()
    assert total.tolist() == [0.0, 0.0]
    assert not torch.signbit(total).any()
    assert accumulator.total() is total


def scattered(native: bool) -> list[float]:
    """The tree's sum of one reduce, by messages or by the backend's all-to-all as under NCCL."""
    size, rank = dist.get_world_size(), dist.get_rank()
    axis = Axis(dist.group.WORLD, size, rank, native, ranks=tuple(range(size)))
    flat = torch.randn(size * 50, generator=torch.Generator().manual_seed(rank))
    out = torch.empty(50)
    comm.scatter(flat, axis, 7, pairwise=True).sum(out, False)
    return out.tolist()


@pytest.mark.parametrize("world", [2, 4])
def test_all_to_all_gives_what_messages_give(pool, world):
    assert pool.run(world, scattered, True) == pool.run(world, scattered, False)


# --- random numbers -----------------------------------------------------------------------------------------


class Draw(nn.Module):
    """Shows what it draws; `fail` raises in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, fail: bool = False) -> torch.Tensor:
        drawn = torch.rand(4)
        if fail:
            raise RuntimeError("in the middle")
        return self.weight.sum() * 0 + drawn


def drawn(zero_section: dict[str, Any]) -> list[Any]:
    torch.manual_seed(4)
    engine, *_ = zero.initialize(model=Draw(), config=config(0, 1, accumulation=2, zero=zero_section))
    found = []
    for _ in range(4):
        outputs = [engine() for _ in range(2)]
        found += [output.tolist() for output in outputs]
        engine.backward(outputs[-1].sum())
        engine.step()
    return found


def test_draws_differ_between_steps_micro_batches_and_forwards_and_repeat():
    found = drawn(TREE)
    assert len({tuple(values) for values in found}) == 8
    assert drawn(TREE) == found


def test_the_script_keeps_its_own_random_numbers():
    engine, *_ = zero.initialize(model=Draw(), config=config(0, 1, zero=TREE))
    torch.manual_seed(9)
    before = torch.get_rng_state()
    engine()
    with pytest.raises(RuntimeError, match="in the middle"):
        engine(fail=True)
    assert torch.equal(torch.get_rng_state(), before)
    engine.eval()
    assert torch.equal(engine(), torch.rand(4, generator=torch.Generator().manual_seed(9)) + 0 * engine.weight)


def after_an_exception(stage: int) -> list[Any]:
    rank, world = dist.get_rank(), dist.get_world_size()
    engine, *_ = zero.initialize(model=make_net(), config=config(stage, world, accumulation=2, zero=TREE))
    for step in range(5):
        tokens, targets = batch(step, 2 * world)
        if step == 1:  # the micro-batch before it is lost, too: the window begins anew
            with pytest.raises(ValueError, match="batch_size"):
                engine(tokens, targets[:, :1])
        engine.backward(engine(tokens[2 * rank : 2 * rank + 2], targets[2 * rank : 2 * rank + 2]))
        engine.step()
    held = engine.state_nbytes().gradients
    engine.destroy()
    return [engine.global_steps, held, [param.sum().item() for param in engine.module.parameters()]]


def test_an_exception_leaves_it_usable(pool):
    results = [result for stage in (1, 3) for result in pool.run(2, after_an_exception, stage)]
    assert all(result == results[0] for result in results)
    assert results[0][:2] == [2, 0]


# --- the configuration --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("world", "steps", "fix"), [(3, 4, "the number of ranks"), (2, 3, "gradient_accumulation_steps")]
)
def test_a_window_that_is_no_power_of_two_is_refused(world, steps, fix):
    given = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": steps, "zero": TREE}
    text = (
        f"zero.reduce: 'tree' wants powers of two; got world size {world} x gradient_accumulation_steps={steps} = "
        f"{world * steps} micro-batches per optimizer step; change {fix}, or use 'ranks'"
    )
    with pytest.raises(ConfigError, match=re.escape(text)):
        load(given, world)
    assert load({**given, "zero": {}}, world).zero.reduce == "auto"
    assert load({**given, "gradient_accumulation_steps": 4}, 2).zero.reduce == "tree"
