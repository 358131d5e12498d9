"""Runs of a script under other configurations, one after the other, for `zero check` and `zero tune`."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType

from zero.errors import VARIABLE as ERROR_FILE
from zero.launch.args.scripts import ScriptRequest
from zero.launch.hosts.addresses import free_port
from zero.launch.node.attempt_end import signal_name
from zero.tools import script_rank

_START = 300.0  # seconds for the ranks to import torch and zero
_PATIENCE = 3.0  # seconds for a run to end when it is asked to
_GRACE = 20.0  # seconds for the launcher to end its ranks
_POLL = 0.1


class ScriptRuns:
    """One launcher, whose ranks stay and fork a process each for every run; see `script_rank`.

    folder: for its socket and its output.
    """

    def __init__(self, request: ScriptRequest, folder: Path) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.settimeout(_POLL)
        self._listener.bind(str(folder / "ranks"))
        self._listener.listen(4096)
        self._said = folder / "launcher.txt"
        self._ranks: dict[Connection, int] = {}
        with self._said.open("wb") as output:
            self._launcher = subprocess.Popen(
                [sys.executable, "-m", "zero", *request.command(script_rank.__file__)],
                env={**os.environ, script_rank.VARIABLE: str(folder / "ranks")},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                # A session of its own, so that Ctrl-C comes here first and the launcher is asked to end once.
                start_new_session=True,
            )

    def __enter__(self) -> ScriptRuns:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """End the ranks, and what runs in them, and the launcher."""
        self._listener.close()
        met, self._ranks = self._ranks, {}
        for connection in met:
            connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._launcher.wait(_PATIENCE if met else 0)
        if self._launcher.poll() is None:
            self._launcher.terminate()
        try:
            self._launcher.wait(_GRACE)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._launcher.pid, signal.SIGKILL)
            self._launcher.wait()

    def run(self, variables: Mapping[str, str], folder: Path, timeout: float) -> tuple[int | None, str]:
        """Run the script with these variables: the exit status, None when the time was over, and all it printed.

        folder: for its output and the errors of its ranks; timeout: seconds.
        """
        if not self.met():
            return self._launcher.poll() or 1, self._said.read_text(errors="replace")
        output = folder / "output.txt"
        output.touch()
        shared = {**variables, "MASTER_PORT": str(free_port())}
        for connection, rank in self._ranks.items():
            own = folder / str(rank) / "error.json"
            own.parent.mkdir()
            with contextlib.suppress(OSError):  # one that has died says so below
                connection.send(({**shared, ERROR_FILE: str(own)}, str(output)))
        status, killed = self._status(timeout)
        return status, "\n".join(filter(None, [output.read_text(errors="replace"), killed]))

    def met(self) -> bool:
        """Wait for the ranks to be ready; whether they are."""
        end, world = time.monotonic() + _START, 0
        while self._launcher.poll() is None and time.monotonic() < end:
            if self._ranks and len(self._ranks) >= world:
                return True
            with contextlib.suppress(TimeoutError, EOFError):
                connection = Connection(self._listener.accept()[0].detach())
                self._ranks[connection], world = connection.recv()
        return False

    def _status(self, timeout: float) -> tuple[int | None, str]:
        """The exit status of the first rank that fails, None where the time is over first, and what killed it.

        The other ranks are ended with it.
        """
        running = set(self._ranks)
        rank, status = self._ended(running, timeout) or (0, None if running else 0)
        for number, seconds in ((signal.SIGTERM, _PATIENCE), (signal.SIGKILL, _GRACE)):
            for connection in running:
                with contextlib.suppress(OSError):
                    connection.send(int(number))
            end = time.monotonic() + seconds
            while running and time.monotonic() < end:
                self._ended(running, end - time.monotonic())
        return status, f"rank {rank} was ended by {signal_name(status - 128)}" if status and status > 128 else ""

    def _ended(self, running: set[Connection], seconds: float) -> tuple[int, int] | None:
        """Wait until one of these ranks fails: it and its exit status; those that have ended leave the set."""
        end = time.monotonic() + seconds
        while running and (found := wait(running, max(0.0, end - time.monotonic()))):
            for connection in found:
                running.discard(connection)
                try:
                    status = connection.recv()
                except (EOFError, OSError):  # the process of the rank itself is dead, and the launcher ends the others
                    status = 1
                if status:
                    return self._ranks[connection], status
        return None


def why_not(folder: Path, wanted: int, status: int | None, limit: str) -> str:
    """Why a run has nothing to show, of which so many steps were wanted; `limit`: seconds, and where they come from."""
    if status is None:
        return f"not done after {limit}"
    if status != 0:
        return f"exit status {status}"
    steps = folder / "steps.txt"
    if not steps.exists():
        return "the script ended without a call of zero.initialize"
    return f"the script ended after {steps.read_text()} of {wanted} optimizer steps; --steps says how many are wanted"
