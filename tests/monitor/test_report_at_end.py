"""The promise: the page is there at the end of a run, and after an exception, which it does not keep waiting."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launching import ROOT
from nodes import environment
from scenario import run

from zero.__main__ import main
from zero.monitor import page_at_end as at_end

SCRIPT = """
import os, signal, sys, time
from scenario import run

def last(engine):
    engine.monitor.write_events([("a", 1.0, 1)])
    if sys.argv[2] == "raise":
        raise RuntimeError("planted")
    while len(open(os.path.join(sys.argv[1], "rank-0.jsonl")).readlines()) < 5:
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGKILL)

run("net", 2, 4, zero={"report": sys.argv[1]}, keep=last)
"""
SLOW = """
import pathlib, time
here = pathlib.Path(__file__).parent
time.sleep(30)
(here / "over").touch()
raise ImportError("this is no bokeh")
"""


def ended(folder: Path, how: str, *paths: Path) -> subprocess.CompletedProcess:
    path = ":".join(map(str, [*paths, ROOT, ROOT / "tests"]))
    command = [sys.executable, "-c", SCRIPT, str(folder), how]
    how = {"capture_output": True, "text": True, "timeout": 300, "check": False}
    return subprocess.run(command, env=environment(PYTHONPATH=path), **how)


def until_there(path: Path) -> str:
    end = time.monotonic() + 120
    while not path.exists():
        assert time.monotonic() < end, f"{path} does not come"
        time.sleep(0.1)
    return path.read_text()


@pytest.mark.long
def test_the_page_is_there_when_the_run_has_ended(tmp_path: Path) -> None:
    pytest.importorskip("bokeh")
    run("net", 2, 2, zero={"report": str(tmp_path)})
    page = (tmp_path / "report.html").read_text()
    assert '<th scope="row">State</th><td>ended</td>' in page
    assert "1 to 2, of which 0 skipped" in page


def test_without_bokeh_the_run_says_how_to_get_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(at_end.importlib.util, "find_spec", lambda name: None)
    with caplog.at_level(logging.INFO, "zero"):
        run("net", 2, 2, zero={"report": str(tmp_path)})
    assert f"zero report --run {tmp_path} makes a page" in caplog.text
    assert (tmp_path / "rank-0.jsonl").exists() and not (tmp_path / "report.html").exists()


@pytest.mark.long
def test_after_an_exception_the_page_comes_and_says_of_what(tmp_path: Path) -> None:
    pytest.importorskip("bokeh")
    done = ended(tmp_path, "raise")
    assert done.returncode == 1 and "RuntimeError: planted" in done.stderr
    assert "failed on rank 0: RuntimeError: planted" in until_there(tmp_path / "report.html")


@pytest.mark.long
def test_a_run_that_fails_does_not_wait_for_the_page(tmp_path: Path) -> None:
    library = tmp_path / "bokeh"
    library.mkdir()
    (library / "__init__.py").write_text(SLOW)
    done = ended(tmp_path / "run", "raise", tmp_path)
    assert done.returncode == 1 and "RuntimeError: planted" in done.stderr
    assert not (library / "over").exists()
    until_there(library / "over")
    assert not (tmp_path / "run" / "report.html").exists()


@pytest.mark.long
def test_after_sigkill_the_command_makes_it(tmp_path: Path) -> None:
    pytest.importorskip("bokeh")
    assert ended(tmp_path, "kill").returncode == -signal.SIGKILL
    assert not (tmp_path / "report.html").exists()
    assert main(["report", "--run", str(tmp_path)]) == 0
    page = (tmp_path / "report.html").read_text()
    assert "not ended on rank 0: killed, or going on" in page and "1 to 4, of which 0 skipped" in page
