"""The process of one rank: its environment, its files, and what is known of its end."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

from zero.launch.contract import INITIALIZED
from zero.launch.node.attempt_end import Failure
from zero.launch.node.rendezvous_client import Attempt
from zero.launch.process.process import Command, Process

_TORCH_PREFIX = re.compile(rb"^\[rank\d+\]: ?")
_LONGEST = 1000  # characters of a message


class RankProcess(Process):
    """One rank. It gets the signals that the launcher gets, with all of its group, and then SIGKILL.

    folder: for its error file and, where `logged`, for its output, too.
    """

    def __init__(self, rank: int, command: Command, folder: Path, captured: bool, logged: bool) -> None:
        super().__init__(f"rank {rank}", command)
        self.rank = rank
        self._folder = folder
        self._captured = captured
        self.log = folder / "stderr.log" if logged else None

    def start(self) -> None:
        """Start it; its stdin is ours, and so is its output where it is not captured."""
        self._folder.mkdir(parents=True)
        files = [self._folder / f"{name}.log" for name in ("stdout", "stderr")] if self.log else []
        logs = [file.open("wb", buffering=0) for file in files]
        self._open(None, subprocess.PIPE if self._captured else None, *logs)

    def ask(self, number: int) -> None:
        """Send its group the signal."""
        self._send(number, group=True)

    @property
    def initialized(self) -> bool:
        """Whether it, or what it has started, called `zero.initialize`."""
        return (self._folder / INITIALIZED).exists()

    def close(self) -> None:
        """Nothing: it was asked, and is killed next."""

    def failure(self, node: int, host: str | None) -> Failure:
        """What is known of its end, which was not a good one."""
        code = self.status if self.killed_by is None else -self.killed_by
        message, alike = _recorded(self._folder / "error.json")
        if message is None and self.last_line:
            message = _TORCH_PREFIX.sub(b"", self.last_line).decode(errors="replace")[:_LONGEST]
        if alike is not None and host is None:
            message = None  # it is the last thing on the screen
        log = str(self.log) if self.log else None
        return Failure(self.rank, code, self.pid, node, host, message, log, bool(alike))


def environment(attempt: Attempt, local: int, run_id: str, max_restarts: int, folder: Path) -> dict[str, str]:
    """What tells a rank who it is; the variables of torchrun, so that scripts and torch find what they expect."""
    torchrun = attempt.world.environment(attempt.node, local, attempt.master_addr, attempt.master_port)
    return {
        **torchrun,
        "GROUP_RANK": str(attempt.node),
        "NODE_RANK": str(attempt.node),  # not torchrun's; Lightning and others take the host's number from it
        "GROUP_WORLD_SIZE": str(len(attempt.world.hosts)),
        "ROLE_NAME": "rank",
        "ROLE_RANK": torchrun["RANK"],
        "ROLE_WORLD_SIZE": torchrun["WORLD_SIZE"],
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_RESTART_COUNT": str(attempt.number),
        "TORCHELASTIC_MAX_RESTARTS": str(max_restarts),
        # Rank 0 has the store, and not this process: with gloo a restart would read the addresses of dead ranks there.
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCHELASTIC_ERROR_FILE": str(folder / "error.json"),  # of torch.distributed.elastic's `record`
        INITIALIZED: str(folder / INITIALIZED),
        # What torch's C++ warns of is for its developers, such as the frames in which a rank lost the store.
        "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }


def _recorded(file: Path) -> tuple[str | None, bool | None]:
    """The last line of a rank's error in its file, and whether all ranks of this host end of that.

    The file is there by zero.errors, which has printed it; or by torch.distributed.elastic's `record`, where the second
    is None; (None, None) where it is not.
    """
    try:
        record = json.loads(file.read_text())
        message = record["message"]
        text = message["message"] if isinstance(message, Mapping) else message
    except (OSError, ValueError, KeyError, TypeError):
        return None, None
    lines = str(text).strip().splitlines()
    return lines[-1] if lines else None, record.get("alike")
