"""The launcher's side of a job on several hosts: it starts the nodes, hands on what they say, ends them together."""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections.abc import Mapping, Sequence
from secrets import token_hex
from typing import Any

from zero.launch import backends
from zero.launch.contract import CLOSED_PIPE, HEARTBEAT, NO_CONNECTION, SECRET_VARIABLE, SHUTDOWN
from zero.launch.job import Job
from zero.launch.launch_messages import LaunchError
from zero.launch.process.group import Descendants, ProcessGroup
from zero.launch.process.output import OutputPump
from zero.launch.process.process import Command, Process

_GRACE = 3  # seconds between asking what mpirun, say, has left here to end, and killing it
_UNBOUND = b"srun: cluster configuration lacks support for cpu binding\n"  # that we ask it for none
_RETRY = 10.0  # seconds between two tries to reach a host that was lost
_OF_NODES = (b"zero run: ", b"[")  # how every line of a node and of its ranks begins; all others are ssh's
_LONGEST = 1000  # bytes of what ssh said; a message has to fit in a pipe in one piece
_MISSING = {
    "ssh": "install OpenSSH's client, or start zero run with --no_ssh and --node_rank on each host",
    "slurm": "run this on a machine of a Slurm cluster, or leave out --launcher slurm",
    "openmpi": "install Open MPI, or leave out --launcher openmpi",
    "mpich": "install MPICH, or leave out --launcher mpich",
}


def run(job: Job) -> int:
    """Start `job` on its hosts and return its exit status: that of the first host, or 128 + signal."""
    launcher = job.request.hosts.launcher
    commands, secret = backends.commands(job), token_hex()
    require(commands[0].words[0], launcher)
    processes: list[LauncherProcess] = []
    for command in commands:
        if command.node is None:
            with_secret = {**command.environment, **job.secrets, SECRET_VARIABLE: secret}
            processes.append(LauncherProcess(launcher, command._replace(environment=with_secret)))
        else:
            name = job.world.hosts[command.node].name
            processes.append(NodeProcess(name, command, {**job.secrets, SECRET_VARIABLE: secret}))
    # Whatever mpirun, say, has started on this machine would outlive it. An ssh leaves nothing, unless the user
    # wants it to: a connection that other commands share.
    descendants = None if launcher == "ssh" else Descendants(adopt=True)
    group = NodeGroup(processes, descendants, job.request.elastic.max_nodes is not None)
    group.patience += job.request.elastic.shutdown_timeout - SHUTDOWN
    group.run()
    if descendants is not None and group.status:
        descendants.end(_GRACE)
    return group.status


def require(program: str, launcher: str) -> None:
    """Raise `LaunchError` when there is no `program`, which `launcher` needs."""
    if shutil.which(program) is None:
        raise LaunchError(f"--launcher {launcher}: there is no program {program!r}; {_MISSING[launcher]}")


class LauncherProcess(Process):
    """What starts nodes, of which one hears us by its stdin."""

    def tell(self, **message: Any) -> None:
        """Send the node a message of the launcher."""
        self.write(json.dumps(message).encode() + b"\n")

    def ask(self, number: int) -> None:
        """Ask it to end the job, as the signal `number` would: the first host does, others before they reach that."""
        number = number if number == signal.SIGINT else signal.SIGTERM
        self.tell(kind="end", text="", status=128 + number, signal=number)


class NodeProcess(LauncherProcess):
    """The ssh of one host."""

    def __init__(self, name: str, command: Command, secrets: Mapping[str, str]) -> None:
        super().__init__(name, command)
        self.again = False  # it is tried again
        self._secrets = secrets

    def once_more(self) -> NodeProcess:
        """Another try to start the same host."""
        other = NodeProcess(self.name, self.command, self._secrets)
        other.again = True
        return other

    def start(self) -> None:
        """Start it, and hand over the secrets."""
        super().start()
        self.write(json.dumps(self._secrets).encode() + b"\n")

    def loss(self) -> str | None:
        """Why the host is lost, in the words of ssh where it said some; None where its launcher has said so."""
        if self.killed_by is not None:
            return f"ssh was killed by {signal.Signals(self.killed_by).name}"
        if self.status == NO_CONNECTION and not self.last_line:
            return f"ssh ended with status {NO_CONNECTION}"
        # A script may end with 255, too; then its node has said so, or the node of another host has.
        if self.status != NO_CONNECTION or self.last_line.startswith(_OF_NODES):
            return None
        return "ssh: " + self.last_line[:_LONGEST].decode(errors="replace").removeprefix("ssh: ")


class NodeGroup(ProcessGroup):
    """The nodes of one job, or the one program that starts them.

    What ends a job is decided on the first host. Here that one is told of signals and of other hosts that are lost, and
    its end is that of the job: the others have heard of it or are told, and have `patience` seconds to end.

    status: the exit status of the job; that of the first host, or 128 + the signal that stopped the launcher.
    """

    def __init__(
        self, processes: Sequence[LauncherProcess], descendants: Descendants | None = None, joins: bool = False
    ) -> None:
        """joins: try the hosts that are lost again, which may come back."""
        super().__init__(processes, OutputPump(), descendants=descendants)
        self._joins = joins
        self._again: list[tuple[float, NodeProcess]] = []
        self.status = 0
        self._ending = False
        self._next_heartbeat = 0.0

    def received(self, process: Process, is_stderr: bool, lines: bytes) -> None:
        """Hand it on; not what ssh says of a host that it does not reach again."""
        if not (isinstance(process, NodeProcess) and process.again) or lines.startswith(_OF_NODES):
            self.outputs.put(is_stderr, lines.replace(_UNBOUND, b""))

    def ended(self, process: Process) -> None:
        """A node has ended: the first one and so the job, or another one, of which the first is told."""
        first = self.processes[0]
        loss = process.loss() if isinstance(process, NodeProcess) else None
        if isinstance(first, NodeProcess) and process is not first:
            if process.status:
                why = loss or f"its launcher ended with status {process.status}"
                first.tell(kind="lost", node=process.command.node, text=why, status=process.status)
                if self._joins:
                    self._started.remove(process)  # of which there may be many in time
                    self._again.append((time.monotonic() + _RETRY, process.once_more()))
            return
        if not self._ending:
            if loss is not None:
                self.say(f"host {process.name} is lost: {loss}")
            elif process.killed_by is not None:
                self.say(f"{process.name} was killed by {signal.Signals(process.killed_by).name}")
            self._end(process.status)

    def suspend(self) -> None:
        """Not here: the hosts would take the silence for the end of the launcher."""
        self.say("not suspended: the hosts would take the silence for the end of the launcher")

    def pass_on(self, number: int) -> None:
        """By the first host, to the ranks of all."""
        self.processes[0].tell(kind="signal", signal=number)

    def tick(self) -> None:
        """The first host hears from us; a signal, or a reader that is gone, ends the job."""
        first, now = self.processes[0], time.monotonic()
        if now >= self._next_heartbeat:
            self._next_heartbeat = now + HEARTBEAT
            first.tell(kind="alive")
        if self._ending:
            return
        while self._again and self._again[0][0] <= now:
            self.start(self._again.pop(0)[1])
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

    def _end(self, status: int) -> None:
        self._ending = True
        self.status = status
        self.end()
