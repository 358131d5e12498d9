"""Draws the figures of the pages: `python docs/figures/draw.py` writes them beside this file.

The bytes are those of `zero.plan.memory`, the plan is that of `zero plan`. The step and the ranks are drawings, not
measurements.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("svg")

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from zero.config import load
from zero.plan.formats import ITEMSIZE, Formats
from zero.plan.layout import make_layout
from zero.plan.memory import Scheme, alive_nbytes
from zero.plan.sharding import Sharding
from zero.plan.units import ParamSpec, UnitPlan
from zero.sizes.cost import shape_cost
from zero.sizes.estimate import DEFAULT, GB
from zero.sizes.rates import DEVICES
from zero.sizes.shape import shape_of
from zero.tools.plan.search import USABLE, Setup, candidates
from zero.tools.plan.table import name_of, tokens

HERE = Path(__file__).parent
BLUE, ORANGE, GREEN, GREY = "#4477aa", "#ee8866", "#44aa77", "#dddddd"
KINDS = {"parameters": BLUE, "gradients": ORANGE, "optimizer": GREEN}
# The same file for the same figure: no date, no random identifiers, and text as text.
STYLE = {"svg.hashsalt": "zero", "svg.fonttype": "none", "font.size": 10}


def memory() -> Figure:
    """Model state per rank of 7 billion parameters in bf16 on 8 ranks, for each stage."""
    figure, axes = pyplot.subplots(figsize=(7, 2.8))
    cut = {3: "parameters, too", 2: "gradients, too", 1: "optimizer state", 0: "nothing is cut"}
    cases = [(f"stage {stage}: {what}", stage, Formats(master="remainder")) for stage, what in cut.items()]
    cases.insert(0, ("stage 3, 8-bit moments", 3, Formats(master="remainder", moments="8bit")))
    spec = ParamSpec("all", 7 * 10**9, "bf16", True, 0, 2)
    unit = UnitPlan("all", "", (spec,), make_layout({"all": spec.numel}, 8, 256))
    for row, (_, stage, formats) in enumerate(cases):
        sharding = Sharding.of_stage(stage)
        scheme = Scheme(sharding, 8 if sharding.optim else 1, formats=formats, accumulation=2)  # adds up in fp32
        gradients = {"reduced_gradients" if sharding.grads else "local_gradients": ["all"]}
        held = alive_nbytes([unit], scheme, **gradients)
        left = 0.0
        for (kind, color), nbytes in zip(KINDS.items(), (held.parameters, held.gradients, held.record), strict=True):
            axes.barh(row, nbytes / 1e9, left=left, color=color, label=kind if row == 0 else None)
            left += nbytes / 1e9
        axes.text(left + 1, row, f"{left:.1f}", va="center")
    axes.set_yticks(range(len(cases)), [name for name, *_ in cases])
    axes.set(xlabel="GB per rank: 7 billion parameters, bf16, AdamW, 8 ranks", xlim=(0, 125))
    axes.legend(loc="lower right", frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def plan() -> Figure:
    """What `zero plan` finds for 7 billion parameters on 16 GPUs: the fastest row of some choices."""
    rates, shape = DEVICES["h100"], shape_of(7e9)
    settings = load(DEFAULT, 16, filled=False)
    setup = Setup(shape, shape_cost(shape, 4096, ITEMSIZE[settings.compute_dtype]), settings, rates)
    best = {}
    for row in candidates(setup):
        best.setdefault((str(row.choice), row.policy), row)
    figure, axes = pyplot.subplots(figsize=(7, 2.8))
    places = ("3, optimizer and parameters on host", "3, optimizer on host", "3", "2", "1", "0")
    shown = [best[place, "none"] for place in places]
    for at, row in enumerate(shown):
        axes.barh(at, row.peak / GB, color=GREY if row.lacks else BLUE)
        text = "does not fit" if row.lacks else f"{row.step.step:.2f} s a step, {tokens(setup, row):,.0f} tokens/s"
        axes.text(1, at, text, va="center", color="black" if row.lacks else "white")
    axes.axvline(USABLE * rates.device_memory / GB, color=ORANGE, linestyle="--")
    axes.set_yticks(range(len(shown)), [name_of(row) for row in shown])
    axes.set(xlabel="GB at most: 7 billion parameters, bf16, on 16 GPUs with 80 GB")
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def timeline() -> Figure:
    """One step of a model of three blocks at stage 3: what is sent, beside what is computed."""
    figure, axes = pyplot.subplots(figsize=(7, 2.4))
    compute = [(1, 1, "1"), (2, 1, "2"), (3, 1, "3"), (4, 2, "3"), (6, 2, "2"), (8, 2, "1")]
    gathers = [(0, 1, "1"), (1, 1, "2"), (2, 1, "3"), (4, 1, "2"), (6, 1, "1")]
    reductions = [(6, 1, "3"), (8, 1, "2"), (10, 1, "1")]
    rows = [(2, gathers, BLUE), (1, compute, GREY), (0, reductions, ORANGE)]
    for row, parts, color in rows:
        for begin, length, block in parts:
            box(axes, (begin, row - 0.35), (length, 0.7), color, block)
    box(axes, (11, 0.65), (1.2, 0.7), GREEN, "")
    for x, text in ((2.5, "forward"), (7, "backward"), (11.6, "step")):
        axes.text(x, 2.7, text, ha="center")
    axes.set_yticks([2, 1, 0], ["gather parameters", "compute block", "reduce-scatter gradients"])
    axes.set(xlim=(0, 12.5), ylim=(-0.6, 3.0), xticks=[], xlabel="time")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False)
    return figure


def mesh() -> Figure:
    """Who holds which part of a unit, on four ranks of two machines."""
    figure, all_axes = pyplot.subplots(1, 3, figsize=(7, 2.4))
    whole, half = [(4, n) for n in range(4)], [(2, n % 2) for n in range(4)]
    kinds = [("ZeRO over all ranks", [whole]), ("HSDP, shard_size 2", [half]), ("hpZ of 2", [whole, half])]
    for axes, (title, holdings) in zip(all_axes, kinds, strict=True):
        for rank in range(4):
            x, y = rank % 2 * 1.1, 2.6 - rank // 2 * 1.5
            for held, color, height in zip(holdings, (BLUE, GREEN), (0.5, 0.3), strict=False):
                parts, mine = held[rank]
                box(axes, (x, y), (1, height), GREY, "")
                box(axes, (x + mine / parts, y), (1 / parts, height), color, "")
                y -= height + 0.05
            axes.text(x + 0.5, 3.15 - rank // 2 * 1.5, f"rank {rank}", ha="center", fontsize=8)
        for machine in range(2):
            axes.text(-0.15, 2.7 - machine * 1.5, f"machine {machine}", rotation=90, va="center", fontsize=8)
        axes.set(xlim=(-0.3, 2.3), ylim=(0.5, 3.6))
        axes.set_title(title, fontsize=10)
        axes.axis("off")
    label = "blue: parameters, gradients, optimizer state; green: a second copy of the parameters"
    figure.text(0.5, 0.02, label, ha="center", fontsize=9)
    return figure


def box(axes: Axes, corner: tuple[float, float], size: tuple[float, float], color: str, text: str) -> None:
    """A filled box with a word in the middle."""
    axes.add_patch(pyplot.Rectangle(corner, *size, facecolor=color, edgecolor="white"))
    axes.text(corner[0] + size[0] / 2, corner[1] + size[1] / 2, text, ha="center", va="center")


FIGURES = {"memory": memory, "plan": plan, "timeline": timeline, "mesh": mesh}


def main(folder: Path = HERE) -> None:
    """Write all figures into a folder."""
    with matplotlib.rc_context(STYLE):
        for name, draw in FIGURES.items():
            figure = draw()
            figure.savefig(folder / f"{name}.svg", bbox_inches="tight", metadata={"Date": None, "Creator": None})
            pyplot.close(figure)


if __name__ == "__main__":
    main()
