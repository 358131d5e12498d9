"""The alarm of `zero.alarm`: a loss, or a norm, that stands out from those of the steps before it."""

from __future__ import annotations

import logging
import math
import os
import tempfile
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from zero.config.monitor_sections import Alarm
from zero.log import rank_zero


def unwritable(section: Alarm) -> list[str]:
    """Why this rank cannot write into the folder of checkpoints, which is made; empty where it can or there is none."""
    try:
        if section.folder is not None:
            os.makedirs(section.folder, exist_ok=True)
            tempfile.TemporaryFile(dir=section.folder).close()
    except OSError as error:
        return [f"zero.alarm.folder: got {section.folder!r}, where nothing can be written: {error.strerror}"]
    return []


class Alarms:
    """Judges each step by the last ones. All ranks that are given the same numbers judge alike.

    A value that stands out is one of the next window, too: a new level is the normal one after a while.
    """

    def __init__(self, section: Alarm) -> None:
        limits = {"loss": section.loss, "norm": section.norm}
        self._section = section
        self._limits = {name: limit for name, limit in limits.items() if limit is not None}
        self._last: dict[str, deque[float]] = {name: deque(maxlen=section.window) for name in self._limits}
        self._tag = ""  # of the checkpoint that is due
        self._quiet_until = 0

    def skips(self, step: int, loss: float | None, norm: float) -> bool:
        """Warn of what stands out of the numbers of step `step`, and remember them; whether it is to be left out."""
        values = {"loss": loss, "norm": norm}
        said = {name: text for name in self._limits if (text := self._judge(name, values[name])) is not None}
        if not said:
            return False
        skips = self._section.action == "skip"
        text = "; ".join(said.values())
        rank_zero(logging.WARNING, "step %d%s: %s", step, " skipped" if skips else "", text)
        if self._section.action == "checkpoint" and step >= self._quiet_until:
            self._tag = f"step{step}-{'-and-'.join(said)}-stands-out"
            self._quiet_until = step + self._section.window
        return skips

    def save(self, save_checkpoint: Callable[..., object]) -> None:
        """Save, after the step, if one that stands out is to be kept; at most once in a window."""
        if self._tag:
            tag, self._tag = self._tag, ""
            save_checkpoint(self._section.folder, tag, save_latest=False)

    def state_dict(self) -> dict[str, Any]:
        """The values of the window, and until which step no further checkpoint is due; the same on all ranks."""
        return {"last": {name: list(last) for name, last in self._last.items()}, "quiet_until": self._quiet_until}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Judge as where `state` was taken; of a window longer than ours by its newest values."""
        for name, last in self._last.items():
            last.clear()
            last.extend(state["last"].get(name, ()))
        self._quiet_until = state["quiet_until"]

    def _judge(self, name: str, value: float | None) -> str | None:
        if value is None:
            return None
        last = self._last[name]
        full = len(last) == last.maxlen
        mean = sum(last) / max(1, len(last))
        deviation = math.sqrt(sum((each - mean) ** 2 for each in last) / max(1, len(last)))
        if math.isfinite(value):
            last.append(value)
        # A NaN compares false, so it stands out. Where all are the same, what rounding makes of them does not.
        if not full or value <= mean + max(self._limits[name] * deviation, 1e-6 * abs(mean)):
            return None
        return f"the {name} {value:.5g} stands out: mean {mean:.5g}, deviation {deviation:.2g} in {len(last)} steps"
