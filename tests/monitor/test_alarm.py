"""The promise: a loss or norm that stands out is seen by all ranks alike, and what was asked for is done."""

from __future__ import annotations

import itertools
import logging
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from marks import longer
from models import config, make_net, share

import zero
from zero.config import load
from zero.engine.alarm import Alarms
from zero.log import logger

SPIKE = 6  # the number of the step, counted from 1, in which rank 1's loss is larger


def alarms(**section: Any) -> Alarms:
    return Alarms(load({"train_batch_size": 1, "zero": {"alarm": section}}, 1).zero.alarm)


def train(steps: int, stage: int, **section: Any) -> tuple[Any, list[bool], list[torch.Tensor]]:
    """The engine, which steps were applied, and all parameters [n] after each; rank 1 alone has a spike."""
    more = {"zero": {"alarm": section}, "steps_per_print": float("inf")}
    schedule = {"type": "WarmupLR", "params": {"warmup_min_lr": 1e-3, "warmup_max_lr": 1e-2, "warmup_num_steps": 100}}
    settings = config(stage, dist.get_world_size(), scheduler=schedule, **more)
    engine, *_ = zero.initialize(model=make_net(), config=settings)
    applied, values = [], []
    for number in range(1, steps + 1):
        factor = 100.0 if number == SPIKE and dist.get_rank() == 1 else 1.0
        engine.backward(engine(*share(0)) * factor)
        engine.step()
        applied.append(engine.was_step_applied())
        with zero.GatheredParameters(list(engine.parameters())):
            values.append(torch.cat([param.detach().flatten() for param in engine.parameters()]))
    return engine, applied, values


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [2, *longer(0, 3)])
def test_the_step_in_which_one_ranks_loss_spikes_is_skipped_on_all(stage: int):
    engine, applied, values = train(8, stage, loss=6, window=5, action="skip")
    assert applied == [number != SPIKE for number in range(1, 9)]
    assert engine.skipped_steps == 1 and engine.global_steps == 8
    assert engine.lr_scheduler.last_batch_iteration == 7 - 1, "the scheduler stands still"
    assert not engine.optimizer.overflow
    engine.destroy()
    changed = [not torch.equal(*pair) for pair in itertools.pairwise(values)]
    assert changed == applied[1:]
    gathered: list[Any] = [None, None]
    dist.all_gather_object(gathered, values)
    assert all(torch.equal(*pair) for pair in zip(*gathered, strict=True))


@pytest.mark.ranks(2)
def test_a_norm_that_stands_out_is_warned_of_once_and_rank_0_speaks():
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())
    logger.addHandler(handler)
    engine, applied, _ = train(7, 2, norm=6, window=5)
    engine.destroy()
    logger.removeHandler(handler)
    found = [text for text in said if "stands out" in text]
    assert all(applied)
    assert len(found) == (1 if dist.get_rank() == 0 else 0)
    assert not found or found[0].startswith(f"step {SPIKE}: the norm ")


@pytest.mark.ranks(2)
def test_a_checkpoint_says_why_it_was_saved():
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    engine, applied, _ = train(7, 3, loss=6, norm=6, window=5, action="checkpoint", folder=folder[0])
    assert all(applied)
    tag = f"step{SPIKE}-loss-and-norm-stands-out"
    assert [path.name for path in Path(folder[0]).iterdir() if path.is_dir()] == [tag]
    assert engine.load_checkpoint(folder[0], tag)[0] is not None and engine.global_steps == SPIKE
    engine.destroy()


@pytest.mark.ranks(2)
def test_a_folder_that_cannot_be_written_is_found_at_the_start(tmp_path: Path):
    (tmp_path / "file").touch()
    net = make_net()
    wrong, good = str(tmp_path / "file" / "alarms"), str(tmp_path / "new" / "alarms")
    for folders, said in (
        ((wrong, wrong), f"initialize(): zero.alarm.folder: got '{wrong}', where nothing can be written: Not a"),
        ((good, wrong), "the ranks do not initialize the same engine"),
    ):
        section = {"loss": 6, "action": "checkpoint", "folder": folders[dist.get_rank()]}
        with pytest.raises((ValueError, RuntimeError)) as caught:
            zero.initialize(model=net, config=config(3, 2, zero={"alarm": section}))
        assert said in str(caught.value) and "nothing can be written" in str(caught.value)
        assert not hasattr(next(net.parameters()), "_zero_owner")


@pytest.mark.ranks(2)
def test_a_run_that_goes_on_from_a_checkpoint_decides_alike():
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    before, _, _ = train(SPIKE - 1, 2, loss=6, window=SPIKE - 1, action="skip")
    before.save_checkpoint(folder[0], "before")
    before.destroy()
    for tag, skipped in (("before", 1), (None, 0)):  # the window is full only with what was before
        engine, _, _ = train(0, 2, loss=6, window=SPIKE - 1, action="skip")
        if tag is not None:
            engine.load_checkpoint(folder[0], tag)
        engine.backward(engine(*share(0)) * (100.0 if dist.get_rank() == 1 else 1.0))
        engine.step()
        assert engine.skipped_steps == skipped
        engine.destroy()


def test_what_a_window_was_is_kept_as_far_as_it_fits():
    one, other = alarms(loss=2, window=4), alarms(loss=2, norm=2, window=3)
    for step, loss in enumerate((9.0, 1.0, 2.0, 3.0), 1):
        one.skips(step, loss, 1.0)
    other.load_state_dict(one.state_dict())
    assert other.state_dict() == {"last": {"loss": [1.0, 2.0, 3.0], "norm": []}, "quiet_until": 0}


def test_what_stands_out():
    alarm = alarms(loss=2, window=4)
    assert not any(alarm._judge("loss", value) for value in (1.0, 2.0, 100.0, 1.0)), "the window is not full"
    assert alarm._judge("loss", 200.0) is not None
    assert alarm._judge("loss", 90.0) is None, "200 is in the window now"
    assert alarm._judge("loss", float("nan")) is not None
    assert alarm._judge("loss", -1e9) is None, "only what is above"
    assert alarm._judge("loss", None) is None


def test_rounding_of_a_constant_does_not_stand_out():
    alarm = alarms(norm=6, window=3)
    assert [alarm._judge("norm", value) is None for value in (1.0, 1.0, 1.0, 1.0 + 1e-9, 1.01)] == [True] * 4 + [False]


def test_checkpoints_come_once_in_a_window():
    alarm, tags = alarms(loss=1, window=3, action="checkpoint", folder="f"), []
    for step, loss in enumerate((1.0, 1.1, 1.0, 50.0, 500.0, 5000.0, 50000.0, 1.0), 1):
        assert not alarm.skips(step, loss, 1.0)
        alarm.save(lambda folder, tag, save_latest: tags.append((folder, tag, save_latest)))
    assert tags == [("f", "step4-loss-stands-out", False), ("f", "step7-loss-stands-out", False)]
