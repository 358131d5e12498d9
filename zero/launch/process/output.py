"""The output of many processes on one stdout and one stderr, in whole lines."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import select
import sys
import threading
from collections.abc import Callable

from zero.launch.contract import CLOSED_PIPE, WRITE_ERROR

LONGEST = 16 * 1024 * 1024  # bytes of a line; a longer one goes on in pieces, so that memory has a bound
_WAITING = 64  # pieces that may wait for whoever reads our output, before we stop reading that of the processes
_TURN = 0.05  # seconds between two looks at whether all is written
_LINE = re.compile(rb"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")


class LineBuffer:
    """Makes whole lines of what comes in pieces.

    A line ends with a newline, or with the carriage return of a progress bar; the two in a row are one end.
    """

    def __init__(self) -> None:
        self._rest = bytearray()  # a long line comes in many pieces

    def feed(self, data: bytes) -> bytes:
        """The lines that are whole now that `data` has come."""
        done = b""
        if self._rest.endswith(b"\r") and data[:1] not in (b"", b"\n"):
            done = self._take()
        # A carriage return at the very end: the newline that belongs to it may be on its way.
        end = max(data.rfind(b"\n"), data.rfind(b"\r", 0, len(data) - 1)) + 1
        if end:
            done += self._take() + data[:end]
        self._rest += data[end:]
        return done + self._take() if len(self._rest) > LONGEST else done

    def settle(self) -> bytes:
        """What is whole because nothing came for a while: a line with a carriage return at its end."""
        return self._take() if self._rest.endswith(b"\r") else b""

    def end(self) -> bytes:
        """The last line, with a newline where it had no end: the next line on the screen is another process's."""
        done = self._take()
        return done + b"\n" if done and not done.endswith((b"\n", b"\r")) else done

    def _take(self) -> bytes:
        done = bytes(self._rest)
        self._rest.clear()
        return done


def prefixed(prefix: bytes, lines: bytes) -> bytes:
    """`lines` with `prefix` in front of each."""
    return b"".join(prefix + line for line in _LINE.findall(lines))


class _OutputWriter:
    """A thread that writes one file descriptor: whoever does not read must not keep the rest waiting.

    error: why nothing can be written any more; what comes then is dropped.
    """

    def __init__(self, fd: int | None) -> None:
        self.error: OSError | None = None
        self.queue: queue.Queue[bytes | None] = queue.Queue()  # None: nothing more comes
        self._fd = fd
        self.thread = threading.Thread(target=self._run, name="zero-output", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while (data := self.queue.get()) is not None:
            if self._fd is None or self.error is not None:
                continue
            try:
                _write(self._fd, data)
            except OSError as error:
                self.error = error


class OutputPump:
    """Our stdout and stderr. Where both are the same file, one thread writes them, so that lines stay whole."""

    def __init__(self) -> None:
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or not there
            sys.stdout.flush()
        out, err = _usable(1), _usable(2)
        self._out = _OutputWriter(out)
        same = out is not None and err is not None and os.path.samestat(os.fstat(out), os.fstat(err))
        self._err = self._out if same else _OutputWriter(err)

    def put(self, to_stderr: bool, data: bytes) -> None:
        """Whole lines, to be written in one piece after what was put before; from any thread."""
        (self._err if to_stderr else self._out).queue.put(data)

    @property
    def full(self) -> bool:
        """Whether so much waits for a slow reader that no more should be put."""
        return any(writer.queue.qsize() >= _WAITING for writer in (self._out, self._err))

    @property
    def error(self) -> tuple[str, OSError] | None:
        """Which of the two cannot be written any more, and why."""
        errors = [(name, writer.error) for name, writer in (("stdout", self._out), ("stderr", self._err))]
        return next(((name, error) for name, error in errors if error is not None), None)

    @property
    def status(self) -> int:
        """0; where somebody has stopped reading or a write failed, the exit status that follows."""
        if self.error is None:
            return 0
        return CLOSED_PIPE if isinstance(self.error[1], BrokenPipeError) else WRITE_ERROR

    def finish(self, stopped: Callable[[], object], seconds: float = 2.0) -> None:
        """Wait until all is written: as long as a slow reader likes, but for `seconds` only while `stopped` holds."""
        for writer in {self._out, self._err}:
            writer.queue.put(None)
            while writer.thread.is_alive() and seconds > 0:
                writer.thread.join(_TURN)
                seconds -= _TURN if stopped() else 0


def _usable(fd: int) -> int | None:
    try:
        os.fstat(fd)
    except OSError:  # closed by who started us
        return None
    return fd


def _write(fd: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        try:
            left = left[os.write(fd, left) :]
        except BlockingIOError:  # somebody who shares our terminal has set it so
            select.select([], [fd], [], 1)
