"""What the ranks write, line by line, with the name of the rank in front, and to files where that was asked for."""

from __future__ import annotations

import contextlib
import os
import re
import select
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO, NamedTuple

_CHUNK = 1 << 16
_MOST = 1 << 20  # bytes of one line; a longer one is cut
_TICK = 50  # milliseconds
_AT_ONCE = 16  # chunks of one stream, so that a rank that writes without end leaves the others their turn
_PATIENCE = 2.0  # seconds for a reader of ours that does not read
_END = re.compile(rb"[\r\n]")
# Of torch's own log, which goes on after the exception that ended the rank.
_LOG = re.compile(rb"(\[rank\d+\]:)?\[?[IWE]\d{4} ")
_RANK = re.compile(rb"^\[rank\d+\]: ?")


class _Stream(NamedTuple):
    pipe: int
    to: int  # 1 or 2
    prefix: bytes
    local: int
    log: BinaryIO | None


class Output:
    """Pipes with names, one per rank and stream, and a thread that reads them.

    A pipe and not a file that is read while it grows: a line comes whole, at once, and nothing fills the disk.

    Attributes:
        logs: by local rank, the file that its stderr goes to, where there is one.
    """

    def __init__(self, folder: str, prefix: Callable[[int], str]) -> None:
        self.logs: dict[int, str] = {}
        self._folder = folder
        self._prefix = prefix
        self._opened = 0
        self._lock = threading.Lock()
        self._streams: list[_Stream] = []
        self._rest: dict[int, bytes] = {}
        self._last: dict[int, bytes] = {}
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None

    def open(self, ranks: Mapping[int, int], logs: Mapping[int, str]) -> dict[int, tuple[str, str]]:
        """The paths for stdout and stderr, by local rank, as `ranks` are; `logs`: a folder for each, or none."""
        self.finish()
        self._opened += 1
        self.logs, self._last, self._rest, self._streams = {}, {}, {}, []
        found: dict[int, tuple[str, str]] = {}
        for local, rank in ranks.items():
            paths = []
            for to, name in ((1, "stdout"), (2, "stderr")):
                path = os.path.join(self._folder, f"{self._opened}-{local}-{name}")
                os.mkfifo(path, 0o600)
                log = None
                if local in logs:
                    file = Path(logs[local], f"{name}.log")
                    log = file.open("wb", buffering=0)
                    if to == 2:
                        self.logs[local] = str(file)
                # For writing, too: so it neither waits for a writer nor ends with the first.
                pipe = os.open(path, os.O_RDWR | os.O_NONBLOCK)
                self._streams.append(_Stream(pipe, to, self._prefix(rank).encode(), local, log))
                paths.append(path)
            found[local] = (paths[0], paths[1])
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="zero-output", daemon=True)
        self._thread.start()
        return found

    def last_line(self, local: int) -> str | None:
        """The last line that the local rank has written to stderr and that is not blank; None where it wrote none."""
        # The thread may wait for somebody who does not read; nothing here may.
        if self._lock.acquire(timeout=_PATIENCE):
            try:
                self._drain()
                for stream in self._streams:
                    if (stream.local, stream.to) == (local, 2):
                        self._remember(local, self._rest.get(stream.pipe, b""))
            finally:
                self._lock.release()
        line = self._last.get(local)
        return None if line is None else line.decode(errors="replace")

    def finish(self, patience: float = _PATIENCE) -> None:
        """Write what the ranks of an attempt, which have ended, have left in the pipes; at most `patience` seconds."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._ending.set()
        thread.join(patience)

    def _run(self) -> None:
        streams, ending = self._streams, self._ending
        poll = select.poll()
        for stream in streams:
            poll.register(stream.pipe, select.POLLIN)
        while not ending.is_set():
            poll.poll(_TICK)
            with self._lock:
                self._drain()
        with self._lock:
            self._drain()
            for stream in streams:
                if rest := self._rest.pop(stream.pipe, b""):
                    self._line(stream, rest)
                os.close(stream.pipe)
                if stream.log is not None:
                    stream.log.close()

    def _drain(self) -> None:
        for stream in self._streams:
            with contextlib.suppress(OSError):  # which is what an empty pipe raises, too
                for _ in range(_AT_ONCE):
                    self._take(stream, os.read(stream.pipe, _CHUNK))

    def _take(self, stream: _Stream, chunk: bytes) -> None:
        if stream.log is not None:
            stream.log.write(chunk)
        # A progress bar goes back to the start of its line instead of ending it.
        *lines, rest = _END.split(self._rest.get(stream.pipe, b"") + chunk.replace(b"\r\n", b"\n"))
        if len(rest) > _MOST:
            lines, rest = [*lines, rest], b""
        self._rest[stream.pipe] = rest
        for line in lines:
            self._line(stream, line)

    def _line(self, stream: _Stream, line: bytes) -> None:
        if stream.to == 2:
            self._remember(stream.local, line)
        _write(stream.to, stream.prefix + line + b"\n")

    def _remember(self, local: int, line: bytes) -> None:
        plain = _RANK.sub(b"", line).strip()
        if plain and not _LOG.match(line):
            self._last[local] = plain[:1000]


def _write(to: int, data: bytes) -> None:
    """Write `data` to the file number `to`; nothing where nobody reads any more."""
    while data:
        try:
            data = data[os.write(to, data) :]
        except BlockingIOError:
            time.sleep(0.01)
        except OSError:
            return
