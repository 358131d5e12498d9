"""What one rank tells of one optimizer step: the one value behind the log line, the monitors and the run folder."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

Event = tuple[str, float, int]  # name, value, and where on the x axis: the samples of all steps so far


class Told(Protocol):
    """Something that a run tells; it is asked for it in the thread that writes."""

    def line(self) -> Mapping[str, Any] | None:
        """For the run folder, see `zero.monitor.run_folder`; None for nothing."""

    def events(self) -> Sequence[Event]:
        """For the monitors."""


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
    """An optimizer step that has just ended, skipped or not. None, or an empty collection: not known, or not read then.

    step: the engine's `global_steps` with it. time: seconds since 1970. seconds: since the end of the step before it,
    of the first since its first forward. global_samples: of all steps so far, over all ranks.
    loss, samples, tokens: over all ranks on rank 0, the rank's own on the others.
    norm: of the averaged gradient before clipping. lr: of each parameter group. scale: of the loss, None outside fp16.
    phases: seconds by name; on a GPU, which is not waited for, those that have ended since the report before.
    waits: seconds in which the loop waited for updates beside it, in whatever phase.
    bytes: memory by kind; read at most once a second. sent: bytes that have left the rank in the step.
    values: what `engine.log` was given since the step before; tensors of one element are read when it is written.
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
        """For the run folder: what is known; a number that is not finite is None, as JSON has no other word for it."""
        values = {each.name: getattr(self, each.name) for each in fields(self)} | {"values": self._read()}
        known = {name: value for name, value in values.items() if value is not None and value != () and value != {}}
        return {"event": "step", **finite(known)}

    def events(self) -> list[Event]:
        """For the monitors, under DeepSpeed's names; what `engine.log` was given goes under Train/Samples/, too."""
        lr = self.lr[0] if self.lr else None
        named = {"train_loss": self.loss, "lr": lr, "loss_scale": self.scale, "grad_norm": self.norm}
        named |= {f"elapsed_time_ms_{name}": seconds * 1e3 for name, seconds in self.phases.items()}
        named |= {name: value for name, value in self._read().items() if isinstance(value, int | float)}
        known = [(name, value) for name, value in named.items() if value is not None]
        return [(f"Train/Samples/{name}", value, self.global_samples) for name, value in known]

    def _read(self) -> dict[str, Any]:
        """The values as numbers, truth values or texts; waits for those on a device."""
        read = {name: value.item() if hasattr(value, "item") else value for name, value in self.values.items()}
        return {name: value if isinstance(value, int | float) else str(value) for name, value in read.items()}


def finite(value: Any) -> Any:
    """The same with None for each number that is not finite, however deep inside."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: finite(each) for name, each in value.items()}
    return [finite(each) for each in value] if isinstance(value, list | tuple) else value
