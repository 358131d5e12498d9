"""The promise: old checkpoints go, oldest first, and a kill at any moment of that leaves each whole or none.

The newest, the one that `latest` names, those saved with save_latest=False and what is not ours stay.
"""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from checkpoint_files import engine_of, index_of, same, step, tensors

from zero.checkpoint import folder
from zero.checkpoint.retention import Retention, tidy


def saved(place: Path, keep: int | None, keep_optimizer: int | None, steps: int, sets: tuple[int, ...] = ()) -> None:
    """A run that saves after each step; those in `sets` with save_latest=False."""
    rules = {"keep": keep, "keep_optimizer": keep_optimizer}
    more = {"zero": {"checkpoint": {key: value for key, value in rules.items() if value is not None}}}
    engine = engine_of(1, 1, bf16={"enabled": True}, **more)
    for number in range(steps):
        step(engine, number)
        engine.save_checkpoint(place, save_latest=number + 1 not in sets)
    engine.destroy()


def tags(place: Path) -> list[str]:
    return [tag.removeprefix("global_step") for tag in folder.tags(place)]


def test_the_oldest_go_and_their_optimizer_state_before_them(tmp_path: Path) -> None:
    saved(tmp_path / "all", None, None, 11)
    assert tags(tmp_path / "all") == [str(number) for number in range(1, 12)]
    saved(tmp_path / "few", 3, 1, 11, sets=(2, 9))
    assert tags(tmp_path / "few") == ["2", "8", "9", "10", "11"], "three that rotate, and two that were set aside"
    for tag in ("2", "8", "9", "10", "11"):
        place, other = (tmp_path / name / f"global_step{tag}" for name in ("few", "all"))
        whole, index = tag not in ("8", "10"), index_of(place)
        found, wanted = tensors(place), tensors(other)
        assert index["stripped"] != whole
        assert same(found, {name: wanted[name] for name in wanted if whole or name.startswith(("weight", "buffer"))})
        assert sorted([*index["files"], "index.json"]) == sorted(os.listdir(place))
        folder.read_index(place)
    assert (tmp_path / "few" / "latest").read_text().strip() == "global_step11"


def test_the_one_that_latest_names_stays(tmp_path: Path) -> None:
    saved(tmp_path, None, None, 3)
    (tmp_path / "latest").write_text("global_step1\n")
    tidy(tmp_path, "global_step3", Retention(1, 1), 0.0)
    assert tags(tmp_path) == ["1", "3"]
    assert not index_of(tmp_path / "global_step1")["stripped"]


def test_what_killed_saves_left_goes_and_what_is_not_ours_stays(tmp_path: Path) -> None:
    saved(tmp_path, None, None, 1)
    first = tmp_path / "global_step1"
    ruin, mine, other = tmp_path / "global_step9", tmp_path / "mine", tmp_path / "other"
    for place in (ruin, mine, other):
        place.mkdir()
    data = "weights-00000-of-00002.0123abcd.safetensors"
    rubbish = [first / data, first / f".{data}.77.partial", ruin / data, tmp_path / ".latest.5.partial", other / data]
    hidden = tmp_path / ".mine.gone"
    hidden.mkdir()
    kept = [first / "notes.txt", first / "weights.safetensors", mine / "model.safetensors", other / "readme"]
    kept.append(hidden / "notes.txt")
    for path in (*rubbish, *kept):
        path.write_text("x")
        os.utime(path, (1, 1))
    young = tmp_path / "global_step10" / data  # of a save that another process is at
    young.parent.mkdir()
    young.write_text("x")
    os.utime(young, (time.time() + 1000,) * 2)
    saved(tmp_path, None, None, 1)  # the same tag again
    assert [path for path in rubbish if path.exists()] == []
    assert [path for path in (*kept, young) if not path.exists()] == []
    assert not ruin.exists()
    tensors(first)


class Killed(BaseException):
    """In place of SIGKILL."""


@pytest.mark.parametrize("retention", [Retention(1, None), Retention(None, 1)])
def test_a_kill_while_old_ones_go_leaves_each_whole_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, retention: Retention
) -> None:
    saved(tmp_path / "runs", None, None, 3)
    left_over = ["global_step3", "latest"] if retention.keep else sorted(os.listdir(tmp_path / "runs"))
    # Before Python 3.11 a Path has its own copies of the functions of os.
    real = {(Path, name): getattr(Path, name) for name in ("unlink", "rmdir")} | {(os, "replace"): os.replace}
    moment, ended = 0, False
    while not ended:
        again, left = tmp_path / f"again{moment}", [moment]
        shutil.copytree(tmp_path / "runs", again)  # with its times

        def call(what: tuple[Any, str], *args: object, left: list[int] = left, **kwargs: object) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise Killed
            real[what](*args, **kwargs)

        for what in real:
            monkeypatch.setattr(*what, lambda *args, what=what, **kwargs: call(what, *args, **kwargs))
        try:
            tidy(again, "global_step3", retention, 0.0)
            ended = True
        except Killed:
            moment += 1
        finally:
            monkeypatch.undo()
        for tag in folder.tags(again):
            found, wanted = tensors_of(again / tag), tensors(tmp_path / "runs" / tag)
            assert all(same({name: found[name]}, {name: wanted[name]}) for name in found)
            assert tag != "global_step3" or found.keys() == wanted.keys()
        tidy(again, "global_step3", retention, time.time() + 1000)  # the next save ends what was begun
        assert sorted(os.listdir(again)) == left_over
        assert all(
            len(os.listdir(again / tag)) == (3 if retention.keep is None and tag != "global_step3" else 5)
            for tag in folder.tags(again)
        )
    assert moment > 6


def tensors_of(place: Path) -> dict:
    folder.read_index(place)
    return tensors(place)
