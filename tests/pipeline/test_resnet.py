"""The promise: a residual network in two pieces trains on batches that are cut as one process accumulates the cuts.

It is cut by names of modules, in the JSON alone. Batch norm sees each micro-batch once, and in order. The loss is the
mean over the batch, whatever the size of the last micro-batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from marks import longer, needs
from pipelines import Found, compare, ended, json_of, stepped
from resnet import pictures, small
from torch import nn

import zero

STEPS = 2
SPLIT = 20
SHORT = [("1f1b", 0, 130), ("gpipe", 3, 120)]  # schedule, ZeRO stage, pictures of a batch
ALL = itertools.product(("gpipe", "1f1b"), range(4), (120, 130))


class Trained(NamedTuple):
    """What a rank has at the end; logits: of an evaluation, None where the last stage is elsewhere."""

    found: Found
    buffers: dict[str, torch.Tensor]
    evaluated: float
    logits: torch.Tensor | None


def large() -> nn.Module:
    from torchvision.models import resnet50

    torch.manual_seed(7)
    return resnet50(num_classes=5)


def json(stage: int, rows: int, **more: Any) -> dict[str, Any]:
    return json_of(stage, 1, 1) | {"train_micro_batch_size_per_gpu": rows, **more}


def buffers(engine: Any) -> dict[str, torch.Tensor]:
    return {name: buffer.clone() for name, buffer in engine.module.named_buffers()}


def in_pieces(
    section: dict[str, Any], stage: int, rows: int, make: Callable[[], nn.Module], steps: int = STEPS
) -> Trained:
    engine = zero.initialize(model=make(), config=json(stage, rows, pipeline=section), loss_fn=F.cross_entropy)[0]
    feed = (pictures(number, engine.get_data_parallel_rank(), rows) for number in itertools.count())
    numbers = stepped(engine, feed, steps)
    loss, logits = engine.eval_batch(feed, return_logits=True)
    kept = buffers(engine)
    return Trained(ended(engine, *numbers), kept, float(loss), logits)


def accumulated(stage: int, rows: int, make: Callable[[], nn.Module], steps: int = STEPS) -> Trained:
    """The same cuts, one after the other in one process, each weighed by its pictures."""
    engine = zero.initialize(model=make(), config=json(stage, rows))[0]
    losses, norms = [], []
    for number in range(steps):
        total = 0.0
        for x, y in zip(*(each.split(SPLIT) for each in pictures(number, 0, rows)), strict=True):
            loss, share = F.cross_entropy(engine(x), y), len(x) / rows
            engine.backward(loss * share)
            total += float(loss.detach()) * share
        engine.step()
        losses.append(total)
        norms.append(engine.get_global_grad_norm())
    kept = buffers(engine)
    engine.eval()
    x, y = pictures(steps, 0, rows)
    with torch.no_grad():
        whole = float(F.cross_entropy(engine(x), y))  # the whole batch at once
        logits = torch.cat([engine(each) for each in x.split(SPLIT)])
    return Trained(ended(engine, losses, norms), kept, whole, logits)


def check(pool: Any, schedule: str, stage: int, rows: int, make: Callable[[], nn.Module] = small, steps: int = STEPS):
    section = {"stages": 2, "split_size": SPLIT, "schedule": schedule, "stage_map": {"layer3": 1}}
    ranks = pool.run(2, in_pieces, section, stage, rows, make, steps)
    (wanted,) = pool.run(1, accumulated, min(stage, 1), rows, make, steps)
    compare([each.found for each in ranks], wanted.found)
    both = {**ranks[0].buffers, **ranks[1].buffers}
    assert not ranks[0].buffers.keys() & ranks[1].buffers.keys()
    assert both.keys() == wanted.buffers.keys()
    assert [name for name, value in both.items() if not torch.equal(value, wanted.buffers[name])] == []
    counted = {int(value) for name, value in both.items() if name.endswith("num_batches_tracked")}
    assert counted == {steps * -(-rows // SPLIT)}
    assert ranks[0].logits is None and torch.equal(ranks[1].logits, wanted.logits)
    torch.testing.assert_close([each.evaluated for each in ranks], [wanted.evaluated] * 2, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("schedule", "stage", "rows"), [*SHORT, *longer(*(each for each in ALL if each not in SHORT))])
def test_a_residual_network_in_two_pieces_trains_as_one_process_does(pool: Any, schedule, stage, rows):
    check(pool, schedule, stage, rows)


@pytest.mark.parametrize("rows", [130, *longer(120)])
def test_both_pieces_in_one_process_do_so_too(pool: Any, rows):
    (found,) = pool.run(1, in_pieces, {"stages": 1, "split_size": SPLIT}, 1, rows, small)
    (wanted,) = pool.run(1, accumulated, 1, rows, small)
    compare([found.found], wanted.found)
    assert [name for name, value in wanted.buffers.items() if not torch.equal(found.buffers[name], value)] == []
    counted = {int(value) for name, value in found.buffers.items() if name.endswith("num_batches_tracked")}
    assert counted == {STEPS * -(-rows // SPLIT)}


@pytest.mark.long
@needs("torchvision")
def test_that_of_torchvision_does_so_too(pool: Any):
    check(pool, "1f1b", 1, 24 + SPLIT, large, 1)
