"""`zero run` and `zero check` without the seconds in which they import torch: forked from a process that has it.

Only the start differs from `python -m zero run`: what is forked has a folder, an environment, a stdin, a stdout and a
stderr of its own, runs the same `main` with the words of a command line, and takes signals and ends as a process does.
Its ranks are programs like any others. Tests that are about the start itself take `sys.executable -m zero`.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

ROOT = Path(__file__).parent.parent
SECONDS = 240.0  # that no launcher of these tests takes, unless it hangs
_MOST = 1 << 18  # bytes of a request, most of which is the environment
_POLL = 0.02
_ALONE = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}  # who forks has no threads


class Launched:
    """A launcher that was started; to be asked like a `subprocess.Popen` whose output is text.

    Attributes:
        returncode: the exit status, or minus the number of the signal that killed it; None as long as it runs.
        stdin: what it reads, where there is something; it is closed by the end of the `with` statement or `wait`.
    """

    def __init__(self, pid: int, said: int, out: IO[bytes], err: IO[bytes], stdin: IO[bytes] | None) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.stdin = stdin
        self._said = said
        self._out = out
        self._err = err

    def __enter__(self) -> Launched:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Kill it if it still runs, and give back all that it needed here."""
        self.kill()
        self.wait()
        for file in filter(None, (self._out, self._err, self.stdin)):
            file.close()
        if self._said >= 0:
            os.close(self._said)
            self._said = -1

    def poll(self) -> int | None:
        """The exit status; None as long as it runs."""
        if self.returncode is None and select.select([self._said], [], [], 0)[0]:
            text = os.read(self._said, 64)
            if not text:
                raise RuntimeError("the process that starts launchers has ended; its stderr says why")
            self.returncode = int(text)
        return self.returncode

    def wait(self, timeout: float = SECONDS) -> int:
        """The exit status, as soon as it has ended; raises subprocess.TimeoutExpired after `timeout` seconds."""
        if self.returncode is None:
            select.select([self._said], [], [], timeout)
        status = self.poll()
        if status is None:
            raise subprocess.TimeoutExpired("zero", timeout, *(text.encode() for text in self.texts()))
        return status

    def communicate(self, timeout: float = SECONDS) -> tuple[str, str]:
        """Close its stdin and wait for its end; what it wrote to stdout and to stderr."""
        if self.stdin is not None:
            self.stdin.close()
        self.wait(timeout)
        return self.texts()

    def texts(self) -> tuple[str, str]:
        """What it has written so far to stdout and to stderr."""
        sizes = (os.fstat(file.fileno()).st_size for file in (self._out, self._err))
        # By position: the launcher and its ranks write where the file's own place is.
        found = [os.pread(file.fileno(), size, 0) for file, size in zip((self._out, self._err), sizes, strict=True)]
        return found[0].decode(errors="replace"), found[1].decode(errors="replace")

    def send_signal(self, number: int) -> None:
        """Send it a signal, if it still runs."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it, if it still runs."""
        self.send_signal(signal.SIGKILL)


class Launchers:
    """Starts launchers, from a process with torch that begins with the first of them and ends with this one."""

    def __init__(self) -> None:
        self._server: subprocess.Popen | None = None
        self._connection: socket.socket | None = None

    def start(
        self,
        *words: str,
        environment: Mapping[str, str],
        folder: Path | None = None,
        stdin: bool = False,
        ignored: Sequence[int] = (),
    ) -> Launched:
        """Start `zero` with these words, in `folder`; `stdin`: something is to be written there, or it to be held.

        ignored: signals that it is started with so, as by nohup.
        """
        if self._connection is None:
            self._begin()
        request = {"words": words, "environment": dict(environment), "folder": str(folder or Path.cwd())}
        request["ignored"] = list(map(int, ignored))
        out, err = (tempfile.TemporaryFile() for _ in range(2))  # noqa: SIM115 - `Launched` closes them
        there, here = os.pipe() if stdin else (os.open(os.devnull, os.O_RDONLY), None)
        said, says = os.pipe()
        socket.send_fds(self._connection, [json.dumps(request).encode()], [there, out.fileno(), err.fileno(), says])
        os.close(there)
        os.close(says)
        if not select.select([said], [], [], SECONDS)[0] or not (pid := os.read(said, 8)):
            raise RuntimeError("the process that starts launchers does not answer; its stderr says why")
        return Launched(int(pid), said, out, err, None if here is None else os.fdopen(here, "wb", buffering=0))

    def run(
        self, *words: str, environment: Mapping[str, str], folder: Path | None = None, seconds: float = SECONDS
    ) -> subprocess.CompletedProcess[str]:
        """As `start`, and its end."""
        with self.start(*words, environment=environment, folder=folder) as process:
            said = process.communicate(seconds)
            return subprocess.CompletedProcess(words, process.returncode, *said)

    def close(self) -> None:
        """No launcher is started any more."""
        if self._connection is not None and self._server is not None:
            self._connection.close()
            self._server.wait(60)

    def _begin(self) -> None:
        self._connection, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        self._server = subprocess.Popen(
            [sys.executable, __file__, str(there.fileno())],
            env={**os.environ, **_ALONE, "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            pass_fds=[there.fileno()],
        )
        there.close()


def _serve(connection: socket.socket) -> None:
    """Fork a launcher for each request, and tell the end of each, until there is nobody to ask any more."""
    running: dict[int, int] = {}
    while True:
        if select.select([connection], [], [], _POLL if running else None)[0]:
            data, handles, _, _ = socket.recv_fds(connection, _MOST, 4)
            if not data:
                return
            *streams, says = handles
            if not (pid := os.fork()):
                for other in (connection.detach(), says, *running.values()):
                    os.close(other)
                _become(json.loads(data), streams)
            for stream in streams:
                os.close(stream)
            os.write(says, f"{pid:8}".encode())
            running[pid] = says
        for pid in list(running):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                with contextlib.suppress(BrokenPipeError):
                    os.write(running[pid], str(os.waitstatus_to_exitcode(status)).encode())
                os.close(running.pop(pid))


def _become(request: dict[str, Any], streams: list[int]) -> None:
    """Be the launcher that was asked for; does not return."""
    status: Any = 1
    try:
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        os.chdir(request["folder"])
        os.environ.clear()
        os.environ.update(request["environment"])
        for number in request["ignored"]:
            signal.signal(number, signal.SIG_IGN)
        tempfile.tempdir = None  # whoever has asked for it, before it was ours
        sys.argv = ["zero", *request["words"]]
        status = main(sys.argv[1:])
    except SystemExit as error:
        status = error.code
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status if isinstance(status, int) else 0 if status is None else 1)


if __name__ == "__main__":
    import psutil  # noqa: F401 - as all of these, so that no launcher has to
    import torch  # noqa: F401

    from zero.__main__ import main
    from zero.launch import start  # noqa: F401
    from zero.tools import check  # noqa: F401

    gc.freeze()  # pages that no launcher writes to need no copy
    _serve(socket.socket(fileno=int(sys.argv[1])))
