"""The output of many programs on one stdout and one stderr, in whole lines."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import select
import sys
import threading

LONGEST = 16 * 1024 * 1024  # bytes of a line; a longer one goes on in pieces, so that memory has a bound
_WAITING = 64  # pieces that may wait for whoever reads our output, before we stop reading that of the programs
_LINE = re.compile(rb"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")


class Lines:
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
        """The last line, with a newline where it had no end: the next line on the screen is another program's."""
        done = self._take()
        return done + b"\n" if done and not done.endswith((b"\n", b"\r")) else done

    def _take(self) -> bytes:
        done = bytes(self._rest)
        self._rest.clear()
        return done


def prefixed(mark: bytes, lines: bytes) -> bytes:
    """`lines` with `mark` in front of each."""
    return b"".join(mark + line for line in _LINE.findall(lines))


class Outlet:
    """One file descriptor, written by a thread of its own: whoever does not read must not keep the rest waiting.

    Attributes:
        error: why nothing can be written any more; what comes then is dropped.
    """

    def __init__(self, fd: int | None) -> None:
        self.error: OSError | None = None
        self._fd = fd
        self._queue: queue.Queue[bytes | None] = queue.Queue()
        self._thread = threading.Thread(target=self._run, name="zero-output", daemon=True)
        self._thread.start()

    def put(self, data: bytes) -> None:
        """Write `data` once all that was put before is written; nothing else that is put here comes into it."""
        self._queue.put(data)

    @property
    def full(self) -> bool:
        """Whether so much waits that no more should be put."""
        return self._queue.qsize() >= _WAITING

    def finish(self) -> None:
        """Nothing more comes."""
        self._queue.put(None)

    def done(self, seconds: float) -> bool:
        """Whether all is written after `finish`; wait for it for `seconds`."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (data := self._queue.get()) is not None:
            if self._fd is None or self.error is not None:
                continue
            try:
                _write(self._fd, data)
            except OSError as error:
                self.error = error


class Outputs:
    """Our stdout and stderr. Where both are the same file, one thread writes them, so that lines stay whole."""

    def __init__(self) -> None:
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or not there
            sys.stdout.flush()
        out, err = _usable(1), _usable(2)
        self._out = Outlet(out)
        same = out is not None and err is not None and os.path.samestat(os.fstat(out), os.fstat(err))
        self._err = self._out if same else Outlet(err)

    def put(self, to_stderr: bool, data: bytes) -> None:
        """Whole lines, written at once."""
        (self._err if to_stderr else self._out).put(data)

    @property
    def full(self) -> bool:
        """Whether somebody who reads slowly should be waited for."""
        return self._out.full or self._err.full

    @property
    def error(self) -> tuple[str, OSError] | None:
        """Which of the two cannot be written any more, and why."""
        found = [(name, outlet.error) for name, outlet in (("stdout", self._out), ("stderr", self._err))]
        return next(((name, error) for name, error in found if error is not None), None)

    def finish(self) -> None:
        """Nothing more comes."""
        for outlet in {self._out, self._err}:
            outlet.finish()

    def done(self, seconds: float) -> bool:
        """Whether all is written after `finish`; wait for it for `seconds`."""
        return all(outlet.done(seconds) for outlet in {self._out, self._err})


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
