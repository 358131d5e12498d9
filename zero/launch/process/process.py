"""One child process: how it is started, how it is asked to end and killed, and what it writes."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO, NamedTuple

from zero.launch.launch_messages import LaunchError
from zero.launch.process.output import LineBuffer

_CHUNK = 1 << 16
_AT_ONCE = 64  # chunks of a stream that are read when its process has ended
_OPEN = 1.0  # seconds that a pipe may be silent and still open after its process has ended
_TAIL = 4096  # bytes within which the last line is looked for
_TAKEN = re.compile(r"Sig(?:Cgt|Ign):\s*(\w+)")  # sets of signals, a bit each
_TORCH_LOG = re.compile(rb"(\[rank\d+\]:)?\[?[IWE]\d{4} ")  # it goes on after the exception that ended a rank


class Command(NamedTuple):
    """A program to start on this machine."""

    words: list[str]  # program and arguments; no shell looks at them
    node: int | None = None  # the host that it starts; None: all of them
    environment: Mapping[str, str] = MappingProxyType({})  # on top of the launcher's
    holds_stdin: bool = False  # its stdin must be a pipe that stays open as long as it is to run

    def line(self) -> str:
        """As a shell would take it."""
        return " ".join(
            [*(f"{key}={shlex.quote(value)}" for key, value in self.environment.items()), shlex.join(self.words)]
        )


class OutputStream:
    """One of a process's outputs; every byte is copied to `log`, where there is one."""

    def __init__(self, pipe: BinaryIO, is_stderr: bool, log: BinaryIO | None) -> None:
        os.set_blocking(pipe.fileno(), False)
        self.fd = pipe.fileno()
        self.is_stderr = is_stderr
        self.lines = LineBuffer()
        self._pipe = pipe
        self._log = log

    def read(self) -> bytes | None:
        """What has come; b"" at the end of the stream, None where nothing has come so far."""
        data = self._pipe.read(_CHUNK)  # which has no buffer
        if data and self._log is not None:
            self._log.write(data)
        return data

    def close(self) -> None:
        """Give the pipe back."""
        self._pipe.close()
        if self._log is not None:
            self._log.close()


class Process:
    """A program that is started in a session of its own: a Ctrl-C of the terminal is for us, who hand it on.

    name: the host, or the program where that starts all hosts.
    status: its exit status as a shell says it, once it has ended.
    killed_by: the signal that ended it; None where none did.
    last_line: what it wrote last on stderr, but for torch's log.
    streams: its stdout and stderr; empty where it has ours.
    """

    def __init__(self, name: str, command: Command) -> None:
        self.name = name
        self.command = command
        self.status: int | None = None
        self.killed_by: int | None = None
        self.last_line = b""
        self.streams: list[OutputStream] = []
        self._killed = False
        self._heard = 0.0

    @property
    def pid(self) -> int:
        """Its process id, and that of its session and group."""
        return self._popen.pid

    def start(self) -> None:
        """Start it."""
        self._open(subprocess.PIPE if self.command.holds_stdin else subprocess.DEVNULL, subprocess.PIPE)
        if self._popen.stdin is not None:
            os.set_blocking(self._popen.stdin.fileno(), False)

    def _open(self, stdin: int | None, output: int | None, *logs: BinaryIO | None) -> None:
        try:
            self._popen = subprocess.Popen(
                self.command.words,
                stdin=stdin,
                stdout=output,
                stderr=output,
                bufsize=0,
                env={**os.environ, **self.command.environment},
                start_new_session=True,
            )
        except OSError as error:
            raise LaunchError(f"{self.name}: cannot start {self.command.words[0]!r}: {error.strerror}") from error
        if output is not None:
            out, err = logs or (None, None)
            self.streams = [OutputStream(self._popen.stdout, False, out), OutputStream(self._popen.stderr, True, err)]

    def write(self, line: bytes) -> None:
        """Write a short `line` to its stdin, if that is held: whole or, where nobody reads, not at all."""
        if self._popen.stdin is not None and not self._popen.stdin.closed:
            with contextlib.suppress(BrokenPipeError):
                self._popen.stdin.write(line)  # without a buffer: what does not fit is lost

    def close_stdin(self) -> None:
        """Let it see the end of its stdin."""
        if self._popen.stdin is not None:
            self._popen.stdin.close()

    def ask(self, number: int) -> None:
        """Ask it to end what it runs, as the signal `number` would."""
        self.close_stdin()

    def take_signal(self, number: int) -> bool:
        """Pass a signal on, if the process handles or ignores it: one that still begins would be ended by it."""
        with contextlib.suppress(OSError):  # no Linux
            masks = _TAKEN.findall(Path(f"/proc/{self.pid}/status").read_text())
            if not any(int(mask, 16) >> (number - 1) & 1 for mask in masks):
                return False
        self._send(number)
        return True

    def close(self) -> None:
        """End it, politely."""
        self.close_stdin()
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        """End it, and what has stayed in its group, in one stroke: a shell would go on to what it is to run next."""
        self._killed = True
        self._send(signal.SIGKILL, group=True)

    def _send(self, number: int, group: bool = False) -> None:
        if self._popen.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                (os.killpg if group else os.kill)(self.pid, number)

    def heard(self) -> None:
        """Something came from it just now."""
        self._heard = time.monotonic()

    def read(self, stream: OutputStream) -> bytes | None:
        """Whole lines of `stream`, one of its own; None at the end of the stream."""
        data = stream.read()
        if data:
            self.heard()
        if data == b"":
            return None
        return self._noted(stream, stream.lines.feed(data) if data else stream.lines.settle())

    def rest(self, stream: OutputStream) -> bytes:
        """What is left in `stream` of what it wrote before it ended, or before the stream did."""
        lines = b""
        for _ in range(_AT_ONCE):  # a process that it has left in the background may write without end
            if not (data := stream.read()):
                break
            lines += stream.lines.feed(data)
        return self._noted(stream, lines + stream.lines.end())

    def _noted(self, stream: OutputStream, lines: bytes) -> bytes:
        if stream.is_stderr and lines:
            for line in reversed(re.split(rb"[\r\n]+", lines[-_TAIL:])):
                if line.strip() and not _TORCH_LOG.match(line):
                    self.last_line = line.strip()
                    break
        return lines

    def ended(self) -> bool:
        """Whether it has ended; its status is known then."""
        if (code := self._popen.poll()) is None:
            return False
        if self.status is None:
            self.heard()
            self.killed_by = -code if code < 0 else None
            self.status = 128 - code if code < 0 else code
            self.close_stdin()
        return True

    @property
    def silent(self) -> bool:
        """Whether nothing more is to be waited for after its end.

        What it has left in the background, such as the shared connection of ssh's ControlPersist, may hold a pipe.
        """
        return self.status is not None and (self._killed or time.monotonic() > self._heard + _OPEN)
