"""`zero report --io DIR` moves what it says it moves, proposes a section that the config takes, and leaves nothing."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from zero.__main__ import main
from zero.config import load
from zero.kernels.aio import ALIGN
from zero.report import drive
from zero.report.drive import Drive, Setting, Trial, lines, measure, proposed, section

SETTINGS = (Setting(1, 2, ALIGN), Setting(2, 4, 16 * ALIGN))


def small(folder: Path) -> Drive:
    return measure(folder, seconds=0.0, settings=SETTINGS, chunk=64 * ALIGN, largest=1 << 20)


def test_each_setting_is_measured_and_nothing_is_left(tmp_path: Path) -> None:
    found = small(tmp_path)
    assert [trial.setting for trial in found.trials] == list(SETTINGS)
    assert all(trial.write > 0 and trial.read > 0 for trial in found.trials)
    assert found.best in found.trials
    assert 2 * 64 * ALIGN <= found.nbytes <= 1 << 20
    assert found.filesystem != "unknown file system" or not os.path.exists("/proc/mounts")
    assert os.listdir(tmp_path) == []


def test_the_proposal_is_a_section_of_the_config(tmp_path: Path) -> None:
    found = small(tmp_path)
    pasted = json.loads("{" + lines(found)[-1] + "}")
    assert pasted == {"aio": section(found)}
    taken = load({"train_batch_size": 1, **pasted}, 1).aio
    best = found.best.setting
    got = (taken.intra_op_parallelism, taken.queue_depth, taken.block_size)
    assert got == (best.intra_op_parallelism, best.queue_depth, best.block_size)


def test_of_settings_that_are_nearly_as_fast_the_modest_one_is_proposed() -> None:
    def trial(workers: int, depth: int, block: int, write: float, read: float) -> Trial:
        return Trial(Setting(workers, depth, block), write, read)

    fast, modest, slow = trial(4, 32, 1 << 20, 2.0, 3.0), trial(1, 8, 1 << 20, 1.95, 3.0), trial(1, 4, 4096, 2.0, 1.0)
    assert proposed([fast, modest, slow]) is modest
    assert proposed([fast, slow]) is fast
    assert slow.both == pytest.approx(4 / 3), "2 GB in 1 s of reading and 0.5 s of writing"


def test_what_the_figures_are_not_is_said_first() -> None:
    trial = Trial(SETTINGS[0], 1.0, 1.0)
    found = Drive("/fast", "tmpfs", 1 << 30, 1 << 20, "threads", "no io_uring (said so)", True, (trial,), trial)
    assert lines(found)[0].startswith("note: /fast is in memory (tmpfs)")
    assert "threads: no io_uring (said so)" in "\n".join(lines(found))
    found = Drive("/net", "nfs4", 1 << 30, 1 << 20, "io_uring", "", False, (trial,), trial)
    assert lines(found)[0].startswith("note: this file system has no O_DIRECT")
    found = Drive("/disk", "ext4", 1 << 30, 1 << 20, "io_uring", "", True, (trial,), trial)
    assert lines(found)[0].startswith("folder    /disk (ext4, 1.0 GiB free)")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    # The same measurement over less.
    monkeypatch.setattr(drive, "measure", small)
    assert main(["report", "--io", str(tmp_path)]) == 0
    assert "<- proposed" in capsys.readouterr().out
    assert main(["report", "--io", str(tmp_path), "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)["aio"]) == {"block_size", "queue_depth", "intra_op_parallelism"}


@pytest.mark.parametrize("folder", ["nowhere", "file"])
def test_a_folder_that_will_not_do(tmp_path: Path, folder: str, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "file").touch()
    assert main(["report", "--io", str(tmp_path / folder)]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("zero report: error: --io: ") and folder in said.err


def test_measuring_without_measuring(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["report", "--io", str(tmp_path), "--no-measure"]) == 2
    assert "leave out --no-measure" in capsys.readouterr().err
