"""One rank's report of one optimizer step: the value behind the log line, the monitors and the run folder."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

Event = tuple[str, float, int]  # name, value, and place on the x axis: the samples of all steps so far


class ReportItem(Protocol):
    """A report of a run; the writing thread calls its methods."""

    def line(self) -> Mapping[str, Any] | None:
        """Its line in the run folder, see `zero.monitor.run_folder`; None for nothing."""

    def events(self) -> Sequence[Event]:
        """Its events for the monitors."""


@dataclass(frozen=True)
class Line:
    """A line of the run folder, if there is an `event`, and events for the monitors."""

    event: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)
    told: Sequence[Event] = ()
    time: float = field(default_factory=time.time)

    def line(self) -> Mapping[str, Any] | None:
        """The event, the time and the values."""
        return {"event": self.event, "time": self.time, **finite(self.values)} if self.event else None

    def events(self) -> Sequence[Event]:
        """As they are."""
        return self.told


def unit_norms(step: int, global_samples: int, units: Mapping[str, Sequence[float]]) -> Line:
    """The norms of each unit's gradient, parameters and update in a step."""
    kinds = ("gradient", "parameter", "update")
    events = [
        (f"Train/Units/{unit}/{kind}_norm", value, global_samples)
        for unit, values in units.items()
        for kind, value in zip(kinds, values, strict=True)
    ]
    return Line("unit_norms", {"step": step, "units": units}, events)


@dataclass(frozen=True)
class StepReport:
    """An optimizer step that has just ended, skipped or not. None, or an empty collection: unknown, or not read.

    step: the engine's `global_steps` including it. time: seconds since 1970. seconds: since the end of the last step,
    for the first since its first forward. global_samples: of all steps so far, over all ranks.
    loss, samples, tokens: over all ranks on rank 0, the rank's own on the others.
    norm: of the averaged gradient before clipping. lr: of each parameter group. scale: of the loss, None outside fp16.
    phases: seconds by name; on a GPU, without a wait, those that have ended since the last report.
    waits: seconds in which the loop waited for updates beside it, in any phase.
    bytes: memory by kind; read at most once a second. sent: bytes that have left the rank in the step.
    values: passed to `engine.log` since the last step; tensors of one element are read when the report is written.
    """

    step: int
    time: float
    seconds: float
    samples: int
    tokens: float
    global_samples: int
    skipped: bool
    loss: float | None = None
    norm: float | None = None
    lr: tuple[float, ...] = ()
    scale: float | None = None
    phases: Mapping[str, float] = field(default_factory=dict)
    waits: float | None = None
    bytes: Mapping[str, int] = field(default_factory=dict)
    sent: int | None = None
    values: Mapping[str, Any] = field(default_factory=dict)

    def line(self) -> dict[str, Any]:
        """The known values for the run folder; a number that is not finite is None, because JSON cannot express it."""
        values = {each.name: getattr(self, each.name) for each in fields(self)} | {"values": _read(self.values)}
        known = {name: value for name, value in values.items() if value is not None and value != () and value != {}}
        return {"event": "step", **finite(known)}

    def events(self) -> list[Event]:
        """The events for the monitors, under DeepSpeed's names; also values of `engine.log`, under Train/Samples/."""
        lr = self.lr[0] if self.lr else None
        named = {"train_loss": self.loss, "lr": lr, "loss_scale": self.scale, "grad_norm": self.norm}
        named |= {f"elapsed_time_ms_{name}": seconds * 1e3 for name, seconds in self.phases.items()}
        named |= {name: value for name, value in _read(self.values).items() if isinstance(value, int | float)}
        known = [(name, value) for name, value in named.items() if value is not None]
        return [(f"Train/Samples/{name}", value, self.global_samples) for name, value in known]


@dataclass(frozen=True)
class Logged:
    """Values passed to `engine.log` for a step that had ended before; see `StepReport`."""

    step: int
    global_samples: int
    values: Mapping[str, Any]
    time: float = field(default_factory=time.time)

    def line(self) -> dict[str, Any]:
        """The line of the run folder."""
        return {"event": "log", "time": self.time, "step": self.step, "values": finite(_read(self.values))}

    def events(self) -> list[Event]:
        """The numbers among them."""
        numbers = {name: value for name, value in _read(self.values).items() if isinstance(value, int | float)}
        return [(f"Train/Samples/{name}", value, self.global_samples) for name, value in numbers.items()]


def _read(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values as numbers, booleans or texts; waits for those on a device."""
    read = {name: value.item() if hasattr(value, "item") else value for name, value in values.items()}
    return {name: value if isinstance(value, int | float) else str(value) for name, value in read.items()}


def finite(value: Any) -> Any:
    """The value with None for each number inside that is not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: finite(each) for name, each in value.items()}
    return [finite(each) for each in value] if isinstance(value, list | tuple) else value
