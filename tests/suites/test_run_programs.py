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
GOOD = Outcome(0, LOG, PROGRAM.steps, WEIGHTS)
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
    assert not any(run_programs.judge(program, bare, bare, None, None, "not loaded").values())


SCRIPT = """
import sys
import deepspeed
if sys.argv[1] == "fails":
    raise SystemExit(3)
print("zero" in deepspeed.__version__)
"""


@pytest.mark.long
@pytest.mark.parametrize("word", ["runs", "fails"])
def test_a_program_runs_with_zero_as_deepspeed(tmp_path: Path, word: str):
    (tmp_path / "script.py").write_text(SCRIPT)
    program = dataclasses.replace(PROGRAM, words=["{word}"], checkpoint=None, load=None, log=lambda folder: LOG)
    outcome = run_programs.run(program, tmp_path / "script.py", tmp_path / "out", tmp_path / "log", word=word)
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
