"""The ranks of one host in one attempt: their processes, environment, output and end."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from zero.launch.contract import LOST
from zero.launch.node.client import Attempt, RendezvousClient
from zero.launch.node.one_host import OneHost
from zero.launch.node.outcome import Failure
from zero.launch.process.descendants import Descendants
from zero.launch.process.group import ProcessGroup
from zero.launch.process.output import OutputPump, prefixed
from zero.launch.process.process import Command, Process

_PATIENCE = 3.0  # seconds for the ranks to end when they are asked to; the group kills them one second later
_PATIENCE_CUT_OFF = 0.5  # the same for a host that was out of touch for a while before it knew
_TORCH_PREFIX = re.compile(rb"^\[rank\d+\]: ?")
_LONGEST = 1000  # characters of a message

Rendezvous = RendezvousClient | OneHost


class Rank(Process):
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
        self._open(None, subprocess.PIPE if self._captured else None, {})
        if self._captured:
            files = [self._folder / f"{name}.log" for name in ("stdout", "stderr")]
            self._stream([file.open("wb", buffering=0) if self.log else None for file in files])

    def ask(self, number: int) -> None:
        """Send its group the signal."""
        self._send(number, group=True)

    def close(self) -> None:
        """Nothing: it was asked, and is killed next."""

    def failure(self, node: int, host: str | None) -> Failure:
        """What is known of its end, which was not a good one."""
        code = self.status if self.killed_by is None else -self.killed_by
        message = _recorded(self._folder / "error.json")
        if message is None and self.last_line:
            message = _TORCH_PREFIX.sub(b"", self.last_line).decode(errors="replace")[:_LONGEST]
        return Failure(self.rank, code, self.pid, node, host, message, str(self.log) if self.log else None)


class RankGroup(ProcessGroup):
    """The ranks of this host in one attempt, which ends as the rendezvous decides for all hosts.

    stop: called with the first signal that comes, to tell the other hosts.
    """

    def __init__(
        self,
        ranks: Sequence[Rank],
        rendezvous: Rendezvous,
        outputs: OutputPump | None,
        signals: list[int],
        descendants: Descendants,
        stop: Callable[[int], None],
    ) -> None:
        super().__init__(ranks, outputs, signals, descendants)
        self._rendezvous = rendezvous
        self._stop = stop
        self._ending = False
        self._failed = False
        self._left = len(ranks)
        host = rendezvous.host
        self._prefixes = {rank: f"[{f'{host} ' if host else ''}{rank.name}]: ".encode() for rank in ranks}

    @property
    def patience(self) -> float:
        """Seconds between asking the ranks to end and ending them."""
        outcome = self._rendezvous.outcome
        cut_off = self.stopped_by == signal.SIGHUP or (outcome is not None and outcome.status == LOST)
        return _PATIENCE_CUT_OFF if cut_off else _PATIENCE

    def received(self, process: Process, is_stderr: bool, lines: bytes) -> None:
        """Hand it on, line by line. A progress bar's line ends here: another rank's may be the next on the screen."""
        plain = lines.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        self.outputs.put(is_stderr, prefixed(self._prefixes[process], plain))

    def ended(self, process: Process) -> None:
        """Tell of a rank that failed, or that all have succeeded."""
        self._left -= 1
        if process.status and not self._ending:
            self._failed = True
            self._rendezvous.failed([process.failure(self._rendezvous.node, self._rendezvous.host)])
        elif not self._left and not self._failed:
            self._rendezvous.done()

    def tick(self) -> None:
        """A signal, or what the rendezvous has decided, ends the ranks."""
        if self._ending:
            return
        if self.stopped_by is not None:  # the group has begun to end
            self._ending = True
            self._stop(self.stopped_by)
        elif self._rendezvous.outcome is not None:
            self._ending = True
            self.end()

    def finished(self) -> bool:
        """Whether it is decided how the attempt ends."""
        return self._ending or self._rendezvous.over


def environment(
    attempt: Attempt, local: int, run_id: str, restarts: int, max_restarts: int, folder: Path
) -> dict[str, str]:
    """What tells a rank who it is; the variables of torchrun, so that scripts and torch find what they expect."""
    rank = attempt.world.ranks(attempt.node)[local]
    size = str(attempt.world.size)
    return {
        **attempt.world.environment(rank, attempt.master_addr, attempt.master_port),
        "GROUP_RANK": str(attempt.node),
        "GROUP_WORLD_SIZE": str(len(attempt.world.hosts)),
        "ROLE_NAME": "rank",
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": size,
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_RESTART_COUNT": str(restarts),
        "TORCHELASTIC_MAX_RESTARTS": str(max_restarts),
        # Rank 0 has the store, and not this process: with gloo a restart would read the addresses of dead ranks there.
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCHELASTIC_ERROR_FILE": str(folder / "error.json"),  # of torch.distributed.elastic's `record`
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }


def _recorded(file: Path) -> str | None:
    """The last line that a rank has written by torch.distributed.elastic's `record`; None where it wrote nothing."""
    try:
        message = json.loads(file.read_text())["message"]
        text = message["message"] if isinstance(message, Mapping) else message
    except (OSError, ValueError, KeyError, TypeError):
        return None
    lines = str(text).strip().splitlines()
    return lines[-1] if lines else None
