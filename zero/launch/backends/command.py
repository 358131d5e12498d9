"""A command line that starts processes of a job."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple


class Command(NamedTuple):
    """One program to start on this machine."""

    words: list[str]  # program and arguments; no shell looks at them
    node: int | None = None  # the host that it starts; None: all of them
    environment: Mapping[str, str] = MappingProxyType({})  # on top of the launcher's
    # Its stdin must be a pipe that stays open while the job is to run; where `heartbeat` says so, with the job's secret
    # as its first line and then a byte every second. It goes to the nodes, and they end with it.
    holds_stdin: bool = False
    heartbeat: bool = False

    def line(self) -> str:
        """As a shell would take it."""
        return " ".join(
            [*(f"{key}={shlex.quote(value)}" for key, value in self.environment.items()), shlex.join(self.words)]
        )
