"""`zero report --run DIR`: one HTML file with all that a run folder tells; it needs no network to be read."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from typing import Any

from zero.log import counted
from zero.plan.memory import MIB
from zero.tools.report.written_run import Event, WrittenRun, read

_SAMPLED = 16  # steps in the table beside a chart
_RANKS = 8  # with a column, and a timeline, of their own
_NAN = float("nan")


@dataclass(frozen=True)
class Table:
    """Its rows begin with what they are about. folded: shown when asked for."""

    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[Any]]
    folded: bool = False


@dataclass(frozen=True)
class PagePart:
    """What stands under one heading: sentences, a chart (bokeh's, then its element), tables and text as it is."""

    title: str
    words: Sequence[str] = ()
    chart: Any = None
    tables: Sequence[Table] = ()
    text: str = ""


def write(folder: str | os.PathLike[str], out: str | os.PathLike[str] | None = None) -> Path:
    """Make the page of a run folder, DIR/report.html or `out`, and return its path.

    Raises NoRunFolder, OSError, and ModuleNotFoundError where bokeh is not installed.
    """
    run = read(folder)
    path = run.folder / "report.html" if out is None else Path(out)
    from jinja2 import Environment, PackageLoader

    from zero.tools.report.charts import embedded

    sections = [section for make in _SECTIONS for section in make(run)]
    library, script, elements = embedded({each.title: each.chart for each in sections if each.chart is not None})
    sections = [replace(section, chart=elements.get(section.title)) for section in sections]
    template = Environment(loader=PackageLoader("zero.tools.report", "."), autoescape=True).get_template("page.html")
    text = template.render(name=run.folder.resolve().name, sections=sections, library=library, script=script)
    part = path.with_name(f"{path.name}.part{os.getpid()}")
    part.write_text(text, encoding="utf-8")  # beside it, so that a reader never meets half of one
    return part.replace(path)


def command(folder: str, out: str | None) -> int:
    """`zero report --run`; returns the exit status."""
    try:
        print(write(folder, out))
        return 0
    except ModuleNotFoundError as error:
        print(f"zero report: error: --run: {error}; pip install 'zero[report]'", file=sys.stderr)
    except (ValueError, OSError) as error:
        print(f"zero report: error: --run: {error}", file=sys.stderr)
    return 2


def _overview(run: WrittenRun) -> list[PagePart]:
    first, facts = run.ranks[0], run.facts
    steps, words = first.steps(), []
    rows: list[tuple[str, Any]] = [("State", _state(run)), ("Ranks", facts.get("world", len(run.ranks)))]
    rows += [(name.capitalize(), facts[name]) for name in ("device", "stage") if name in facts]
    rows += [("Started", _clock(facts["time"], "%Y-%m-%d %H:%M:%S"))] if "time" in facts else []
    if steps:
        skipped = sum(bool(step.get("skipped")) for step in steps)
        rows += [
            ("Steps", f"{steps[0]['step']:,} to {steps[-1]['step']:,}, of which {skipped:,} skipped"),
            ("Median time of a step", f"{1e3 * median(step['seconds'] for step in steps):,.1f} ms"),
        ]
    if losses := [(step["loss"], step["step"]) for step in steps if step.get("loss") is not None]:
        low, at = min(losses)
        rows += [("Last loss", _number(losses[-1][0])), (f"Lowest loss, at step {at:,}", _number(low))]
    rows.append(("Warnings", sum(len(rank.of("warning")) for rank in run.ranks)))
    if torn := sum(rank.torn for rank in run.ranks):
        words.append(f"{counted(torn, 'line')} of the folder could not be read and left out, as after a kill.")
    if not facts:
        words.append("run.json is not there or cannot be read: units, configuration and versions are not known.")
    if len(starts := first.of("start")) > 1:
        words.append(f"The run was started {len(starts)} times; of steps taken again the newest are shown.")
    return [PagePart("Overview", words, tables=[Table("The run in short", ("What", "Value"), rows)])]


def _state(run: WrittenRun) -> str:
    ends = {rank.number: rank.last("end", "start", "step") for rank in run.ranks}
    failed = [f"failed on rank {rank}: {end['error']}" for rank, end in ends.items() if end.get("status") == "failed"]
    going = [str(rank) for rank, end in ends.items() if "status" not in end]
    if going:
        newest = max((event.get("time", 0) for rank in run.ranks for event in rank.events[-1:]), default=0)
        last = f"their last line is of {_clock(newest)}"
        failed.append(f"not ended on rank {', '.join(going)}: killed, or going on; {last}")
    return "; ".join(failed) or "ended"


def _clock(seconds: float, form: str = "%H:%M:%S") -> str:
    return f"{datetime.fromtimestamp(seconds, timezone.utc):{form}} UTC"


def _number(value: float | None) -> str:
    return "" if value is None or value != value else f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.5g}"


def _curves(run: WrittenRun) -> list[PagePart]:
    """Charts over the steps, all of rank 0, whose counts are over all ranks."""
    steps = run.ranks[0].steps()
    if not steps:
        return [PagePart("Steps", ["No step has ended yet."])]
    what = "tokens" if any(step.get("tokens") for step in steps) else "samples"
    groups = range(max(len(step.get("lr") or ()) for step in steps))
    charts: list[tuple[str, str, Mapping[str, Callable[[Event], float]]]] = [
        ("Loss", "loss", {"loss": lambda step: step["loss"]}),
        ("Learning rate", "learning rate", {f"group {i}": lambda step, i=i: step["lr"][i] for i in groups}),
        ("Norm of the gradient", "norm", {"norm": lambda step: step["norm"]}),
        ("Loss scale", "scale", {"scale": lambda step: step["scale"]}),
        (f"{what.capitalize()} per second", f"{what}/s", {f"{what}/s": lambda step: step[what] / step["seconds"]}),
    ]
    logged = _named(steps, "values", 1)
    if mfu := logged.pop("MFU", None):  # of `flops_profiler`
        charts.append(("Model FLOPs utilization (MFU)", "% of the peak", {"MFU": lambda step: 100 * mfu(step)}))
    charts += [
        (_MEMORY, "MiB on rank 0", _named(steps, "bytes", 1 / MIB)),
        (_PHASES, "ms on rank 0", _named(steps, "phases", 1e3)),
        (_SENT, "MiB by rank 0", {"sent": lambda step: step["sent"] / MIB}),
    ]
    charts += [(f"Logged: {name}", name, {name: value}) for name, value in logged.items()]
    return _drawn(run, steps, charts)


_MEMORY, _PHASES, _SENT = _AMOUNTS = ("Memory by kind", "Time of a step by phase", "Bytes sent in a step")
_WHOLE = {"memory", "GPU memory"}  # of the process or of the GPU, whatever uses it


def _named(steps: Sequence[Event], field: str, scale: float) -> dict[str, Callable[[Event], float]]:
    names = dict.fromkeys(name for step in steps for name in step.get(field) or ())
    return {name: lambda step, name=name: step[field][name] * scale for name in names}


def _drawn(
    run: WrittenRun, steps: Sequence[Event], charts: Sequence[tuple[str, str, Mapping[str, Any]]]
) -> list[PagePart]:
    from zero.tools.report.charts import POINTS, line_chart

    found = [(title, what, _lines(steps, series)) for title, what, series in charts]
    # Of these a line of zeros says nothing; a loss or a learning rate of zero does.
    found = [
        (title, what, [line for line in lines if title not in _AMOUNTS or (line.y != 0).any()])
        for title, what, lines in found
    ]
    most = max(2, POINTS // max(1, sum(len(lines) for *_, lines in found)))
    some = [steps[at] for at in sorted({*range(0, len(steps), max(1, len(steps) // _SAMPLED)), len(steps) - 1})]
    sections = []
    for (title, what, lines), (*_, series) in zip(found, charts, strict=True):
        if not lines:
            continue
        words = [_said(line) for line in lines]
        if (longest := max(len(line.x) for line in lines)) > most:
            words.append(f"The chart has the lowest and the highest of each {2 * longest / most:.0f} steps, not all.")
        names = [line.name for line in lines]
        rows = [[f"{step['step']:,}", *(_number(_value(series[name], step)) for name in names)] for step in some]
        tables = [Table(f"{title}: some steps ({what})", ("step", *names), rows, folded=True)]
        if title == _MEMORY:
            if {*names} - _WHOLE:  # beside all that is there the state were flat lines at the bottom
                what = "MiB of state on rank 0"
                lines = [line._replace(axis="MiB in all") if line.name in _WHOLE else line for line in lines]
            tables.insert(0, _memory(run))
        sections.append(PagePart(title, words, line_chart(lines, what, most), tables))
    return sections


def _lines(steps: Sequence[Event], series: Mapping[str, Callable[[Event], Any]]) -> list[Any]:
    """Those of which a number is known; each has the steps that say something of it."""
    import numpy as np

    from zero.tools.report.charts import Curve

    lines = []
    for name, get in series.items():
        said = [(step["step"], value) for step in steps if (value := _value(get, step)) is not None]
        x, y = np.array(said).reshape(-1, 2).T
        lines += [Curve(name, x, y)] if np.isfinite(y).any() else []
    return lines


def _value(get: Callable[[Event], Any], step: Event) -> float | None:
    """None: the step does not say. NaN: it was not finite, or is no number."""
    try:
        return float(get(step))
    except (KeyError, IndexError):
        return None
    except (TypeError, ValueError, ZeroDivisionError):
        return _NAN


def _said(line: Any) -> str:
    known = line.y[line.y == line.y]
    first, last, low, high, middle = map(_number, (known[0], known[-1], known.min(), known.max(), median(known)))
    return f"{line.name}: {first} at first, {last} at last, between {low} and {high}, median {middle}."


def _memory(run: WrittenRun) -> Table:
    """The most of each kind, on each rank, beside the plan."""
    plan = {kind: size / MIB for kind, size in (run.facts.get("plan") or {}).items()}
    most: dict[str, dict[int, float]] = {kind: {} for kind in plan}
    for rank in run.ranks:
        for step in rank.of("step"):
            for kind, size in (step.get("bytes") or {}).items():
                of = most.setdefault(kind, {})
                of[rank.number] = max(of.get(rank.number, 0), size / MIB)
    ranks, rows = [rank.number for rank in run.ranks[:_RANKS]], []
    for kind, of in most.items():
        top, wanted = max(of.values(), default=_NAN), plan.get(kind, _NAN)
        off = f"{top / wanted - 1:+.1%}" if wanted and top == top and wanted == wanted else ""
        rows.append([kind, _number(wanted), _number(top), off, *(_number(of.get(rank, _NAN)) for rank in ranks)])
    head = ("kind", "plan", "most alive", "difference", *(f"rank {number}" for number in ranks))
    return Table("Memory against the plan, MiB: the most of each kind at the end of a step", head, rows)


def _timeline(run: WrittenRun) -> list[PagePart]:
    from zero.tools.report.charts import SPANS, Bar, timeline

    events = {rank.number: rank.last("timeline") for rank in run.ranks}
    events = {number: event for number, event in events.items() if event.get("spans")}
    if not events:
        return [PagePart("Timeline of a step", ["The folder has none: no step was profiled."])]
    shown = dict(list(events.items())[:_RANKS])
    spans = [
        Bar(f"rank {number}: {stream}", name, 1e3 * begin, 1e3 * end)
        for number, event in shown.items()
        for stream, name, begin, end in sorted(event["spans"], key=lambda span: (span[0] != "MainThread", span[0]))
    ]
    sums: dict[tuple[str, str], list[float]] = {}
    for span in spans:
        sums.setdefault((span.row, span.verb), []).append(span.end - span.begin)
    rows = [(row, verb, len(times), _number(sum(times)), _number(max(times))) for (row, verb), times in sums.items()]
    words = [f"Of step {', '.join(sorted({str(event['step']) for event in shown.values()}))}."]
    if len(shown) < len(events):
        words.append(f"The first {len(shown)} of {len(events)} ranks.")
    if len(spans) > SPANS:
        words.append(f"The chart has the {SPANS:,} longest of {len(spans):,} spans; the table counts all.")
    caption = "Milliseconds by rank, stream and verb; what lies inside of another counts in both"
    table = Table(caption, ("rank and stream", "verb", "spans", "in all", "longest"), rows, folded=len(rows) > _SAMPLED)
    return [PagePart("Timeline of a step", words, timeline(spans), [table])]


def _facts(run: WrittenRun) -> list[PagePart]:
    warned = sorted((event["time"], rank.number, event["text"]) for rank in run.ranks for event in rank.of("warning"))
    rows = [(_clock(time), number, text) for time, number, text in warned]
    tables = [Table("What the log warned of", ("time", "rank", "text"), rows)] if rows else []
    sections = [PagePart("Warnings", [] if rows else ["None."], tables=tables)]
    if "configuration" in run.facts:
        sections.append(PagePart("Configuration", text=json.dumps(run.facts["configuration"], indent=2)))
    if versions := run.facts.get("versions"):
        tables = [Table("What it ran with", ("name", "version"), list(versions.items()))]
        sections.append(PagePart("Versions", tables=tables))
    return sections


_SECTIONS: Sequence[Callable[[WrittenRun], list[PagePart]]] = (_overview, _curves, _timeline, _facts)
