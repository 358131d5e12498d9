"""The table of programs: a cell is "yes" only where the run ended well, saved, has the same bits, went on and loads."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import run_programs
import torch
from run_programs import Outcome, Program

PROGRAM = Program("script.py", [], lambda data: None, lambda folder: {})
WEIGHTS = {"a": torch.tensor([1.0, 2.0])}
LOG = [{"loss": 2.5, "step": 1}, {"loss": 2.25, "step": 2}]
GOOD = Outcome(0, LOG, PROGRAM.steps, WEIGHTS, WEIGHTS)
AGAIN = Outcome(0, LOG, PROGRAM.steps[1:], WEIGHTS)
OTHER = {"a": torch.tensor([1.0, 2.0000002])}


@pytest.mark.parametrize(
    ("changed", "columns"),
    [
        ({}, []),
        ({"once": Outcome("exit status 1")}, ["trained", "saved", "same bits", "loaded"]),
        (
            {"once": dataclasses.replace(GOOD, log=[{"loss": float("nan")}, LOG[1]])},
            ["trained", "same bits", "loaded"],
        ),
        ({"once": dataclasses.replace(GOOD, log=[])}, ["trained", "same bits", "loaded"]),
        ({"once": dataclasses.replace(GOOD, saved=(4,))}, ["saved"]),
        ({"first": dataclasses.replace(GOOD, weights=OTHER)}, ["same bits"]),
        ({"first": dataclasses.replace(GOOD, log=LOG[:1])}, ["same bits"]),
        ({"resumed": None}, ["resumed"]),
        ({"resumed": GOOD}, ["resumed"]),  # it began again
        ({"resumed": dataclasses.replace(AGAIN, log=[LOG[0], {"loss": 2.0, "step": 2}])}, ["resumed"]),
        ({"resumed": dataclasses.replace(AGAIN, weights=OTHER)}, ["resumed"]),
        ({"expected": dataclasses.replace(AGAIN, weights=OTHER)}, ["resumed"]),
        ({"loaded": OTHER}, ["loaded"]),
        ({"loaded": {}}, ["loaded"]),
        ({"loaded": "OSError()"}, ["loaded"]),
    ],
)
def test_only_what_is_right_is_yes(changed, columns):
    given = {"once": GOOD, "first": GOOD, "resumed": AGAIN, "expected": GOOD, "loaded": WEIGHTS, **changed}
    row = run_programs.judge(PROGRAM, **given)
    assert [column for column, why in row.items() if why] == columns
    table = run_programs.lines({"script.py stage 3": row})
    assert (table[1].split().count("no"), len(table)) == (len(columns), 2 + len(columns))


def test_a_program_that_saves_nothing_is_asked_for_nothing():
    program = dataclasses.replace(PROGRAM, checkpoint=None, load=None)
    bare = Outcome(0, LOG)
    row = run_programs.judge(program, bare, bare, None, None, "not loaded")
    assert run_programs.lines({"script.py": row})[1].split() == ["script.py", "yes", "-", "yes", "-", "-"]
    row = run_programs.judge(dataclasses.replace(program, stages=(1,)), bare, bare, None, None, "not loaded")
    assert row["same bits"] is None


def test_a_resume_in_place_gets_what_the_first_save_had_left(tmp_path: Path):
    program = dataclasses.replace(PROGRAM, checkpoint="run.*/global_step{step}", in_place=True)
    for name in ("global_step2", "global_step4", "board"):
        (tmp_path / "first" / "run.7" / name).mkdir(parents=True)
    for name in ("latest", "global_step2/index.json", "board/events.out.1"):
        (tmp_path / "first" / "run.7" / name).write_text("global_step4")
    copy = run_programs.copied(program, tmp_path / "first", tmp_path / "again")
    left = {str(path.relative_to(copy)) for path in copy.rglob("*")}
    assert left == {"latest", "global_step2", "global_step2/index.json", "board"}
    assert (copy.name, (copy / "latest").read_text()) == ("run.7", "global_step2")


def test_a_resume_in_place_logs_what_came_after():
    program = dataclasses.replace(PROGRAM, in_place=True)
    log = [*LOG, {"loss": 2.0, "step": 3}, {"loss": 1.5, "step": 4}]
    once = dataclasses.replace(GOOD, log=log, weights=OTHER)  # and it computes with WEIGHTS
    for again, right in ((log[2:], True), (log, False), (log[1:], False)):
        row = run_programs.judge(program, once, once, dataclasses.replace(once, log=again), None, WEIGHTS)
        assert (not row["resumed"], row["loaded"]) == (right, "")
    assert run_programs.judge(program, once, once, once, None, OTHER)["loaded"]


SCRIPT = """
import sys
import beside
import deepspeed
if sys.argv[1] == "fails":
    raise SystemExit(3)
print("zero" in deepspeed.__version__)
"""


@pytest.mark.long
@pytest.mark.parametrize("word", ["runs", "fails"])
def test_a_program_runs_with_zero_as_deepspeed(tmp_path: Path, word: str):
    script = tmp_path / "folder" / "script.py"
    script.parent.mkdir()
    script.write_text(SCRIPT)
    (tmp_path / "beside.py").touch()
    program = dataclasses.replace(
        PROGRAM, words=["{word}"], checkpoint=None, load=None, log=lambda folder: LOG, packages=1
    )
    outcome = run_programs.run(program, script, tmp_path / "out", tmp_path / "log", word=word)
    printed = (tmp_path / "log").read_text()
    if word == "runs":
        assert (outcome, printed.count("True")) == (Outcome(0, LOG), 2)
    else:
        assert (outcome.log, outcome.status.startswith("exit status ")) == ([], True)


def test_a_run_without_a_folder_is_told(capsys: pytest.CaptureFixture):
    assert run_programs.main([]) == 2
    assert "wanted a folder" in capsys.readouterr().err


def test_a_program_that_is_not_there_is_a_failure(tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run_programs.main([str(tmp_path), "run_clm.py"]) == 1
    assert "run_clm.py: no transformers/examples" in capsys.readouterr().out
