"""`engine.monitor`: a separate thread writes a run's reports to a list of sinks; no failure ends the run."""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from zero.config import Config
from zero.log import logger, rank_zero
from zero.monitor.run_folder import RunFolder, numbered
from zero.monitor.sinks import SINKS, Sink
from zero.monitor.step_record import Event, Line, Record
from zero.watchdog.rank_status import RankStatus

_PATIENCE = 60.0  # seconds that the end of a run waits for sinks
_QUIET = 1.0  # seconds without a report, after which the rank's current activity is read
_FLUSH_EVERY = 5.0  # seconds


class Monitor:
    """Passes reports to the run folder of this rank, and on rank 0 to the sinks of events.

    Without folder and sinks, a step does nothing for it.
    """

    def __init__(self, status: RankStatus) -> None:
        """`status`: the activity of this rank."""
        self._rank = status.rank
        self._writer = _Writer(status)
        # Ends the run: waits until all is written, for a minute at most.
        self.close = weakref.finalize(self, _end, self._writer)
        self.close.atexit = False  # it runs before the libraries of sinks end, see `_make`

    @property
    def enabled(self) -> bool:
        """Whether there is a sink that has not failed."""
        return bool(self._writer.sinks)

    def open(self, config: Config, run: Callable[[], Mapping[str, Any]], number: int) -> None:
        """Open the sinks of the JSON; one that fails is left out with a warning.

        `run` returns the contents of run.json; `number` is that of the run folder, the same on all ranks.
        """
        given, put = config.zero.report, self._writer.queue.put
        if given is not None:
            folder = numbered(given, number)
            if number > 1:
                text = "zero.report: another engine or job writes into %s; this one writes into %s"
                rank_zero(logging.WARNING, text, given, folder)
            self._make("zero.report", lambda: RunFolder(folder, self._rank, run(), put))
        for key, make in SINKS.items() if self._rank == 0 else ():
            section = getattr(config, key)
            if section.enabled:
                self._make(key, functools.partial(make, section))

    def add(self, sink: Sink) -> None:
        """Also pass the events of each step to `sink.write_events`; only on rank 0.

        Raises TypeError for an object without that method.
        """
        if not callable(getattr(sink, "write_events", None)):
            raise TypeError(f"monitor.add(): got {type(sink).__name__}, wanted an object with write_events(event_list)")
        if self._rank == 0:
            self._make(f"{type(sink).__name__} at {id(sink):#x}", lambda: sink)

    def write_events(self, event_list: Sequence[Event]) -> None:
        """Write events (name, value, samples so far) to the sinks; returns at once, and does nothing off rank 0."""
        if self._rank == 0:
            self.tell(Line(told=list(event_list)))

    def tell(self, item: Record) -> None:
        """Queue a report for the thread."""
        if self.enabled:
            self._writer.queue.put(item)

    def hold(self, item: Record | None) -> None:
        """Queue this at the end of the run, unless something else, or None, is held until then."""
        self._writer.held = item

    def _make(self, name: str, make: Callable[[], Any]) -> None:
        try:
            self._writer.sinks[name] = make()
        except Exception as error:
            logger.warning("%s: nothing is written there: %s: %s", name, type(error).__name__, error)
            return
        atexit.unregister(self.close)
        atexit.register(self.close)  # runs before the functions that the sink's library has registered
        if self._writer.thread is None:
            self._writer.thread = threading.Thread(target=self._writer.run, name="zero-monitor", daemon=True)
            self._writer.thread.start()


class _Writer:
    """The thread, which may outlive the engine until all is written, and its state shared with `Monitor`."""

    def __init__(self, status: RankStatus) -> None:
        self.queue: queue.SimpleQueue[Record | None] = queue.SimpleQueue()
        self.sinks: dict[str, Any] = {}
        self.held: Record | None = None  # what has no step yet that it is reported with
        self.thread: threading.Thread | None = None
        self._status = status
        self._said: dict[str, str] = {}
        self._flushed = time.monotonic()

    def run(self) -> None:
        """Write what is queued, until None is."""
        while True:
            try:
                item = self.queue.get(timeout=_QUIET)
            except queue.Empty:
                now = self._status.record(0, 0)
                phase = {"phase": now.phase.value} | ({"waits": now.waits} if now.waits else {})
                item = Line() if phase == self._said else Line("phase", phase)
                self._said = phase
            if item is None:
                return self._close()
            self._write(item)
            if time.monotonic() - self._flushed >= _FLUSH_EVERY:
                self._flush()

    def _close(self) -> None:
        self._flush()
        for sink in self.sinks.values():
            try:
                _call(sink, "close")
            except Exception as error:
                logger.warning("at the end of the run: %s: %s", type(error).__name__, error)
        self.sinks.clear()

    def _write(self, item: Record) -> None:
        line, events = item.line(), item.events()
        for name, sink in list(self.sinks.items()):
            if isinstance(sink, RunFolder):
                self._try(name, "write_line", line)
            elif events:
                self._try(name, "write_events", events)

    def _flush(self) -> None:
        self._flushed = time.monotonic()
        for name in list(self.sinks):
            self._try(name, "flush")

    def _try(self, name: str, method: str, *what: object) -> None:
        try:
            _call(self.sinks[name], method, *what)
        except Exception as error:
            sink = self.sinks.pop(name)
            text = "%s: nothing more is written there, and the run goes on: %s: %s"
            logger.warning(text, name, type(error).__name__, error)
            with contextlib.suppress(Exception):
                _call(sink, "close")


def _call(sink: Any, method: str, *what: object) -> None:
    """Call a method of a sink, if it has that; it needs but `write_events`."""
    if (found := getattr(sink, method, None)) is not None:
        found(*what)


def _end(writer: _Writer) -> None:
    """Report the end of the run with its cause, and wait until all is written."""
    if writer.thread is None:
        return
    error = sys.exc_info()[1] or getattr(sys, "last_value", None)
    how = {"status": "ended"} if error is None else {"status": "failed", "error": f"{type(error).__name__}: {error}"}
    if writer.held is not None:
        writer.queue.put(writer.held)
    writer.queue.put(Line("end", how))
    writer.queue.put(None)
    if writer.thread is not threading.current_thread():  # on which the engine may be collected
        writer.thread.join(_PATIENCE)
        if writer.thread.is_alive():
            logger.warning("after %d s not all is written to %s", _PATIENCE, ", ".join(writer.sinks))
