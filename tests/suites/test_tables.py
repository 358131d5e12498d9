"""The tables of `make suites` and `make programs`: what is wrong is no "yes", and what fails must be known.

A run without tests, or without a folder, is no success.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import run_programs
import run_suites
import torch
from pages import ROOT
from run_programs import PROGRAMS, Outcome, Program

PROGRAM = Program("script.py", [], lambda data: None, lambda folder: {})
WEIGHTS = {"a": torch.tensor([1.0, 2.0])}
OTHER = {"a": torch.tensor([1.0, 2.0000002])}
LOG = [{"loss": 2.5, "step": 1}, {"loss": 2.25, "step": 2}]
GOOD = Outcome(0, LOG, PROGRAM.steps, WEIGHTS, WEIGHTS)
AGAIN = Outcome(0, LOG, PROGRAM.steps[1:], WEIGHTS)


@pytest.mark.parametrize(
    ("changed", "columns"),
    [
        ({}, []),
        ({"once": Outcome("exit status 1")}, ["trained", "saved", "same bits", "loaded"]),
        ({"once": dataclasses.replace(GOOD, log=[{"loss": float("nan")}])}, ["trained", "same bits", "loaded"]),
        ({"once": dataclasses.replace(GOOD, saved=(4,))}, ["saved"]),
        ({"first": dataclasses.replace(GOOD, weights=OTHER)}, ["same bits"]),
        ({"resumed": None}, ["resumed"]),
        ({"resumed": GOOD}, ["resumed"]),  # it began again
        ({"resumed": dataclasses.replace(AGAIN, weights=OTHER)}, ["resumed"]),
        ({"loaded": OTHER}, ["loaded"]),
        ({"loaded": "OSError()"}, ["loaded"]),
    ],
)
def test_only_what_is_right_is_yes(changed: dict[str, Any], columns: list[str]) -> None:
    given = {"once": GOOD, "first": GOOD, "resumed": AGAIN, "expected": GOOD, "loaded": WEIGHTS, **changed}
    row = run_programs.judge(PROGRAM, **given)
    assert [column for column, why in row.items() if why] == columns
    assert run_programs.lines({"script.py stage 3": row})[1].split().count("no") == len(columns)


def test_what_never_resumes_is_not_asked_to() -> None:
    row = run_programs.judge(dataclasses.replace(PROGRAM, resume=[]), GOOD, GOOD, None, GOOD, WEIGHTS)
    assert (row["saved"], row["resumed"]) == ("", None)


@pytest.mark.parametrize("page", ["README.md", "docs/huggingface_tried.md"])
def test_the_tables_of_programs_have_each_with_its_stages(page: str) -> None:
    row = r"^\| ([^|]*`[\w.-]+`[^|]*) \|(?: [^|]+ \|)?? ([0-3, ]+) \|"  # the README says in between where it is from
    rows = re.findall(row, (ROOT / page).read_text(), re.MULTILINE)
    shown = {name: stages for names, stages in rows for name in re.findall(r"`([\w.-]+)`", names)}
    assert shown == {name: ", ".join(map(str, program.stages)) for name, program in PROGRAMS.items()}


REASON = {"Names::test_file_*": "other names of files"}
FAILED, PASSED = ("failed", "AssertionError: 1 != 2"), ("passed", "")


@pytest.mark.parametrize(
    ("outcomes", "fine", "line"),
    [
        ({"Names::test_file_a": FAILED, "test_b": PASSED}, True, "known: Names::test_file_a: other names of files"),
        ({"Names::test_file_a": FAILED, "test_b": FAILED}, False, "failed: test_b: AssertionError: 1 != 2"),
        ({"Names::test_file_a": PASSED}, False, "passed, take it out of known.json: Names::test_file_a"),
        ({"test_b": PASSED}, False, "in known.json, but not there: Names::test_file_*"),
    ],
)
def test_what_fails_must_be_known_and_what_is_known_must_fail(outcomes: Any, fine: bool, line: str) -> None:
    counts, lines, verdict = run_suites.judge(outcomes, REASON)
    assert (verdict, line in lines, sum(counts.values())) == (fine, True, len(outcomes))


def test_nothing_is_no_success(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert not run_suites.judge({}, {})[2]
    assert run_suites.main([str(tmp_path)]) == 2
    assert run_programs.main([]) == 2
    assert capsys.readouterr().err.count("wanted a folder") == 2
