"""Contexts around the forward passes of modules, also those recomputed in the backward; and time stamps."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

Stamp = float | torch.cuda.Event
Around = Callable[[], AbstractContextManager[Any]]


class ModuleCalls:
    """Watches the forward passes of some modules, until `end`."""

    def __init__(self) -> None:
        self._ends: list[Callable[[], None]] = []

    def watch(self, module: nn.Module, around: Around) -> None:
        """Run each pass of the module inside `around()`, after the forward pre-hooks that already exist."""
        forward = vars(module).get("forward")
        if hasattr(forward, "around"):  # recomputed by `zero.recompute`, which calls no hooks
            forward.around.append(around)
            self._ends.append(lambda: forward.around.remove(around))
            return
        running: list[AbstractContextManager[Any]] = []

        def begin(*_: Any) -> None:
            context = around()
            context.__enter__()
            running.append(context)

        def finish(*_: Any) -> None:
            if running:
                running.pop().__exit__(None, None, None)

        # Gathers run before, and releases after.
        self._ends.append(module.register_forward_pre_hook(begin).remove)
        self._ends.append(module.register_forward_hook(finish, prepend=True, always_call=True).remove)

    def end(self) -> None:
        """Stop watching."""
        for end in self._ends:
            end()
        self._ends = []


def now(device: torch.device) -> Stamp:
    """The current time; on a GPU that of its current stream."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def ended(stamp: Stamp) -> bool:
    """Whether the time is past."""
    return isinstance(stamp, float) or stamp.query()


def seconds(start: Stamp, end: Stamp) -> float:
    """The seconds between two past times."""
    return end - start if isinstance(end, float) else start.elapsed_time(end) / 1e3
