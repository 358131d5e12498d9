"""The launcher's side of a job on several hosts: it starts the nodes, hands on what they say, ends them together."""

from __future__ import annotations

import re
import shutil
import signal
from collections.abc import Sequence
from secrets import token_hex

from zero.launch import backends
from zero.launch.contract import CLOSED_PIPE, LOST, NO_CONNECTION
from zero.launch.job import Job
from zero.launch.messages import LaunchError
from zero.launch.process.descendants import Descendants
from zero.launch.process.group import ProcessGroup
from zero.launch.process.output import OutputPump
from zero.launch.process.process import Process

_LOST_LEISURE = 0.5  # ssh has taken up to 8 s to find out
_GRACE = 3  # seconds between asking what mpirun, say, has left here to end, and killing it
_OF_NODES = (b"zero run: ", b"[")  # how every line of a node and of its ranks begins; all others are ssh's
_LOST_LINE = re.compile(rb"zero run: host (\S+) is lost\b[^\n]*\n")  # the first host's, when it notices sooner than ssh
_MISSING = {
    "ssh": "install OpenSSH's client, or start zero run with --no_ssh and --node_rank on each host",
    "pdsh": "install pdsh, or leave out --launcher pdsh: the default needs plain ssh only",
    "slurm": "run this on a machine of a Slurm cluster, or leave out --launcher slurm",
    "openmpi": "install Open MPI, or leave out --launcher openmpi",
    "mpich": "install MPICH, or leave out --launcher mpich",
}


def run(job: Job) -> int:
    """Start `job` on its hosts and return its exit status: that of the first node that failed, or 128 + signal."""
    launcher = job.request.hosts.launcher
    job_secret = token_hex()
    processes = [
        Process(launcher if command.node is None else job.world.hosts[command.node].name, command, job_secret)
        for command in backends.commands(job)
    ]
    require(processes[0].command.words[0], launcher)
    # Whatever mpirun, say, has started on this machine would outlive it. An ssh leaves nothing, unless the user
    # wants it to: a connection that other commands share.
    descendants = None if launcher == "ssh" else Descendants(adopt=True)
    group = NodeGroup(processes, job.request.min_nodes, descendants)
    group.run()
    if descendants is not None and group.status:
        descendants.end(_GRACE)
    return group.status


def require(program: str, launcher: str) -> None:
    """Raise `LaunchError` when there is no `program`, which `launcher` needs."""
    if shutil.which(program) is None:
        raise LaunchError(f"--launcher {launcher}: there is no program {program!r}; {_MISSING[launcher]}")


def reason_of_ssh(process: Process) -> str | None:
    """What ssh said when it had no connection, or lost it; None where the status is that of what ran there."""
    if process.killed_by is not None:
        return f"ssh was killed by {signal.Signals(process.killed_by).name}"
    # A script may end with 255, too; then its node has said so, or the node of another host has.
    if process.status != NO_CONNECTION or not process.last_line or process.last_line.startswith(_OF_NODES):
        return None
    return "ssh: " + process.last_line.decode(errors="replace").removeprefix("ssh: ")


class NodeGroup(ProcessGroup):
    """The nodes of one job, or the program that starts them.

    When one fails, the others have `leisure` seconds to end by themselves: they hear of it from the first host.

    Attributes:
        status: the exit status of the job; that of the first cause of its end.
    """

    leisure = 5.0

    def __init__(
        self, processes: Sequence[Process], min_nodes: int | None = None, descendants: Descendants | None = None
    ) -> None:
        super().__init__(processes, OutputPump(), descendants=descendants)
        self.status = 0
        self._least = len(processes) if min_nodes is None else min_nodes
        self._left = len(processes)
        self._ending = False
        self._named: set[str] = set()  # the lost hosts that were named, here or by the first host

    def received(self, process: Process, is_stderr: bool, lines: bytes) -> None:
        """Hand on what a node wrote, but for a host's loss that ended the job and was named already."""
        self.outputs.put(is_stderr, _LOST_LINE.sub(self._unless_named, lines) if is_stderr else lines)

    def _unless_named(self, line: re.Match[bytes]) -> bytes:
        name = line[1].decode(errors="replace")
        again = name in self._named
        self._named.add(name)
        return b"" if again and self._ending else line[0]

    def _say_lost(self, name: str, why: str) -> None:
        if name not in self._named:
            self._named.add(name)
            self.say(f"host {name}: lost ({why})")

    def ended(self, process: Process) -> None:
        """A node has ended; the first that did not end well ends the job, unless it can go on without."""
        if not process.status:
            return
        node = process.command.node
        lost = reason_of_ssh(process) if process.command.heartbeat else None
        if self._ending:
            # The other hosts may have missed the first one before ssh did; no node is left there to say so.
            if node == 0 and lost is not None and process.killed_by is None and self.stopped_by is None:
                self._say_lost(process.name, lost)
            return
        self._left -= 1
        if lost is not None:
            self._say_lost(process.name, lost)
        elif process.killed_by is not None:
            self.say(f"{process.name} was killed by {signal.Signals(process.killed_by).name}")
        elif process.status == NO_CONNECTION and not process.last_line:
            self.say(f"host {process.name}: ended with status {NO_CONNECTION}")
        if node and (lost or process.status in (NO_CONNECTION, LOST)) and self._left >= self._least:
            self.say(f"host {process.name} is left out; the job needs {self._least} of its hosts and has {self._left}")
            return
        # The others do not know of a lost host before it has been silent for some time.
        self._end(process.status, min(self.leisure, _LOST_LEISURE) if lost else self.leisure)

    def tick(self) -> None:
        """A signal, or a reader that is gone, ends the job."""
        if self._ending:
            return
        if self.stopped_by is not None:  # the group has begun to end
            self._ending = True
            self.status = 128 + self.stopped_by
            self.say(f"stopped by {signal.Signals(self.stopped_by).name}")
        elif status := self.outputs.status:
            name, error = self.outputs.error
            gone = status == CLOSED_PIPE
            why = f"nobody reads its {name} any more" if gone else f"cannot write to {name}: {error.strerror}"
            self.say(f"stopped: {why}")
            self._end(status)

    def wrap_up(self) -> None:
        """Write what is left to write; the status of a job that ended well is that of a reader that did not."""
        self.outputs.finish(self.stopped)
        self.status = self.status or (128 + self.stopped_by if self.stopped_by is not None else self.outputs.status)

    def _end(self, status: int, leisure: float = 0.0) -> None:
        self._ending = True
        self.status = status
        self.end(leisure=leisure)
