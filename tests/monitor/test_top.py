"""The promise: `zero top` shows what each rank does now, live, or once as plain text for scripts."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import run_folders

from zero.__main__ import main
from zero.tools import top


def test_once_prints_a_row_for_each_rank(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder = run_folders.write(tmp_path, range(1, 1001), end=None)
    assert main(["top", "--once", str(folder)]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split()[:4] == ["rank", "step", "loss", "rate"]
    step, memory = run_folders.step(1000), run_folders.step(991)["bytes"]["memory"]
    assert len(rows) == 3
    for rank, row in zip(("all", "0", "1"), rows, strict=True):
        words = row.split()
        assert words[:2] == [rank, "1,000"]
        assert words[-1] == "ago" and ("backward" in words) == (rank != "all")
    assert f"{step['loss']:.4g}" in rows[0] and f"{step['loss']:.4g}" not in rows[1]
    assert f"{memory / 2**20:,.0f} MiB" in rows[1]


def test_the_rate_of_a_rank_is_its_own_and_that_of_the_job_stands_apart(tmp_path: Path) -> None:
    run_folders.write(tmp_path, range(1, 4))
    for rank, samples in enumerate((8, 3)):
        path = tmp_path / f"rank-{rank}.jsonl"
        steps = [run_folders.step(1, rank) | {"seconds": 1.0, "samples": samples, "tokens": 100.0 * samples}]
        path.write_text("".join(json.dumps(step) + "\n" for step in steps))
    rates = [dict(zip(top.HEAD, row, strict=True))["rate"] for row in top.rows(str(tmp_path))]
    assert rates == ["800 tokens/s", "500 tokens/s", "300 tokens/s"]
    (tmp_path / "rank-1.jsonl").write_text('{"event": "start", "time": 1.0, "world": 2, "step": 0}\n')
    rates = [dict(zip(top.HEAD, row, strict=True))["rate"] for row in top.rows(str(tmp_path))]
    assert rates == ["800 tokens/s", "", ""], "what the others leave is not known"


def test_an_ended_rank_and_one_without_a_step_have_rows(tmp_path: Path) -> None:
    run_folders.write(tmp_path, range(1, 4))
    (tmp_path / "rank-1.jsonl").write_text(f'{{"event": "start", "time": {time.time() - 5}, "world": 2, "step": 0}}\n')
    _, ended, started = (dict(zip(top.HEAD, row, strict=True)) for row in top.rows(str(tmp_path)))
    assert (ended["phase"], ended["step"]) == ("ended", "3")
    assert (started["phase"], started["step"], started["rate"]) == ("start", "", "")
    assert started["last line"].startswith("0:00:0")


def test_the_live_table_shows_what_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two looks; then somebody presses Ctrl-C."""
    console = pytest.importorskip("rich.console")
    run_folders.write(tmp_path, range(1, 4), end=None)
    looks = []

    def sleep(_: float) -> None:
        if looks:
            raise KeyboardInterrupt
        looks.append(run_folders.write(tmp_path, range(1, 500), end=None))

    shown = console.Console(record=True, width=120, force_terminal=True)
    monkeypatch.setattr("rich.live.get_console", lambda: shown)
    monkeypatch.setattr(top.time, "sleep", sleep)
    assert main(["top", str(tmp_path)]) == 0
    text = shown.export_text()
    assert "499" in text and "tokens/s" in text
