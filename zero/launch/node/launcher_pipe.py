"""The stdin of a host's launcher that `zero run` has started from elsewhere: what is heard of the one who started it.

It brings the secrets of the job as its first line, and then lines with messages. On the first host, which decides for
all: that the launcher is there, every second; that it was stopped; that ssh has lost another host. On the others: that
it was stopped, for one that has not reached the first host yet. Its end says on every host that the launcher is gone.
"""

from __future__ import annotations

import json
import os
import select
import signal
import threading
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

from zero.launch.contract import SECRET_VARIABLE
from zero.launch.launch_messages import LaunchError

_CHUNK = 4096
_LINE = 1 << 16  # bytes within which the secrets end; a pipe takes as many at once
_PATIENCE = 60.0  # seconds for the launcher to hand it over


class LauncherPipe:
    """Hands on the messages that come by stdin, and adds SIGHUP to `signals` when the launcher is gone.

    It is gone at the end of stdin, and after `patience` seconds without a message. The ranks get an empty stdin.
    """

    def __init__(self, signals: list[int], handle: Callable[[dict[str, Any]], None], patience: float | None) -> None:
        self._signals = signals
        self._patience = patience
        self._handle = handle
        self._stdin = take_stdin()
        threading.Thread(target=self._run, name="zero-launcher-pipe", daemon=True).start()

    def _run(self) -> None:
        rest = b""
        while data := self._read():
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                self._handle(json.loads(line))
        self._signals.append(signal.SIGHUP)

    def _read(self) -> bytes:
        """What comes next; nothing where the launcher is gone."""
        ready, _, _ = select.select([self._stdin], [], [], self._patience)
        try:
            return os.read(self._stdin, _CHUNK) if ready else b""
        except OSError:
            return b""


def secret_of_job(by_stdin: bool, environment: MutableMapping[str, str]) -> str:
    """The secret that a launcher was given, by the first line of its stdin or a variable; "" where there is none.

    Other secrets of that line become variables; what follows it stays unread. Raises LaunchError where no line comes.
    """
    if not by_stdin:
        return environment.get(SECRET_VARIABLE, "")
    line = b""
    while len(line) < _LINE and select.select([0], [], [], _PATIENCE)[0] and (byte := os.read(0, 1)):
        if byte == b"\n":
            secrets = json.loads(line)
            secret = secrets.pop(SECRET_VARIABLE)
            environment.update(secrets)
            return secret
        line += byte
    raise LaunchError("the launcher that started this one did not hand over the secret of the job")


def first_of_tasks(environment: Mapping[str, str]) -> bool:
    """Whether this process is the one that srun or mpirun hands its stdin on to."""
    return "0" in (environment.get(name) for name in ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"))


def take_stdin() -> int:
    """Leave the ranks an empty stdin, and return the file number of what was there."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    try:
        stdin = os.dup(0)
    except OSError:  # it was closed
        stdin = os.dup(nothing)
    os.dup2(nothing, 0)
    if nothing:
        os.close(nothing)
    return stdin
