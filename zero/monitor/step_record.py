"""One rank's record of one optimizer step, which the log line, the monitors and the run folder read."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Event = tuple[str, float, int]  # name, value, and place on the x axis: the samples of all steps so far
_WRITTEN = (  # in the run folder
    *("step", "time", "seconds", "samples", "tokens", "global_samples", "skipped", "loss", "norm", "lr", "scale"),
    *("phases", "waits", "bytes", "sent", "values"),
)


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """An optimizer step that has just ended, skipped or not. None, or an empty collection: unknown, or not read.

    step: the engine's `global_steps` including it. time: seconds since 1970. seconds: since the end of the last step,
    for the first since its first forward. global_samples: of all steps so far, over all ranks.
    loss, samples, tokens: over all ranks on rank 0, the rank's own on the others.
    norm: of the averaged gradient before clipping. lr: of each parameter group. scale: of the loss, None outside fp16.
    phases: seconds by name; on a GPU, without a wait, those that have ended since the last record.
    waiting: seconds inside of the phases in which the loop stood still, by what it stood still for.
    bytes: memory by kind; read at most once a second. sent: bytes that have left the rank in the step.
    values: passed to `engine.log` since the last step; tensors of one element are read when the record is written.
    skipped_steps, not_finite: steps so far that were skipped, or had a loss that was not finite.
    """

    step: int
    time: float = field(default_factory=time.time)
    seconds: float
    samples: int
    tokens: float = 0.0
    global_samples: int
    skipped: bool = False
    loss: float | None = None
    norm: float | None = None
    lr: tuple[float, ...] = ()
    scale: float | None = None
    phases: Mapping[str, float] = field(default_factory=dict)
    waiting: Mapping[str, float] = field(default_factory=dict)
    bytes: Mapping[str, int] = field(default_factory=dict)
    sent: int | None = None
    values: Mapping[str, Any] = field(default_factory=dict)
    skipped_steps: int = 0
    not_finite: int = 0

    @property
    def waits(self) -> float | None:
        """Seconds in which the loop waited for updates beside it, in any phase."""
        return self.waiting.get("updates")

    def line(self) -> dict[str, Any]:
        """The known values for the run folder; a number that is not finite is None, because JSON cannot express it."""
        values = {name: getattr(self, name) for name in _WRITTEN} | {"values": read(self.values)}
        known = {name: value for name, value in values.items() if value is not None and value != () and value != {}}
        return {"event": "step", **finite(known)}

    def events(self) -> list[Event]:
        """The events for the monitors, under DeepSpeed's names."""
        lr = self.lr[0] if self.lr else None
        named = {"train_loss": self.loss, "lr": lr, "loss_scale": self.scale, "grad_norm": self.norm}
        named |= {f"elapsed_time_ms_{name}": seconds * 1e3 for name, seconds in self.phases.items()}
        return _events(named | dict(self.values), self.global_samples)


@dataclass(frozen=True)
class Line:
    """A line of the run folder, if there is an `event`, and events for the monitors.

    values: of the line; logged: those of `engine.log` for a step that had ended before, after so many samples.
    """

    event: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)
    told: Sequence[Event] = ()
    logged: tuple[Mapping[str, Any], int] | None = None
    time: float = field(default_factory=time.time)

    def line(self) -> Mapping[str, Any] | None:
        """The event, the time and the values."""
        more = {} if self.logged is None else {"values": read(self.logged[0])}
        return {"event": self.event, "time": self.time, **finite({**self.values, **more})} if self.event else None

    def events(self) -> Sequence[Event]:
        """As they are told; of what was logged the numbers."""
        return self.told if self.logged is None else _events(*self.logged)


Record = StepRecord | Line


def _events(values: Mapping[str, Any], samples: int) -> list[Event]:
    numbers = {name: value for name, value in read(values).items() if isinstance(value, int | float)}
    return [(f"Train/Samples/{name}", value, samples) for name, value in numbers.items()]


def read(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values as numbers, booleans or texts; waits for those on a device."""
    found = {name: value.item() if hasattr(value, "item") else value for name, value in values.items()}
    return {name: value if isinstance(value, int | float) else str(value) for name, value in found.items()}


def finite(value: Any) -> Any:
    """The value with None for each number inside that is not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: finite(each) for name, each in value.items()}
    return [finite(each) for each in value] if isinstance(value, list | tuple) else value
