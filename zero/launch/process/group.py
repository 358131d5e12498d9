"""Processes that run at the same time, until all have ended, and whatever these have started."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import selectors
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from zero.launch.process.output import OutputPump
from zero.launch.process.process import OutputStream, Process

if TYPE_CHECKING:
    import psutil

_PR_SET_CHILD_SUBREAPER = 36
_TURN = 0.05  # seconds between two looks at what makes no noise
_PAUSE = 0.01  # seconds to wait for whoever reads what we write
_HASTE = 1.0  # seconds that are left after a second signal, and from asking a process to end to killing it
_STUCK = 3.0  # seconds after which a killed process is waited for no longer
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
PASSED = (signal.SIGUSR1, signal.SIGUSR2)  # which end nothing by themselves


class Descendants:
    """The processes that come to be below this one from now on.

    adopt: have orphans fall to this process instead of init, where nobody would find them: the data loaders, say, of a
    rank that was killed. Without it, only those are known that `note` saw while their parent was alive.
    """

    def __init__(self, adopt: bool = False) -> None:
        if adopt and sys.platform == "linux":
            with contextlib.suppress(OSError, AttributeError):
                ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._noted: set[psutil.Process] = set()
        self._before = _below()

    def note(self) -> None:
        """Remember the processes that are below this one now."""
        self._noted |= _below() - self._before

    def end(self, grace: float) -> None:
        """End them all: ask first, kill after `grace` seconds; at once where that is 0."""
        import psutil

        self.note()
        if grace:
            for process in self._noted:
                with contextlib.suppress(psutil.Error):
                    process.terminate()
            psutil.wait_procs(self._noted, timeout=grace)
            self.note()  # what was started in the meantime goes too
        for process in self._noted:
            with contextlib.suppress(psutil.Error):
                process.kill()  # checks that the process id still means the same process
        psutil.wait_procs(self._noted, timeout=grace)  # what follows may need their ports
        self._noted.clear()


def _below() -> set[psutil.Process]:
    import psutil

    with contextlib.suppress(psutil.Error):
        return set(psutil.Process().children(recursive=True))
    return set()


class ProcessGroup:
    """Runs processes until all have ended. A subclass says what is to happen in `received`, `ended` and `tick`.

    SIGINT, SIGTERM, SIGHUP and SIGQUIT ask all processes to end; those that have not after `patience` seconds are
    ended, and a second signal makes that sooner. A signal that was ignored before stays so, as under nohup. SIGUSR1 and
    SIGUSR2 are passed on, to each process once it takes them.

    outputs: where lines of the processes and our own go; more is read only when its reader keeps up.
    signals: where `caught` notes them, if the caller has called that already.
    descendants: of the caller, who ends them; without, what the processes leave here is killed with them.

    stopped_by: the signal that came first.
    """

    patience = 7.0

    def __init__(
        self,
        processes: Sequence[Process],
        outputs: OutputPump | None = None,
        signals: list[int] | None = None,
        descendants: Descendants | None = None,
    ) -> None:
        self.processes = processes
        self.outputs = outputs
        self.stopped_by: int | None = None
        self._started: list[Process] = []
        self._running: list[Process] = []
        self._signals = [] if signals is None else signals
        self._agenda: list[tuple[float, Callable[[], None]]] = []
        self._due: list[tuple[Process, int]] = []
        self._catches = signals is None
        self._sweeps = descendants is None
        self._descendants = descendants
        self._selector = selectors.DefaultSelector()

    def received(self, process: Process, is_stderr: bool, lines: bytes) -> None:
        """Whole lines came from `process`."""

    def ended(self, process: Process) -> None:
        """`process` has ended, and all that it wrote was received."""

    def tick(self) -> None:
        """Some time has passed."""

    def finished(self) -> bool:
        """Whether nothing is to be waited for once all processes have ended."""
        return True

    def say(self, text: str) -> None:
        """One line of our own, among those of the processes."""
        if self.outputs is not None:
            self.outputs.put(True, f"zero run: {text}\n".encode(errors="surrogateescape"))

    def run(self) -> None:
        """Start all processes, and return when all have ended. Raises LaunchError where one cannot be started."""
        # Each process takes three of the files that this one may have open.
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        files = 4 * len(self.processes) + 64
        files = files if hard == resource.RLIM_INFINITY else min(files, hard)
        if soft != resource.RLIM_INFINITY and soft < files:
            resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
        self._descendants = self._descendants or Descendants()
        with caught(self._signals, signal.SIGTSTP, *PASSED) if self._catches else contextlib.nullcontext():
            try:
                for process in self.processes:
                    self.start(process)
                while self._running or self._selector.get_map() or not self.finished():
                    self._turn()
                self.wrap_up()
            finally:
                if self._running:
                    self._each(Process.kill)
                if self._sweeps:
                    self._descendants.end(grace=0)
                self._selector.close()

    def start(self, process: Process) -> None:
        """Start it, and look after it."""
        process.start()
        self._started.append(process)
        self._running.append(process)
        for stream in process.streams:
            self._selector.register(stream.fd, selectors.EVENT_READ, (process, stream))

    def wrap_up(self) -> None:
        """All have ended; signals are still ours."""

    def end(self, number: int = signal.SIGTERM) -> None:
        """Ask all to end, as the signal `number` would, and end them after `patience` seconds."""
        now = time.monotonic()
        closed = now + self.patience
        self._agenda = [
            (now, lambda: self._each(lambda process: process.ask(number))),
            (closed, lambda: self._each(Process.close)),
            (closed + _HASTE, lambda: self._each(Process.kill)),
            (closed + _HASTE + _STUCK, self._give_up),
        ]

    def stopped(self) -> bool:
        """Whether a signal has come; what the signals ask for is done."""
        while self._signals:
            number = self._signals.pop(0)
            if number == signal.SIGTSTP:
                self.suspend()
            elif number in PASSED:
                self.pass_on(number)
            elif self.stopped_by is not None:
                now = time.monotonic()
                self._agenda = [(min(at, now + place * _HASTE), what) for place, (at, what) in enumerate(self._agenda)]
            else:
                self.stopped_by = number
                self.end(number)
        return self.stopped_by is not None

    def pass_on(self, number: int) -> None:
        """A signal that is for the processes alone, and not for what they have started."""
        self._due += [(process, number) for process in self._running]

    def suspend(self) -> None:
        """The terminal's Ctrl-Z."""
        os.kill(os.getpid(), signal.SIGSTOP)

    def _each(self, action: Callable[[Process], None]) -> None:
        if self._descendants is not None:
            self._descendants.note()  # before the processes end and theirs are nobody's
        for process in self._started:  # those that have ended, too: what they left may hold a pipe
            action(process)

    def _give_up(self) -> None:
        for process in self._running:
            self.say(f"{process.name}: process {process.pid} could not be killed")
            for stream in list(process.streams):
                self._close(process, stream)
        self._running.clear()

    def _turn(self) -> None:
        if self.outputs is not None and self.outputs.full:  # the processes still hear from us
            time.sleep(_PAUSE)
            for process in self.processes:
                process.heard()  # as far as we know
        else:
            self._selector.select(_TURN)
            for key in list(self._selector.get_map().values()):
                process, stream = key.data
                if (lines := process.read(stream)) is None:
                    self._close(process, stream)
                else:
                    self._receive(process, stream, lines)
        for process in [process for process in self._running if process.ended()]:
            self._running.remove(process)
            for stream in process.streams:
                self._receive(process, stream, process.rest(stream))
            self.ended(process)
        for key in list(self._selector.get_map().values()):
            process, stream = key.data
            if process.silent:
                self._close(process, stream)
        self.stopped()
        self._due = [(one, number) for one, number in self._due if one.status is None and not one.take_signal(number)]
        self.tick()
        while self._agenda and self._agenda[0][0] <= time.monotonic():
            self._agenda.pop(0)[1]()

    def _close(self, process: Process, stream: OutputStream) -> None:
        self._receive(process, stream, process.rest(stream))
        self._selector.unregister(stream.fd)
        stream.close()
        process.streams.remove(stream)

    def _receive(self, process: Process, stream: OutputStream, lines: bytes) -> None:
        if lines:
            self.received(process, stream.is_stderr, lines)


@contextlib.contextmanager
def caught(signals: list[int], *more: int) -> Iterator[None]:
    """Note signals that end a process, and `more`, in `signals` when they come; those that are ignored stay so."""
    before = {}
    for number in (*_SIGNALS, *more):
        if signal.getsignal(number) != signal.SIG_IGN:
            before[number] = signal.signal(number, lambda number, _: signals.append(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
