"""The promise: where gradients rest changes neither the norm nor what is said of one that is not finite.

Four places: the device; host memory that is the device's own, where sums add up directly; host memory apart from
the device's, where they are brought and their squares are summed before they leave; and the device, with state that
streams through it.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import batch, config, make_net

import zero
import zero.core.offload
import zero.core.ratio

PLACES = ("device", "host", "apart", "streamed")


@contextlib.contextmanager
def resting(place: str) -> Iterator[dict[str, Any]]:
    """The section for this place; inside, a CPU may count as a device with memory of its own."""
    with pytest.MonkeyPatch.context() as patch:
        if place in ("apart", "streamed"):
            patch.setattr(zero.core.offload, "has_own_memory", lambda device: True)
        update = "gpu" if place == "streamed" else "host"
        yield {} if place == "device" else {"offload_optimizer": {"device": "cpu", "zero": {"update": update}}}


def run(place: str, accumulation: int, spoil: tuple[int, int] | None, edit: bool) -> list[Any]:
    """Norms and parameters of four steps on one rank's engine, and what was logged of skipped ones.

    spoil: (micro-step, block) whose gradient becomes infinite on the last rank; edit: one gradient is replaced before
    each step.
    """
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("zero").addHandler(handler)
    with resting(place) as section:
        world, rank = dist.get_world_size(), dist.get_rank()
        keys = {"gradient_clipping": 0.5, "zero_optimization": {"stage": 2, **section}}
        net = make_net()
        engine, *_ = zero.initialize(model=net, config=config(2, world, accumulation=accumulation, **keys))
        norms = []
        for step in range(4 * accumulation):
            tokens, targets = (part[2 * rank : 2 * rank + 2] for part in batch(step, 2 * world))
            loss = engine(tokens, targets)
            if spoil is not None and step == spoil[0] and rank == world - 1:
                weight = net.blocks[spoil[1]].down.weight
                handle = weight.register_hook(lambda grad: grad * float("inf"))
            engine.backward(loss)
            if spoil is not None and step == spoil[0] and rank == world - 1:
                handle.remove()
            if edit and engine.is_gradient_accumulation_boundary():
                bias = net.blocks[1].up.bias
                zero.utils.safe_set_full_grad(bias, torch.full_like(bias, 3.0))
            engine.step()
            norms.append(engine.get_global_grad_norm())
        engine.destroy()
    logging.getLogger("zero").removeHandler(handler)
    params = [param.detach().clone() for param in net.parameters()]
    return [norms, [text for text in said if "skipped" in text], params]


def run_places(*how: Any) -> dict[str, list[Any]]:
    return {place: run(place, *how) for place in PLACES}


def same_everywhere(ranks: list[dict[str, list[Any]]]) -> bool:
    return all(alike(found[place], found["device"]) for found in ranks for place in PLACES)


def alike(one: list[Any], other: list[Any]) -> bool:
    return (
        str(one[:2]) == str(other[:2])  # as text: NaN is NaN there
        and all(torch.equal(mine, yours) for mine, yours in zip(one[2], other[2], strict=True))
    )


def test_a_gradient_that_was_replaced_counts(pool):
    """Its squares were summed before; that sum is not used any more."""
    ranks = pool.run(2, run_places, 1, None, True)
    untouched = pool.run(2, run, "device", 1, None, False)
    assert ranks[0]["device"][0] != untouched[0][0]
    assert same_everywhere(ranks)


@pytest.mark.parametrize(
    ("accumulation", "spoil", "said"),
    [
        (1, (1, 1), "'blocks.1.down.weight' is not finite (micro-step 1 of 1)"),
        (3, (4, 0), "'blocks.0.down.weight' is not finite (micro-step 2 of 3)"),
        (3, (5, 2), "'blocks.2.down.weight' is not finite (micro-step 3 of 3)"),
    ],
)
def test_what_is_not_finite_is_named(pool, accumulation, spoil, said):
    ranks = pool.run(2, run_places, accumulation, spoil, False)
    assert ranks[0]["device"][1] == [f"step skipped: the gradient of parameter {said}"]
    assert same_everywhere(ranks)
