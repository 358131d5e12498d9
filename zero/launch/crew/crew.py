"""Programs that run at the same time, one for each host or one for all: their output, their stdin, their end."""

from __future__ import annotations

import contextlib
import os
import resource
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from zero.launch.backends.command import Command
from zero.launch.contract import INTERRUPT, TERMINATE
from zero.launch.crew.outlets import Lines, Outputs
from zero.launch.errors import LaunchError
from zero.launch.secret import VARIABLE

if TYPE_CHECKING:
    import psutil

_BEAT = b"."
_BEAT_SECONDS = 1.0
_TURN = 0.05  # seconds between two looks at what makes no noise
_PAUSE = 0.01  # seconds to wait for whoever reads what we write
_OPEN = 1.0  # seconds that a pipe may be silent and still open after its program has ended
_HASTE = 1.0  # seconds that are left after a second signal, and from asking a program to end to killing it
_READER = 2.0  # seconds for whoever reads what we write, once we were told to stop
_STUCK = 3.0  # seconds after which a killed program is waited for no longer
_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGTSTP")


class Stream:
    """One of a program's outputs."""

    def __init__(self, fd: int, is_stderr: bool) -> None:
        self.fd = fd
        self.is_stderr = is_stderr
        self.lines = Lines()
        self.open = True


class Program:
    """One program.

    secret: of the job, if it starts one; on its stdin where that is ours to write on, else in its environment.

    Attributes:
        name: the host, or the program where it starts all hosts.
        status: its exit status as a shell says it, once it has ended.
    """

    def __init__(self, name: str, command: Command, secret: str = "") -> None:
        self.name = name
        self.command = command
        self.secret = secret
        self.status: int | None = None
        self.killed_by: int | None = None  # the signal, where one ended it
        self.last = b""  # what it said last on stderr
        self._stdin: int | None = None
        self._killed = False
        self._heard = 0.0

    def start(self) -> None:
        """Start it, in a session of its own: a Ctrl-C of the terminal is for us, who know how to hand it on."""
        given = None
        more = {} if self.command.heartbeat or not self.secret else {VARIABLE: self.secret}
        if self.command.holds_stdin:
            given, self._stdin = os.pipe()
            os.set_blocking(self._stdin, False)
        try:
            self.process = subprocess.Popen(
                self.command.words,
                stdin=subprocess.DEVNULL if given is None else given,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                env={**os.environ, **self.command.environment, **more},
                start_new_session=True,
            )
        except OSError as error:
            self.close_stdin()
            raise LaunchError(f"{self.name}: cannot start {self.command.words[0]!r}: {error.strerror}") from error
        finally:
            if given is not None:
                os.close(given)
        if self.command.heartbeat:
            self.write(self.secret.encode() + b"\n")
        self.streams = [Stream(self.process.stdout.fileno(), False), Stream(self.process.stderr.fileno(), True)]

    def write(self, data: bytes) -> None:
        """Put `data` on its stdin, if it takes it."""
        if self._stdin is not None:
            with contextlib.suppress(BlockingIOError, BrokenPipeError):
                os.write(self._stdin, data)

    def close_stdin(self) -> None:
        """Let it see the end of its stdin."""
        if self._stdin is not None:
            os.close(self._stdin)
            self._stdin = None

    def ask(self, letter: bytes) -> None:
        """Ask it to end what it runs."""
        if self.command.heartbeat:
            self.write(letter)
        elif self.command.holds_stdin:
            self.close_stdin()
        else:
            # Whatever we were sent: srun takes SIGTERM for an order to kill at once, and each of them hands SIGINT on.
            self.send(signal.SIGINT)

    def send(self, number: int) -> None:
        """Send it a signal."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)

    def close(self) -> None:
        """End it, politely."""
        self.close_stdin()
        self.send(signal.SIGTERM)

    def kill(self) -> None:
        """End it, and what has stayed in its group, in one stroke: a shell would go on to what it is to run next."""
        self._killed = True
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def heard(self) -> None:
        """Something came from it just now."""
        self._heard = time.monotonic()

    def over(self) -> bool:
        """Whether it has ended and nothing more comes from it."""
        if self.process.poll() is None:
            return False
        if self.status is None:
            self._heard = time.monotonic()
            code = self.process.returncode
            self.killed_by = -code if code < 0 else None
            self.status = 128 - code if code < 0 else code
            self.close_stdin()
        # What it has left in the background, such as the shared connection of ssh's ControlPersist, may hold a pipe.
        late = self._killed or time.monotonic() > self._heard + _OPEN
        return late or not any(stream.open for stream in self.streams)


class Crew:
    """Runs programs until all have ended. Who uses it says what is to happen in `received`, `ended` and `tick`.

    SIGINT, SIGTERM, SIGHUP and SIGQUIT ask all programs to end; those that have not after `patience` seconds are ended,
    and a second signal makes that sooner. A signal that was ignored before stays so, as under nohup.

    Attributes:
        stopped_by: the signal that came first.
    """

    patience = 7.0

    def __init__(self, programs: Sequence[Program]) -> None:
        self.programs = programs
        self.stopped_by: int | None = None
        self._running: list[Program] = []
        self._came: list[int] = []
        self._agenda: list[tuple[float, Callable[[], None]]] = []
        self._next_beat = 0.0
        self._groups: set[int] = set()  # each program begins one
        self._below: set[psutil.Process] = set()
        self._selector = selectors.DefaultSelector()

    def received(self, program: Program, is_stderr: bool, lines: bytes) -> None:
        """Whole lines came from `program`."""

    def ended(self, program: Program) -> None:
        """`program` has ended, and all that it wrote was received."""

    def tick(self) -> None:
        """Some time has passed."""

    def held_back(self) -> bool:
        """Whether nothing more should be read for now."""
        return False

    def said(self, text: str) -> None:
        """Something that the user should know."""

    def run(self) -> None:
        """Start all programs, and return when all have ended. Raises LaunchError where one cannot be started."""
        _allow(files=4 * len(self.programs) + 64)
        with _caught(self._came):
            try:
                for program in self.programs:
                    program.start()
                    self._running.append(program)
                    self._groups.add(program.process.pid)
                    for stream in program.streams:
                        self._selector.register(stream.fd, selectors.EVENT_READ, (program, stream))
                while self._running:
                    self._turn()
                self.wrap_up()
            finally:
                if self._running:
                    self._each(Program.kill)
                self._sweep()
                self._selector.close()

    def wrap_up(self) -> None:
        """All have ended; signals are still ours."""

    def write_out(self, outputs: Outputs) -> None:
        """Wait until all is written: as long as a slow reader likes, or for moments only once a signal has come."""
        outputs.finish()
        left = _READER
        while not outputs.done(_TURN) and left > 0:
            self.look_at_signals()
            left -= _TURN if self.stopped_by is not None else 0

    def end(self, letter: bytes, leisure: float = 0.0, patience: float | None = None) -> None:
        """Give all programs `leisure` to end by themselves, ask them by `letter`, and end them after `patience`."""
        asked = time.monotonic() + leisure
        closed = asked + (self.patience if patience is None else patience)
        self._agenda = [
            (asked, lambda: self._each(lambda program: program.ask(letter))),
            (closed, lambda: self._each(Program.close)),
            (closed + _HASTE, lambda: self._each(Program.kill)),
            (closed + _HASTE + _STUCK, self._give_up),
        ]

    def look_at_signals(self) -> None:
        """Do what the signals that have come ask for."""
        while self._came:
            number = self._came.pop(0)
            if number == signal.SIGTSTP:
                self._suspend()
            elif self.stopped_by is not None:
                now = time.monotonic()
                self._agenda = [(min(at, now + place * _HASTE), what) for place, (at, what) in enumerate(self._agenda)]
            else:
                self.stopped_by = number
                self.end(INTERRUPT if number == signal.SIGINT else TERMINATE)

    def _suspend(self) -> None:
        if any(program.command.heartbeat for program in self._running):
            self.said("not suspended: the hosts would take the silence for the end of the launcher")
        else:
            os.kill(os.getpid(), signal.SIGSTOP)

    def _each(self, action: Callable[[Program], None]) -> None:
        self._look_below()
        for program in self._running:
            action(program)

    def _look_below(self) -> None:
        """Note what our programs have started here, before they end and it is nobody's."""
        import psutil

        ours = set(self._groups)
        with contextlib.suppress(psutil.Error):
            for process in psutil.Process().children(recursive=True):  # parents before their children
                if process.pid not in ours and process.ppid() in ours:
                    self._below.add(process)
                    ours.add(process.pid)

    def _sweep(self) -> None:
        """Kill what the programs that were to end have left here."""
        for process in self._below:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if process.is_running():
                    # A group that somebody is left in is still the program's, though that has ended.
                    group = os.getpgid(process.pid)
                    os.killpg(group, signal.SIGKILL) if group in self._groups else process.kill()

    def _give_up(self) -> None:
        for program in self._running:
            self.said(f"{program.name}: process {program.process.pid} could not be killed")
        self._running.clear()

    def _turn(self) -> None:
        if self.held_back():
            time.sleep(_PAUSE)
            for program in self._running:
                program.heard()  # as far as we know
        else:
            self._read()
        now = time.monotonic()
        if now >= self._next_beat:
            self._next_beat = now + _BEAT_SECONDS
            for program in self._running:
                if program.command.heartbeat:
                    program.write(_BEAT)
        for program in [program for program in self._running if program.over()]:
            self._running.remove(program)
            for stream in program.streams:
                self._finish(program, stream)
            self.ended(program)
        self.look_at_signals()
        self.tick()
        while self._agenda and self._agenda[0][0] <= time.monotonic():
            self._agenda.pop(0)[1]()

    def _read(self) -> None:
        ready = {key.fd for key, _ in self._selector.select(_TURN)}
        for key in list(self._selector.get_map().values()):
            program, stream = key.data
            if key.fd not in ready:
                self._receive(program, stream, stream.lines.settle())
            elif data := os.read(stream.fd, 65536):
                program.heard()
                self._receive(program, stream, stream.lines.feed(data))
            else:
                self._finish(program, stream)

    def _finish(self, program: Program, stream: Stream) -> None:
        if stream.open:
            self._receive(program, stream, stream.lines.end())
            self._selector.unregister(stream.fd)
            (program.process.stderr if stream.is_stderr else program.process.stdout).close()
            stream.open = False

    def _receive(self, program: Program, stream: Stream, lines: bytes) -> None:
        if not lines:
            return
        if stream.is_stderr and (spoken := lines[-4096:].strip()):
            program.last = spoken.replace(b"\r", b"\n").rpartition(b"\n")[2]
        self.received(program, stream.is_stderr, lines)


def _allow(files: int) -> None:
    """Let this process have so many open files, as far as the system lets it: each program takes three."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = files if hard == resource.RLIM_INFINITY else min(files, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


@contextlib.contextmanager
def _caught(came: list[int]) -> Iterator[None]:
    """Note signals in `came` instead of ending by them."""
    before = {}
    for name in _SIGNALS:
        number = getattr(signal, name)
        if signal.getsignal(number) != signal.SIG_IGN:
            before[number] = signal.signal(number, lambda number, _: came.append(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
