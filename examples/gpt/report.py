"""What a run leaves behind: a table of bytes, the loss as CSV, and its curve as PNG."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import NamedTuple

import matplotlib

matplotlib.use("Agg")  # before pyplot: there may be no screen

from matplotlib import pyplot
from rich.console import Console
from rich.table import Table

from zero.plan.memory import StateBytes

FEW = 30
"""Up to so many steps the curve shows each as a point."""


class Point(NamedTuple):
    """One optimizer step: number from 1, loss of the global batch (nats/byte), rate, seconds so far."""

    step: int
    loss: float
    lr: float
    seconds: float


def bytes_rows(rank: StateBytes, replica: StateBytes, formula: StateBytes) -> list[tuple[str, int, int, int, float]]:
    """Return (kind, this rank, one replica, formula, difference of rank and formula in %), the total last."""
    kinds = ("parameters", "gradients", "optimizer")
    columns = [[getattr(state, kind) for kind in kinds] for state in (rank, replica, formula)]
    for column in columns:
        column.append(sum(column))
    rows = []
    for kind, here, whole, said in zip((*kinds, "total"), *columns, strict=True):
        difference = 100 * (here - said) / said if said else float("inf") if here else 0.0
        rows.append((kind, here, whole, said, difference))
    return rows


def bytes_table(title: str, rank: StateBytes, replica: StateBytes, formula: StateBytes) -> str:
    """Return `bytes_rows` as a table for a terminal of 80 columns, in bytes."""
    table = Table(title=title, title_justify="left")
    table.add_column("model state, bytes")
    for name in ("this rank", "one replica", "formula", "difference"):
        table.add_column(name, justify="right")
    for kind, here, whole, said, difference in bytes_rows(rank, replica, formula):
        if kind == "total":
            table.add_section()
        table.add_row(kind, f"{here:,}", f"{whole:,}", f"{said:,}", f"{difference:+.2f} %")
    text = io.StringIO()
    Console(file=text, width=80, color_system=None).print(table)
    return text.getvalue().rstrip()


def write_csv(path: Path, points: list[Point]) -> None:
    """Write one line per step; the numbers have all their digits."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(Point._fields)
        writer.writerows(points)


def write_curve(path: Path, points: list[Point], validation: float, bigram: float) -> None:
    """Write the loss (nats/byte) over the steps, with the validation and bigram losses as lines."""
    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    steps = [point.step for point in points]
    losses = [point.loss for point in points]
    marker = "." if len(points) <= FEW else None  # a line through a single point would not be seen
    axes.plot(steps, losses, color="tab:blue", alpha=0.3, linewidth=0.8, label="train, each step", marker=marker)
    axes.plot(steps, smooth(losses), color="tab:blue", label="train, smoothed", marker=marker)
    axes.axhline(validation, color="tab:green", linestyle="--", label=f"validation {validation:.3f}")
    axes.axhline(bigram, color="tab:red", linestyle=":", label=f"bigram on validation {bigram:.3f}")
    axes.set(xlabel="step", ylabel="loss, nats per byte")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def smooth(values: list[float], keep: float = 0.9) -> list[float]:
    """Return the running mean in which a value loses 1 - keep of its weight per step, without its bias."""
    mean, weight, result = 0.0, 0.0, []
    for value in values:
        mean = keep * mean + (1 - keep) * value
        weight = keep * weight + (1 - keep)
        result.append(mean / weight)
    return result
