"""The promise of `--until`: a run ends in time, says what it left out, fails if a test did; and all have their turn."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from turns import changed, in_turn

TESTS = Path(__file__).parents[1]
# The first test of each file ends the time of its process.
TWO_TESTS = """
import turns

def test_one():
    turns.time.time = lambda: 1e12
    assert {good}

def test_two():
    pass
"""


def run(folder: Path, until: int, *more: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "pytest", "-c", "/dev/null", "--rootdir", str(folder), "-p", "turns", "-q"]
    command += ["-p", "no:cacheprovider", "--durations", "1", "--until", str(until), *more, str(folder)]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(command, env={**kept, "PYTHONPATH": str(TESTS)}, capture_output=True, text=True)
    return done.returncode, done.stdout


def test_what_has_not_begun_is_left_out_and_listed_and_the_run_fails_if_a_test_did(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"test_{name}.py").write_text(TWO_TESTS.format(good=name == "a"))
    status, said = run(tmp_path, 10**11, "-n", "2", "--dist", "loadfile")
    assert status == 1 and "2 tests were left out" in said and "    1 of test_a.py\n    1 of test_b.py\n" in said, said
    assert "1 failed, 1 passed, 2 skipped in " in said.splitlines()[-1] and " s in test_a.py\n" in said


def test_where_no_time_is_left_the_run_is_good_and_lists_all(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text(TWO_TESTS.format(good=False))
    status, said = run(tmp_path, 1)
    assert status == 0 and "    2 of test_a.py\n" in said and "2 skipped in " in said.splitlines()[-1]


@pytest.mark.parametrize("count", [1, 2, 7, 82])
def test_days_see_all_files_and_each_the_changed_ones_first(count: int) -> None:
    files = [Path(f"tests/{number % 5}/test_{number}.py") for number in range(count)]
    for day in range(20000, 20400):
        orders = [in_turn(files, set(), day + more) for more in range(3)]
        assert {file for order in orders for file in order[: (count + 2) // 2]} == {*files}
        order = in_turn(files, {"1", "3"}, day)
        assert {*order} == {*files}
        assert [file.parent.name in "13" for file in order] == sorted(n % 5 in (1, 3) for n in range(count))[::-1]


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_changed_is_what_the_last_day_of_commits_touched(tmp_path: Path) -> None:
    def commit(at: int, *paths: str) -> None:
        for path in paths:
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(str(at))
        when = {"GIT_AUTHOR_DATE": f"{at} +0000", "GIT_COMMITTER_DATE": f"{at} +0000"}
        who = ["-c", "user.name=A", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        kept = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}  # as in a hook
        for words in (["init", "-q"], ["add", "."], [*who, "commit", "-q", "-m", "more"]):
            subprocess.run(["git", *words], cwd=tmp_path, env={**kept, **when}, check=True)

    assert changed(tmp_path) == set()
    commit(
        1_700_000_000, "tests/core/test_a.py", "tests/kernels/test_b.py", "tests/offload/test_c.py", "zero/core/a.py"
    )
    commit(1_700_080_000, "csrc/a.cpp", "README.md")
    commit(1_700_090_000, "zero/memory/b.py", "benchmarks/c.py", "tests/models.py")
    assert changed(tmp_path) == {"kernels", "offload"}
