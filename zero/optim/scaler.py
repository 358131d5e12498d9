"""The loss scale of fp16: a factor of the loss, so that small gradients do not become zero.

A dynamic scale follows DeepSpeed's sequence. With `iteration` counting calls of `update` from 0 and `last_overflow`
the number of the last one that overflowed, at first -1:

    overflow    with hysteresis above 1, it counts down and the scale stays;
                else scale = max(scale / 2, minimum), and at the minimum already, RuntimeError
    good step   n = iteration - last_overflow - 1; when n > 0 and n is a multiple of the window, scale = 2 scale and the
                hysteresis is whole again; with `consecutive_hysteresis` it is after every good step

`update` runs after the step, so an increased scale is used from the next step on.
"""

from __future__ import annotations

import math
from typing import Any

from zero.config.sections import Fp16

# Beyond this scaling helps no gradient that fp16 can hold, and mean / scale would leave the normal range of fp32.
LARGEST = 2.0**64

TOKENS = 1024.0  # of a micro-batch, before a step has told

AT_MINIMUM = "Current loss scale already at minimum - cannot decrease scale anymore. Exiting run."


class LossScaler:
    """The loss scale: `LossScaler(128.0)` is fixed, `LossScaler(rule=Fp16())` follows the section of the JSON."""

    def __init__(self, scale: float = 1.0, rule: Fp16 | None = None, weighs: bool = False) -> None:
        """`weighs`: losses are multiplied by the tokens of their micro-batches."""
        self.rule = rule
        self._scale = 2.0**rule.initial_scale_power if rule else float(scale)
        self._hysteresis = rule.hysteresis if rule else 1
        self._iteration = 0
        self._last_overflow = -1
        self._forced: float | None = None
        self.unit = TOKENS if weighs else None

    def weigh(self, count: float, micro_batches: float) -> None:
        """Divide the weights of the next step's losses by what a micro-batch of the last one counted, on all ranks.

        So fp16 holds what it holds without weights. `unit` is a power of two, by which no number is rounded.
        """
        if self.unit is not None and count:
            self.unit = 2.0 ** round(math.log2(count / micro_batches))

    @property
    def loss_scale(self) -> float:
        """The factor of the next loss."""
        return self._scale if self._forced is None else self._forced

    cur_scale = loss_scale  # DeepSpeed's names: this one and the next two
    cur_iter = property(lambda self: self._iteration, doc="Steps of which `update` has taken note.")
    scale_window = property(lambda self: self.rule and self.rule.loss_scale_window, doc="None of a fixed scale.")

    @property
    def dynamic(self) -> bool:
        """Whether `update` may change the scale."""
        return self.rule is not None and self._forced is None

    def force(self, scale: float) -> None:
        """Use this scale from now on. Raises ValueError unless it is positive and finite."""
        if isinstance(scale, bool) or not isinstance(scale, int | float) or not 0 < scale < math.inf:
            raise ValueError(f"override_loss_scale(): got {scale!r}, wanted a positive finite number")
        self._forced = float(scale)

    def update(self, overflow: bool) -> str:
        """Record one step; returns the change of the scale in words, or "" if there is none.

        Raises RuntimeError for an overflow at the smallest scale allowed.
        """
        rule, before = self.rule, self.loss_scale
        if rule is None or self._forced is not None:
            return f"loss scale {_number(before)} is fixed" if overflow and before != 1.0 else ""
        good = self._iteration - self._last_overflow - 1
        if overflow:
            self._last_overflow = self._iteration
        self._iteration += 1
        if overflow and self._hysteresis > 1:
            self._hysteresis -= 1
            return f"loss scale {_number(before)} stays, hysteresis {self._hysteresis + 1} -> {self._hysteresis}"
        if overflow:
            if before <= rule.min_loss_scale:
                raise RuntimeError(AT_MINIMUM)
            self._scale = max(before / 2, float(rule.min_loss_scale))
        else:
            grown = good > 0 and good % rule.loss_scale_window == 0
            if grown or rule.consecutive_hysteresis:
                self._hysteresis = rule.hysteresis
            if grown:
                self._scale = min(2 * before, LARGEST)
        return f"loss scale {_number(before)} -> {_number(self._scale)}" if self._scale != before else ""

    def state_dict(self) -> dict[str, Any]:
        """All that `load_state_dict` needs, as plain numbers."""
        return {
            "scale": self._scale,
            "hysteresis": self._hysteresis,
            "iteration": self._iteration,
            "last_overflow": self._last_overflow,
            "forced": self._forced,
            "unit": self.unit,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from another scaler's state. A scale fixed by this configuration stays.

        Raises ValueError for a state that is not one of `state_dict`.
        """
        wanted = self.state_dict().keys()
        if wanted - {"unit"} != state.keys() - {"unit"}:  # older checkpoints have none
            raise ValueError(f"state of the loss scaler: got the keys {sorted(state)}, wanted {sorted(wanted)}")
        if self.unit is not None and state.get("unit") is not None:
            self.unit = float(state["unit"])
        if self.rule is None:
            return
        self._scale, self._hysteresis = float(state["scale"]), int(state["hysteresis"])
        self._iteration, self._last_overflow = int(state["iteration"]), int(state["last_overflow"])
        self._forced = None if state["forced"] is None else float(state["forced"])


def _number(scale: float) -> str:
    return f"{scale:.0f}" if scale.is_integer() else f"{scale:g}"
