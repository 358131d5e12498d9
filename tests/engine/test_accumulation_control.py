"""The promise: who decides where a window ends, and whether gradients travel before, does not change what is learnt.

The oracle is the engine's own counted window of two micro-batches, which other tests hold against plain torch. All
factors here are powers of two, so everything is bitwise, in bf16 as well.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from marks import longer
from models import batch, config, make_net, share
from ranks import said_by

import zero

WINDOWS = 3


def make(stage: int, dtype: str, accumulation: int, **more: Any) -> Any:
    settings = config(stage, 2, accumulation=accumulation, bf16={"enabled": dtype == "bf16"}, **more)
    return zero.initialize(model=make_net(blocks=2), config=settings)[0]


def loss(engine: Any, index: int) -> torch.Tensor:
    return engine(*share(index))


def finish(engine: Any) -> dict[str, torch.Tensor]:
    engine.destroy()
    return {name: param.detach().clone() for name, param in engine.module.named_parameters()}


@functools.cache
def counted(stage: int, dtype: str) -> Any:
    engine = make(stage, dtype, 2)
    for index in range(2 * WINDOWS):
        engine.backward(loss(engine, index))
        engine.step()
    return finish(engine)


def with_no_sync(stage: int, dtype: str) -> Any:
    engine = make(stage, dtype, 1)
    for index in range(0, 2 * WINDOWS, 2):
        with engine.no_sync():
            engine.backward(loss(engine, index) / 2)
        engine.backward(loss(engine, index + 1) / 2)
        engine.step()
    return finish(engine)


def all_in_no_sync(stage: int, dtype: str) -> Any:
    """Nothing is reduced before the step."""
    engine = make(stage, dtype, 1)
    for index in range(0, 2 * WINDOWS, 2):
        with engine.no_sync():
            for offset in range(2):
                engine.backward(loss(engine, index + offset) / 2)
        none_yet = all(unit.gradients.shard is None for unit in engine._sharded.trained)
        if not none_yet:
            raise ValueError("reduced inside no_sync")
        engine.step()
    return finish(engine)


def coalesced(stage: int, dtype: str) -> Any:
    engine = make(stage, dtype, 2)
    for index in range(0, 2 * WINDOWS, 2):
        with engine.coalesce_grad_reduction():
            for offset in range(2):
                if not engine.is_gradient_accumulation_boundary():
                    raise ValueError("a block is one step")
                engine.backward(loss(engine, index + offset))
                if stage < 2 and engine._sharded.trained[0].gradients.shard is not None:
                    raise ValueError("reduced inside the block")
        if engine._sharded.trained[0].gradients.shard is None:
            raise ValueError("not reduced at its end")
        engine.step()
    if (engine.global_steps, engine.micro_steps) != (WINDOWS, WINDOWS):
        raise ValueError(f"{engine.global_steps} steps, {engine.micro_steps} micro-steps")
    return finish(engine)


def unmanaged(stage: int, dtype: str) -> Any:
    engine = make(stage, dtype, 2, managed_gradient_accumulation=False)
    inside: list[bool] = []
    engine.optimizer.register_step_pre_hook(lambda *_: inside.append(engine.is_gradient_accumulation_boundary()))
    for index in range(2 * WINDOWS):
        engine.backward(loss(engine, index))
        if engine.is_gradient_accumulation_boundary():
            raise ValueError("a boundary outside of step()")
        if index % 2:
            engine.step()
    if inside != [True] * WINDOWS or engine.global_samples != 8 * WINDOWS:
        raise ValueError(f"boundaries {inside}, {engine.global_samples} samples")
    return finish(engine)


def reduced_by_hand(stage: int, dtype: str) -> Any:
    engine = make(stage, dtype, 2)
    engine.set_gradient_accumulation_boundary(False)
    for index in range(0, 2 * WINDOWS, 2):
        for offset in range(2):
            engine.backward(loss(engine, index + offset))
        engine.allreduce_gradients()
        engine.allreduce_gradients(bucket_size=5)  # nothing is left to do
        engine.set_gradient_accumulation_boundary(True)
        engine.step()
        engine.set_gradient_accumulation_boundary(False)
    return finish(engine)


LOOPS = [with_no_sync, all_in_no_sync, coalesced, unmanaged, reduced_by_hand]


def compare(loop: Any, stages: tuple[int, ...]) -> list[str]:
    wrong = []
    for stage in stages:
        for dtype in ("fp32", "bf16"):
            wanted, found = counted(stage, dtype), loop(stage, dtype)
            wrong += [
                f"{stage} {dtype} {name}" for name, value in wanted.items() if not torch.equal(value, found[name])
            ]
    return wrong


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_the_result_is_that_of_a_counted_window(pool, loop):
    stages = (0, 1) if "no_sync" in loop.__name__ else (0, 1, 2, 3)
    assert pool.run(2, compare, loop, stages) == [[], []]


def changed(stage: int, dtype: str) -> list[bool]:
    """One step of one micro-batch, two of two, one of one: counted from either end, and with boundaries by hand."""
    ends = []
    for first in (1, 2):
        engine = make(stage, dtype, first)
        index = 0
        for steps in (1, 2, 2, 1):
            engine.set_train_batch_size(4 * steps)
            said = engine.get_batch_info() == (4 * steps, 2, steps)
            for _ in range(steps):
                engine.backward(loss(engine, index))
                engine.step()
                index += 1
            ends.append(said and engine.was_step_applied())
        ends.append(finish(engine))
    engine, index = make(stage, dtype, 2), 0
    for steps in (1, 2, 2, 1):
        for micro in range(steps):
            engine.set_gradient_accumulation_boundary(micro == steps - 1)
            engine.backward(loss(engine, index) * (2 / steps))
            engine.step()
            index += 1
    ends.append(finish(engine))
    states = [end for end in ends if isinstance(end, dict)]
    equal = [torch.equal(state[name], states[0][name]) for state in states[1:] for name in state]
    return [end for end in ends if not isinstance(end, dict)] + equal


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [1, 3, *longer(0, 2)])
def test_the_batch_size_may_change_between_windows(stage):
    assert all(changed(stage, "fp32") + changed(stage, "bf16"))


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


@pytest.mark.parametrize("stage", [2, 3])
def test_no_sync_needs_whole_gradients(stage):
    engine = alone(stage)
    wanted = (
        f"RuntimeError: no_sync context manager is incompatible with gradient partitioning logic of ZeRO stage {stage}"
    )
    assert said_by(engine.no_sync().__enter__) == wanted
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


def test_a_coalesced_block_may_be_repeated_after_an_exception():
    engine = alone()
    for fails in (True, False):
        with engine.coalesce_grad_reduction():
            engine.backward(engine(*batch(0, 2)))
        if fails:
            with pytest.raises(Exception, match="forward"):
                engine()
            assert not engine._sharded.reducer.holds_gradients
    engine.step()
    assert (engine.global_steps, engine.was_step_applied()) == (1, True)


def test_unmanaged_accumulation_is_not_decided_elsewhere():
    engine = alone(managed_gradient_accumulation=False)
    for call in (lambda: engine.set_gradient_accumulation_boundary(True), engine.coalesce_grad_reduction().__enter__):
        assert "needs managed_gradient_accumulation" in said_by(call)


def test_the_boundary_set_by_hand_stays_until_none():
    engine = alone(accumulation=2)
    engine.set_gradient_accumulation_boundary(True)
    for step in range(3):
        engine.backward(engine(*batch(step, 2)))
        engine.step()
    assert engine.global_steps == 3
    engine.set_gradient_accumulation_boundary(None)
    assert not engine.is_gradient_accumulation_boundary()  # counting begins where the last step was taken
