"""Ends a run whose time is over: at a signal all ranks save behind the step that runs, and end with one status."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from zero.optim.norm import RankFlags, RankReport


class Signals:
    """Notes the signals of this process that `watch` names, until `close`, and what ranks say of theirs with each step.

    due: whether one has come to any rank by the last step of which the reports are known; the same on all ranks.
    """

    def __init__(self) -> None:
        self.due = self._came = self._closed = False
        self._before: dict[int, Any] = {}

    def watch(self, names: str | int | Sequence[str | int]) -> None:
        """In place of those before. ValueError for what is no signal, RuntimeError outside of the main thread."""
        numbers = [_number(each) for each in ([names] if isinstance(names, str | int) else names)]
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("save_on_signal(): Python hears signals in the main thread only; call it there")
        self.close()
        self._before = {number: signal.signal(number, self._note) for number in numbers}

    def _note(self, number: int, frame: Any) -> None:
        self._came = True
        if self._closed:  # by another thread, which could not give it back
            self.close()
            signal.raise_signal(number)

    def said(self, report: RankReport) -> RankReport:
        """The report of a step, with what came to this rank."""
        return report._replace(flags=report.flags | RankFlags.SIGNAL) if self._came else report

    def hear(self, reports: Mapping[int, RankReport]) -> None:
        """Take the reports of all ranks."""
        self.due = self.due or any(RankFlags.SIGNAL in each.flags for each in reports.values())

    def leave(self) -> None:
        """The run ends: SIGTERM, by which srun answers the first rank's end, changes no other's status any more."""
        with contextlib.suppress(ValueError):  # of another thread than the main one
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            self._before.pop(signal.SIGTERM, None)

    def close(self) -> None:
        """Give the signals back to whom they belonged before; in another thread than the main one, when they come."""
        self._closed = threading.current_thread() is not threading.main_thread()
        while self._before and not self._closed:
            number, handler = self._before.popitem()
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _number(name: str | int) -> int:
    try:
        number = signal.Signals[name] if isinstance(name, str) else signal.Signals(name)
    except (KeyError, ValueError):
        raise ValueError(f"save_on_signal(): got {name!r}, wanted the name of a signal, such as 'SIGUSR1'") from None
    if number in (signal.SIGKILL, signal.SIGSTOP):
        raise ValueError(f"save_on_signal(): {number.name} comes to no program; take 'SIGUSR1' or 'SIGTERM'")
    return number
