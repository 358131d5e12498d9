"""Charts by bokeh: lines over steps and bars over time, told apart by dashes, markers and hatches, not colour alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from bokeh.embed import components
from bokeh.models import BasicTickFormatter, DataRange1d, FixedTicker, HoverTool, Legend, LinearAxis
from bokeh.plotting import figure
from bokeh.resources import Resources

POINTS = 200_000  # of all lines of a page: 8 bytes each, a third more as text, within its 5 MB
SPANS = 4_000  # bars of a timeline
# Dark enough for 3:1 on white, and told apart by most who see few colours.
_COLOURS = ("#1f4e9c", "#b5460f", "#00705a", "#7b2d7b", "#5c5c00", "#8c1c3f", "#3d3d3d", "#006d8f")
_TINTS = ("#c9d8f2", "#f7d3bf", "#bfe5dc", "#e6cde6", "#e3e3b3", "#f2c9d4", "#d9d9d9", "#bfe3ee")
_DASHES = ("solid", "dashed", "dotted", "dotdash", "dashdot")
_MARKERS = ("circle", "square", "triangle", "diamond", "inverted_triangle", "star", "cross", "x")
_HATCHES = (
    "blank", "right_diagonal_line", "dot", "horizontal_line", "cross", "vertical_line", "left_diagonal_line",
    "criss_cross", "ring", "horizontal_wave",
)  # fmt: skip
_MARKED = 8  # markers along one line
_MEDIANS = 100  # points of the line through a noisy one


class Curve(NamedTuple):
    """Values (y) at steps (x); NaN is a gap. axis: "default", at the left, or what one at the right says.

    A chart has lines at the left in any case.
    """

    name: str
    x: np.ndarray
    y: np.ndarray
    axis: str = "default"


class Bar(NamedTuple):
    """A bar, in milliseconds from the begin of a step; the first word of its name is the verb."""

    row: str
    name: str
    begin: float
    end: float

    @property
    def verb(self) -> str:
        """What it does."""
        return self.name.partition(" ")[0]


def line_chart(lines: Sequence[Curve], what: str, most: int = POINTS) -> Any:
    """Lines over steps, each of at most so many points; through a long line that is alone goes its running median."""
    spans, right = {}, {}
    for axis in dict.fromkeys(["default", *(line.axis for line in lines)]):
        around = float(max(np.nanmax(np.abs(line.y)) for line in lines if line.axis == axis)) or 1.0
        spans[axis] = DataRange1d(default_span=around)  # of values that are all the same
        if axis != "default":  # both from zero, so that they compare; this one lower, so that no two highest meet
            spans["default"].start, right[axis] = 0, spans[axis]
            spans[axis].update(start=0, end=1.3 * around)
    ranges = {"x_range": DataRange1d(range_padding=0.02), "y_range": spans["default"], "extra_y_ranges": right}
    chart = _figure(height=310, x_axis_label="step", y_axis_label=what, **ranges)
    items: list[tuple[str, list[Any]]] = []

    def draw(name: str, x: np.ndarray, y: np.ndarray, index: int = 0, **look: Any) -> None:
        look = {"color": _COLOURS[index % 8], "line_dash": _DASHES[index % 5], "line_width": 1.5, **look}
        items.append((name, [chart.line(x.astype("i4"), y.astype("f4"), **look)]))

    for index, line in enumerate(lines):
        x, y = thinned(line.x, line.y, most)
        noisy = len(lines) == 1 and len(line.x) >= 20 * _MEDIANS
        name = "each step" if noisy else line.name if line.axis == "default" else f"{line.name} (right axis)"
        draw(name, x, y, index, line_alpha=0.4 if noisy else 1.0, y_range_name=line.axis)
        if noisy:
            width = len(line.x) // _MEDIANS
            x, y = (each[: width * _MEDIANS].reshape(_MEDIANS, width) for each in (line.x, line.y))
            draw(f"median of {width} steps", x[:, width // 2], np.median(y, axis=1), color="black", line_width=2.5)
        elif len(lines) > 1 or len(x) <= _MARKED:
            at = np.unique(np.linspace(index / len(lines) / _MARKED * len(x), len(x) - 1, _MARKED).astype(int))
            look = {"marker": _MARKERS[index % 8], "size": 8, "fill_color": "white", "color": _COLOURS[index % 8]}
            items[-1][1].append(chart.scatter(x[at], y[at], y_range_name=line.axis, **look))
    for axis, span in spans.items():
        span.renderers = [each for each in chart.renderers if each.y_range_name == axis]
    if len(items) > 1:
        _below(chart, items)
    return chart


def thinned(x: np.ndarray, y: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """At most so many points: of each stretch the smallest and the largest, so that no spike is lost; all if they fit.

    Points that are not finite stay out of those stretches; a stretch of nothing else leaves one, which is a gap.
    """
    if len(x) <= most:
        return x, y
    kept = []
    for part in np.array_split(np.arange(len(x)), max(1, most // 2)):
        known = part[np.isfinite(y[part])]
        kept += sorted({known[np.argmin(y[known])], known[np.argmax(y[known])]}) if len(known) else [part[0]]
    return x[kept], y[kept]


def timeline(spans: Sequence[Bar]) -> Any:
    """Bars in rows, the longest SPANS; one that lies in another is drawn on it, less high. One verb is one look."""
    rows = list(dict.fromkeys(span.row for span in spans))
    chart = _figure(height=190 + 44 * len(rows), x_axis_label="milliseconds of the step")
    bars: dict[str, list[tuple[Any, ...]]] = {}
    open_: dict[str, list[Bar]] = {row: [] for row in rows}
    for span in sorted(sorted(spans, key=lambda each: each.begin - each.end)[:SPANS], key=lambda each: each.begin):
        around = open_[span.row] = [each for each in open_[span.row] if each.end > span.begin]
        middle, half = -float(rows.index(span.row)), 0.42 * 0.75 ** len(around)
        bars.setdefault(span.verb, []).append((span.begin, span.end, middle - half, middle + half, span.name))
        around.append(span)
    items = []
    outer_first = sorted(bars.items(), key=lambda each: max(bar[2] - bar[3] for bar in each[1]))
    for index, (verb, mine) in enumerate(outer_first):
        columns = dict(zip(("left", "right", "bottom", "top", "name"), zip(*mine, strict=True), strict=True))
        look = {"fill_color": _TINTS[index % 8], "hatch_pattern": _HATCHES[index % 10], "hatch_scale": 8}
        look |= {"line_color": "black", "line_width": 0.5, "hatch_alpha": 0.6}
        items.append((verb, [chart.quad(source=columns, **look)]))
    chart.add_tools(HoverTool(tooltips=[("", "@name"), ("ms", "@left{0.00} to @right{0.00}")]))
    chart.yaxis.ticker = FixedTicker(ticks=[-index for index in range(len(rows))])
    chart.yaxis.major_label_overrides = {-index: row for index, row in enumerate(rows)}
    chart.ygrid.visible = False
    _below(chart, items)
    return chart


def embedded(charts: Mapping[str, Any]) -> tuple[str, str, dict[str, str]]:
    """bokeh's own script, the one that draws these charts, and the element of each."""
    script, elements = components(dict(charts)) if charts else ("", {})
    return "\n".join(Resources(mode="inline", components=["bokeh"]).js_raw), script, elements


def _figure(**given: Any) -> Any:
    """With tools that take no touch or wheel before they are chosen, so that a page still scrolls."""
    chart = figure(
        sizing_mode="stretch_width",
        tools="xpan,xbox_zoom,xzoom_in,xzoom_out,reset",
        active_drag=None,
        toolbar_location="above",
        **given,
    )
    chart.toolbar.logo = None
    for name in given.get("extra_y_ranges", ()):
        chart.add_layout(LinearAxis(y_range_name=name, axis_label=name), "right")
    for axis in chart.axis:
        axis.axis_label_text_font_style = "normal"
        axis.axis_label_text_color = axis.major_label_text_color = "#222222"
        axis.formatter = BasicTickFormatter(power_limit_high=7)
    return chart


def _below(chart: Any, items: Sequence[tuple[str, list[Any]]]) -> None:
    look = {"location": "top_left", "border_line_color": None, "padding": 0, "margin": 0, "glyph_width": 36}
    legend = Legend(items=list(items), ncols=2, **look)
    legend.label_text_font_size = "12px"
    chart.add_layout(legend, "below")
