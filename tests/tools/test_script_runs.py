"""The promise: the runs of a script share rank processes and nothing else."""

from __future__ import annotations

import argparse
import textwrap
from pathlib import Path

import pytest

from zero.launch.args.scripts import add_check, check_request
from zero.tools import script_rank
from zero.tools.script_runs import ScriptRuns

FORKED = """
    import os, random, sys, time
    assert not hasattr(sys, "seen"), "of another run"
    sys.seen = what = os.environ["WHAT"]
    line = what, os.getppid(), random.random(), __name__, sys.argv, sys.path[0] == os.path.dirname(__file__)
    os.write(1, (" ".join(map(str, line)) + "\\n").encode())  # whole: ranks write side by side
    if what == "fail" and os.environ["RANK"] == "1":
        sys.exit(3)
    if what != "end":
        time.sleep(600)
"""
RANK_PROCESS = f"""
    import importlib.util
    spec = importlib.util.spec_from_file_location("rank", {script_rank.__file__!r})
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module._import = lambda: None  # nothing here is about torch
    module.main()
"""


def test_rank_processes_stay_and_runs_share_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    program, path = tmp_path / "program.py", tmp_path / "script.py"
    program.write_text(textwrap.dedent(RANK_PROCESS))
    path.write_text(textwrap.dedent(FORKED))
    parser = argparse.ArgumentParser()
    add_check(parser)
    given = check_request(parser.parse_args(["--nproc", "2", str(path), "3"]))
    monkeypatch.setattr(script_rank, "__file__", str(program))
    found = {}
    with ScriptRuns(given, tmp_path) as ranks:
        for number, (what, seconds) in enumerate((("end", 60.0), ("fail", 60.0), ("hang", 0.1), ("end", 60.0))):
            (folder := tmp_path / f"run{number}").mkdir()
            found[number] = ranks.run({"WHAT": what}, folder, seconds)
    assert [status for status, _ in found.values()] == [0, 3, None, 0], found
    lines = [sorted(text.splitlines()) for _, text in found.values()]
    assert all(line.endswith(f" __main__ [{str(path)!r}, '3'] True") for line in lines[0] + lines[3])
    first, last = ([line.split()[:3] for line in lines[number]] for number in (0, 3))
    assert {pid for _, pid, _ in first} == {pid for _, pid, _ in last} and len({pid for _, pid, _ in first}) == 2
    assert len({drawn for _, _, drawn in first + last}) == 4  # of a script that sets no seed
