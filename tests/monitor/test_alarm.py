"""The promise: a loss or norm that stands out is seen by all ranks alike, and what was asked for is done."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from marks import longer
from models import config, make_net, share
from ranks import listening
from scenario import Record, run, scenario

import zero
from zero.config import load
from zero.engine.alarm import Alarms

SPIKE = 6  # the number of the step, counted from 1, in which rank 1's loss is larger


def alarms(**section: Any) -> Alarms:
    return Alarms(load({"train_batch_size": 1, "zero": {"alarm": section}}, 1).zero.alarm)


def loop(engine: Any, number: int, inputs: Any) -> torch.Tensor:
    """The same batch in each step; rank 1 alone has a spike."""
    engine.backward(loss := engine(*share(0)) * (100.0 if number + 1 == SPIKE and dist.get_rank() == 1 else 1.0))
    return loss


def after_step(engine: Any, number: int) -> tuple[bool, torch.Tensor]:
    """Whether the step was applied, and all parameters [n]."""
    with zero.GatheredParameters(list(engine.parameters())):
        return engine.was_step_applied(), torch.cat([param.detach().flatten() for param in engine.parameters()])


def train(steps: int, stage: int, first: int = 0, load: str = "", save: str = "", **section: Any) -> Record:
    schedule = {"type": "WarmupLR", "params": {"warmup_min_lr": 1e-3, "warmup_max_lr": 1e-2, "warmup_num_steps": 100}}
    more = {"first": first, "load": load, "save": save, "scheduler": schedule, "zero": {"alarm": section}}
    return run("net", stage, steps, loop=loop, watch=after_step, keep=of_the_end, **more)


def of_the_end(engine: Any) -> tuple[int, bool]:
    return engine.lr_scheduler.last_batch_iteration, engine.optimizer.overflow


@pytest.mark.parametrize("stage", [2, *longer(0, 3)])
def test_the_step_in_which_one_ranks_loss_spikes_is_skipped_on_all(pool: Any, stage: int):
    records = pool.run(2, train, 8, stage, loss=6, window=5, action="skip")
    for record in records:
        *steps, end = record.seen
        applied = [number != SPIKE for number in range(1, 9)]
        assert [each for each, _ in steps] == applied
        assert (record.skipped, record.steps) == (1, 8)
        assert end == (7 - 1, False), "the scheduler stands still"
        changed = [not torch.equal(one, other) for (_, one), (_, other) in itertools.pairwise(steps)]
        assert changed == applied[1:]
    values = [[each for _, each in record.seen[:-1]] for record in records]
    assert all(torch.equal(*pair) for pair in zip(*values, strict=True))


@pytest.mark.ranks(2)
def test_a_norm_that_stands_out_is_warned_of_once_and_rank_0_speaks():
    with listening() as said:
        record = train(7, 2, norm=6, window=5)
    assert record.skipped == 0
    found = [text for text in said if "stands out" in text]
    assert len(found) == (1 if dist.get_rank() == 0 else 0)
    assert not found or found[0].startswith(f"step {SPIKE}: the norm ")


def test_a_checkpoint_says_why_it_was_saved(pool: Any, tmp_path: Path):
    section = {"loss": 6, "norm": 6, "window": 5, "action": "checkpoint", "folder": str(tmp_path)}
    assert [record.skipped for record in pool.run(2, train, 7, 3, **section)] == [0, 0]
    (folder,) = (path for path in tmp_path.iterdir() if path.is_dir())
    assert folder.name == f"step{SPIKE}-loss-and-norm-stands-out"
    (tmp_path / "latest").write_text(folder.name)
    assert scenario(pool, "net", 3, load=str(tmp_path), steps=1)[0].steps == SPIKE + 1


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
    zero.initialize(model=net, config=config(3, 2))[0].destroy()  # the model was left as it was


def test_a_run_that_goes_on_from_a_checkpoint_decides_alike(pool: Any, tmp_path: Path):
    section = {"loss": 6, "window": SPIKE - 1, "action": "skip"}
    pool.run(2, train, SPIKE - 1, 2, save=str(tmp_path), **section)
    for folder, skipped in ((str(tmp_path), 1), ("", 0)):  # the window is full only with what was before
        records = pool.run(2, train, 1, 2, SPIKE - 1, folder, **section)
        assert [record.skipped for record in records] == [skipped] * 2


def test_what_stands_out():
    alarm = alarms(loss=2, window=4, action="skip")
    values = (1.0, 2.0, 100.0, 1.0, 200.0, 90.0, float("nan"), -1e9)
    found = [alarm.skips(number, value, 1.0) for number, value in enumerate(values, 1)]
    # The window fills first; 200 is in it afterwards; only what is above counts, or is no number.
    assert found == [False, False, False, False, True, False, True, False]


def test_checkpoints_come_once_in_a_window():
    alarm, tags = alarms(loss=1, window=3, action="checkpoint", folder="f"), []
    for step, loss in enumerate((1.0, 1.1, 1.0, 50.0, 500.0, 5000.0, 50000.0, 1.0), 1):
        assert not alarm.skips(step, loss, 1.0)
        alarm.save(lambda folder, tag, save_latest: tags.append((folder, tag, save_latest)))
    assert tags == [("f", "step4-loss-stands-out", False), ("f", "step7-loss-stands-out", False)]
