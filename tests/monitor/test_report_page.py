"""The promise: `zero report --run` makes one file of what a run folder tells, at any time; it needs no network."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import run_folders

from zero.__main__ import main
from zero.tools.report.page import _curves
from zero.tools.report.written_run import read

HEADINGS = [
    "Overview", "Loss", "Learning rate", "Norm of the gradient", "Tokens per second", "Model FLOPs utilization (MFU)",
    "Memory by kind", "Time of a step by phase", "Bytes sent in a step", "Logged: accuracy", "Timeline of a step",
    "Warnings", "Configuration", "Versions",
]  # fmt: skip


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    pytest.importorskip("bokeh")
    folder = run_folders.write(tmp_path_factory.mktemp("runs") / "first", range(1, 41))
    assert main(["report", "--run", str(folder)]) == 0
    return (folder / "report.html").read_text()


def plain(page: str) -> str:
    """What stands on the page beside the charts."""
    return re.sub(r"<[^>]+>", " ", re.sub(r"(?s)<(script|style).*?</\1>", "", page))


def test_it_has_a_part_for_all_that_the_folder_tells(page: str) -> None:
    assert re.findall(r"<h2[^>]*>(.*?)</h2>", page) == HEADINGS
    text = " ".join(plain(page).split())
    assert "State ended" in text
    assert "optimizer 42 43 +2.4% 43 43" in text, "the plan, and the most that was alive"
    assert "torch 2.13.0" in text


def test_nothing_of_it_comes_from_elsewhere_and_what_a_run_says_is_no_markup(page: str) -> None:
    markup = re.sub(r"(?s)(<script[^>]*>).*?</script>", r"\1", page)
    assert page.count("<script") >= 2
    assert not re.findall(r"""(?:src|href|action)\s*=\s*["'](?!#|data:)|url\(|@import""", markup)
    assert "&lt;/script&gt;&lt;b&gt;the last one" in markup
    assert "<b>" not in markup


def test_a_killed_run_has_a_page_too_and_its_torn_lines_are_counted(tmp_path: Path) -> None:
    pytest.importorskip("bokeh")
    folder = run_folders.write(tmp_path / "killed", range(1, 6), end=None)
    with (folder / "rank-0.jsonl").open("a") as file:
        file.write('{"event": "step", "step": 6, "seco')
    (folder / "run.json").write_text('{"world"')
    assert main(["report", "--run", str(folder), "--out", str(tmp_path / "page.html")]) == 0
    text = plain((tmp_path / "page.html").read_text())
    assert "not ended on rank 0, 1: killed, or going on" in text
    assert "1 line of the folder could not be read" in text
    assert "run.json is not there or cannot be read" in text
    assert "1 to 5, of which 0 skipped" in text
    for rank in range(2):
        (folder / f"rank-{rank}.jsonl").write_text("")
    assert main(["report", "--run", str(folder)]) == 0
    assert "No step has ended yet" in (folder / "report.html").read_text()


def test_a_resumed_run_goes_on_behind_a_torn_line_and_its_steps_are_the_newest(tmp_path: Path) -> None:
    lines = [{"event": "step", "step": step, "loss": loss} for step, loss in ((1, 9.0), (2, 8.0), (2, 7.0), (3, 6.0))]
    texts = [json.dumps(line) for line in lines]
    texts[2] = '{"event": "step", "ste' + texts[2]
    (tmp_path / "rank-0.jsonl").write_text("\n".join(texts) + "\n")
    (rank,) = read(tmp_path).ranks
    assert [(step["step"], step["loss"]) for step in rank.steps()] == [(1, 9.0), (2, 7.0), (3, 6.0)]
    assert rank.torn == 0


def test_ranks_of_an_earlier_larger_run_in_the_folder_are_left_out(tmp_path: Path) -> None:
    run_folders.write(tmp_path, range(1, 3), ranks=4)
    run_folders.write(tmp_path, range(1, 3), ranks=2)
    assert [rank.number for rank in read(tmp_path).ranks] == [0, 1]


def test_a_folder_that_is_none_is_refused_with_what_was_wanted(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    for command in (["report", "--run", str(tmp_path)], ["top", "--once", str(tmp_path / "gone")]):
        assert main(command) == 2
        said = capsys.readouterr().err
        assert '"zero": {"report": "DIR"}' in said and str(tmp_path) in said
    assert main(["report", "--out", "page.html"]) == 2
    assert "--run DIR" in capsys.readouterr().err


def test_a_line_of_zeros_is_left_out(tmp_path: Path) -> None:
    pytest.importorskip("bokeh")
    run_folders.write(tmp_path, range(1, 4))
    zeros = [
        run_folders.step(at) | {"sent": 0, "phases": {"forward": 0.03, "other": 0.0}, "norm": 0.0} for at in (1, 2)
    ]
    (tmp_path / "rank-0.jsonl").write_text("".join(json.dumps(step) + "\n" for step in zeros))
    sections = {section.title: section for section in _curves(read(tmp_path))}
    assert "Bytes sent in a step" not in sections
    assert [words.split(":")[0] for words in sections["Time of a step by phase"].words] == ["forward"]
    assert "Norm of the gradient" in sections, "there a zero says something"


def test_beside_all_memory_the_state_has_an_axis_of_its_own(tmp_path: Path) -> None:
    pytest.importorskip("bokeh")
    sections = _curves(read(run_folders.write(tmp_path, range(1, 41))))
    chart = next(section.chart for section in sections if section.title == "Memory by kind")
    spans = [chart.y_range, *chart.extra_y_ranges.values()]
    assert [[float(max(each.data_source.data["y"])) // 10 for each in span.renderers] for span in spans] == [
        [2, 2, 2, 2, 4, 4],
        [44, 44],
    ], "each range is that of its lines and markers only: 21, 21 and 43 MiB of state, some 440 in all"
    assert [span.start for span in spans] == [0, 0]
    assert [axis.axis_label for axis in chart.yaxis] == ["MiB of state on rank 0", "MiB in all"]
    assert [item.label.value for item in chart.legend[0].items][-1] == "memory (right axis)"


def test_thinning_keeps_every_spike_and_says_so() -> None:
    pytest.importorskip("bokeh")
    import numpy as np

    from zero.tools.report.charts import thinned

    x = np.arange(100_000)
    y = np.sin(x / 1000.0)
    y[[777, 50_001]], y[60_000:61_000] = (9.0, -9.0), np.nan
    at, kept = thinned(x, y, 2_000)
    assert len(at) <= 2_000 and (np.diff(at) > 0).all()
    assert {777, 50_001} <= set(at)
    assert np.isnan(kept).any(), "a gap stays one"
    assert thinned(x[:2_000], y[:2_000], 2_000)[0] is not None and len(thinned(x[:2_000], y[:2_000], 2_000)[0]) == 2_000


def test_without_bokeh_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    run_folders.write(tmp_path, range(1, 3))
    monkeypatch.delitem(sys.modules, "zero.tools.report.charts", raising=False)
    monkeypatch.setitem(sys.modules, "bokeh", None)
    monkeypatch.setitem(sys.modules, "bokeh.embed", None)
    assert main(["report", "--run", str(tmp_path)]) == 2
    assert "pip install 'zero[report]'" in capsys.readouterr().err
    assert not (tmp_path / "report.html").exists()
