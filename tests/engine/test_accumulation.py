"""The promise: who decides where a window ends, whether gradients travel before it, and where `step()` is left out.

None of it changes what is learnt, bit for bit, with the counters and the seeds of dropout per micro-batch. The oracle
is the engine's own counted window, which other tests hold against plain torch. All factors are powers of two.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from marks import each_once, longer
from models import WIDTH, Block, batch, config, make_net
from ranks import said_by
from scenario import settings
from torch import nn

import zero

TREE = {"zero": {"reduce": "tree"}}
VARIANTS: dict[str, dict[str, Any]] = {"fp32": {}, "bf16": {"precision": "bf16"}, "tree": TREE}
Window = list[torch.Tensor]  # the inputs of each micro-batch


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())
        self.dropout = nn.Dropout(0.4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.blocks(x.to(self.blocks[0].up.bias.dtype))).float().square().mean()


def inputs(number: int) -> torch.Tensor:
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(number))


def made(stage: int, accumulation: int = 2, **more: Any) -> Any:
    world = dist.get_world_size() if dist.is_initialized() else 1
    torch.manual_seed(5)
    json = settings({"stage": stage, "comms_logger": {"enabled": True}, **more}, world, accumulation=accumulation)
    return zero.initialize(model=Dropping(), config=json)[0]


def reductions(engine: Any) -> int:
    found = engine.log_comms_summary()
    return found["reduce"].count if "reduce" in found else 0


def counted(engine: Any, window: Window) -> None:
    for x in window:
        engine.backward(engine(x))
        engine.step()


def with_no_sync(engine: Any, window: Window) -> None:
    *first, last = window
    with engine.no_sync():
        for x in first:
            engine.backward(engine(x) / len(window))
    engine.backward(engine(last) / len(window))
    engine.step()


def all_in_no_sync(engine: Any, window: Window) -> None:
    before = reductions(engine)
    with engine.no_sync():
        for x in window:
            engine.backward(engine(x) / len(window))
    assert reductions(engine) == before, "nothing is reduced before the step"
    engine.step()


def coalesced(engine: Any, window: Window) -> None:
    before = reductions(engine)
    with engine.coalesce_grad_reduction():
        for x in window:
            assert engine.is_gradient_accumulation_boundary(), "a block is one step"
            engine.backward(engine(x))
        assert engine.zero_optimization_stage() >= 2 or reductions(engine) == before
    assert reductions(engine) > before, "not reduced at its end"
    steps = engine.global_steps + 1
    engine.step()
    assert (engine.global_steps, engine.micro_steps) == (steps, steps)


def unmanaged(engine: Any, window: Window) -> None:
    inside: list[bool] = []
    hook = engine.optimizer.register_step_pre_hook(lambda *_: inside.append(engine.is_gradient_accumulation_boundary()))
    for x in window:
        engine.backward(engine(x))
        assert not engine.is_gradient_accumulation_boundary(), "a boundary outside of step()"
    engine.step()
    hook.remove()
    assert inside == [True] and engine.global_samples == 8 * engine.global_steps


def reduced_by_hand(engine: Any, window: Window) -> None:
    engine.set_gradient_accumulation_boundary(False)
    for x in window:
        engine.backward(engine(x))
    engine.allreduce_gradients()
    engine.allreduce_gradients(bucket_size=5)  # nothing is left to do
    engine.set_gradient_accumulation_boundary(True)
    engine.step()


def resized(engine: Any, window: Window) -> None:
    """The batch size is another before each window."""
    engine.set_train_batch_size(4 * len(window))
    assert engine.get_batch_info() == (4 * len(window), 2, len(window))
    counted(engine, window)
    assert engine.was_step_applied()


def said(engine: Any, window: Window, factor: float = 1.0, times: int = 1) -> None:
    """Every micro-batch has its step; the boundary is said before it. `times` backwards, each of its own forward."""
    for index, x in enumerate(window):
        engine.set_gradient_accumulation_boundary(index == len(window) - 1)
        for _ in range(times):
            engine.backward(engine(x) * factor)
        engine.step()


def said_with_factor(engine: Any, window: Window) -> None:
    said(engine, window, 2 / len(window))


def twice(engine: Any, window: Window) -> None:
    said(engine, window, times=2)


def as_accelerate(engine: Any, window: Window) -> None:
    """The boundary is said between forward and backward, inside `no_sync` where that is; steps at boundaries only."""
    for index, x in enumerate(window):
        last = index == len(window) - 1
        with contextlib.nullcontext() if last or said_by(lambda: entered(engine)) != "nothing" else engine.no_sync():
            loss = engine(x)
            engine.set_gradient_accumulation_boundary(last)
            engine.backward(loss)
    engine.step()


def entered(engine: Any) -> None:
    with engine.no_sync():
        pass


def early(engine: Any, window: Window) -> None:
    """As that, with the boundary said before the forward, and torch's own backward."""
    for index, x in enumerate(window):
        engine.set_gradient_accumulation_boundary(index == len(window) - 1)
        engine(x).backward()
    engine.step()


ONE = {"accumulation": 1}
LOOPS: dict[Any, dict[str, Any]] = {  # with what the JSON says
    with_no_sync: ONE,
    all_in_no_sync: ONE,
    coalesced: {},
    unmanaged: {"managed_gradient_accumulation": False},
    reduced_by_hand: {},
}


def trained(loop: Any, stage: int, windows: tuple[int, ...] = (2, 2, 2), **json: Any) -> dict[str, Any]:
    """Counters and norms after each window of so many micro-batches on each rank, and the parameters in the end."""
    number, world = dist.get_rank(), dist.get_world_size()
    engine = made(stage, **json)
    torch.manual_seed(100 + number)  # of dropout, where micro-batches have no seed of their own
    counters, norms = [], []
    for count in windows:
        loop(engine, [inputs(number + world * index) for index in range(count)])
        number += world * count
        counters.append((engine.micro_steps, engine.global_steps))
        norms.append(engine.get_global_grad_norm())
    engine.destroy()
    weights = {name: param.detach() for name, param in engine.module.named_parameters()}
    return {"counters": counters, "norms": norms, "weights": weights}


oracle = functools.cache(lambda stage, variant: trained(counted, stage, **VARIANTS[variant]))


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    weights = all(torch.equal(value, one["weights"][name]) for name, value in other["weights"].items())
    return weights and one["norms"] == other["norms"]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_the_result_is_that_of_a_counted_window(loop):
    for stage in (0, 1) if "no_sync" in loop.__name__ else (0, 1, 2, 3):
        variant = ("fp32", "bf16")[stage % 2]
        found = trained(loop, stage, **LOOPS[loop], **VARIANTS[variant])
        # Where a script ends its steps by itself, stage 2 reduces them once, as 0 and 1 do.
        assert same(found, oracle(0 if loop is unmanaged and stage == 2 else stage, variant))


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("loop", "stage", "variant"), each_once([as_accelerate, early], [0, 1, 2, 3], ["fp32", "tree"])
)
def test_steps_may_be_left_out_off_the_boundary(loop, stage, variant):
    found, wanted = (trained(each, stage, (2, 4, 2), **VARIANTS[variant]) for each in (loop, said))
    assert same(found, wanted)
    assert found["counters"] == wanted["counters"] == [(2, 1), (6, 2), (8, 3)]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [1, 3, *longer(0, 2)])
def test_the_batch_size_may_change_between_windows(stage):
    for variant in ("fp32", "bf16"):
        ways = [(resized, 1), (resized, 2), (said_with_factor, 2)]
        first, *others = [
            trained(loop, stage, (1, 2, 2, 1), accumulation=each, **VARIANTS[variant]) for loop, each in ways
        ]
        assert all(same(other, first) for other in others)


def of_the_tree(stage: int) -> list[Any]:
    world = dist.get_world_size()
    windows = tuple(count // world for count in (4, 8, 4))
    return [trained(loop, stage, windows, accumulation=4 // world, **TREE) for loop in (as_accelerate, twice)]


@pytest.mark.parametrize("stage", [2, *longer(0, 3)])
def test_the_tree_has_the_same_bits_at_any_world_size(pool, stage):
    (wanted,) = pool.run(1, of_the_tree, stage)
    for world in (2, 4):
        for found in pool.run(world, of_the_tree, stage):
            assert all(map(same, found, wanted))


def test_counters_between_forward_and_step():
    engine, seen = made(2, 4), []
    for last in (False, False, True):
        loss = engine(inputs(0))
        engine.set_gradient_accumulation_boundary(last)
        seen.append(engine.micro_steps)
        engine.backward(loss)
        seen.append(engine.micro_steps)
    engine.step()
    assert [*seen, engine.micro_steps] == [0, 1, 1, 2, 2, 2, 3]
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


def alone(stage: int = 0, **more: Any) -> Any:
    return zero.initialize(model=make_net(), config=config(stage, 1, **more))[0]


def test_wrong_batch_sizes_are_refused():
    engine = alone(accumulation=2)
    assert "divisible by micro-batch data parallelism" in said_by(lambda: engine.set_train_batch_size(3))
    assert "wanted at least 1" in said_by(lambda: engine.set_train_micro_batch_size(0))
    engine.backward(engine(*batch(0, 2)))
    assert "in the middle of an accumulation window" in said_by(lambda: engine.set_train_batch_size(2))
    engine.step()
    assert "in the middle of an accumulation window" in said_by(lambda: engine.set_train_batch_size(2))
    assert engine.get_batch_info() == (4, 2, 2)
    engine.set_train_micro_batch_size(5)
    assert engine.get_batch_info() == (10, 5, 2)


def test_no_sync_needs_whole_gradients():
    for stage in (2, 3):
        why = f"incompatible with gradient partitioning logic of ZeRO stage {stage}"
        assert said_by(alone(stage).no_sync().__enter__) == f"RuntimeError: no_sync context manager is {why}"
    engine = alone(1, zero={"reduce_every_micro_batch": True})
    assert "zero.reduce_every_micro_batch" in said_by(engine.no_sync().__enter__)


def test_blocks_do_not_nest_and_take_no_step():
    engine = alone()
    with engine.no_sync():
        assert said_by(engine.no_sync().__enter__) == "RuntimeError: no_sync context manager reentry is unsupported"
        assert "It is illegal to call Engine.step() inside no_sync context manager" in said_by(engine.step)
        assert "blocks do not nest" in said_by(engine.coalesce_grad_reduction().__enter__)
        assert "call it outside" in said_by(engine.allreduce_gradients)
    with engine.coalesce_grad_reduction():
        engine.backward(engine(*batch(0, 2)))
        assert "It is illegal to call Engine.step() inside coalesce_grad_reduction()" in said_by(engine.step)
        # Programs look for this word in all of them, as DeepSpeed's have it.
        assert "no_sync" in said_by(engine.step)
        assert "blocks do not nest (no_sync" in said_by(engine.no_sync().__enter__)
        assert "blocks do not nest (no_sync" in said_by(engine.coalesce_grad_reduction().__enter__)
    assert "before" not in said_by(engine.step)
    assert engine.global_steps == 1
    with pytest.raises(KeyError), engine.coalesce_grad_reduction():
        raise KeyError
    with engine.no_sync():
        pass  # the block that failed is over


def test_unmanaged_accumulation_is_not_decided_elsewhere():
    engine = alone(managed_gradient_accumulation=False)
    for call in (lambda: engine.set_gradient_accumulation_boundary(True), engine.coalesce_grad_reduction().__enter__):
        assert "needs managed_gradient_accumulation" in said_by(call)


def test_a_coalesced_block_may_be_repeated_after_an_exception():
    engine, clean = alone(), alone()
    with engine.coalesce_grad_reduction():
        engine.backward(engine(*batch(0, 2)))
    with pytest.raises(Exception, match="forward"):
        engine()
    for each in (engine, clean):
        with each.coalesce_grad_reduction():
            each.backward(each(*batch(1, 2)))
        each.step()
    assert (engine.global_steps, engine.was_step_applied()) == (1, True)
    assert engine.get_global_grad_norm() == clean.get_global_grad_norm()


def test_the_boundary_set_by_hand_stays_until_none():
    engine = alone(accumulation=2)
    engine.set_gradient_accumulation_boundary(True)
    for step in range(3):
        engine.backward(engine(*batch(step, 2)))
        engine.step()
    assert engine.global_steps == 3
    engine.set_gradient_accumulation_boundary(None)
    assert not engine.is_gradient_accumulation_boundary()  # counting begins where the last step was taken
