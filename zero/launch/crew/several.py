"""The launcher's side of a job on several hosts: it starts the nodes, hands on what they say, ends them together."""

from __future__ import annotations

import re
import shutil
import signal
from collections.abc import Sequence

from zero.launch import backends, processes, secret
from zero.launch.contract import CLOSED_PIPE, LOST, TERMINATE
from zero.launch.crew.crew import Crew, Program
from zero.launch.crew.outlets import Outputs
from zero.launch.errors import LaunchError
from zero.launch.job import Job

NO_CONNECTION = 255  # ssh's own: no connection, or no longer one
_LOST_LEISURE = 0.5  # ssh has taken up to 8 s to find out
WRITE_ERROR = 74  # EX_IOERR of sysexits.h
_OF_NODES = (b"zero run: ", b"[")  # how every line of a node and of its ranks begins; all others are ssh's
_LOST_LINE = re.compile(rb"zero run: host (\S+) is lost\b[^\n]*\n")  # the first host's, when it notices sooner than ssh
_MISSING = {
    "ssh": "install OpenSSH's client, or start zero run with --no_ssh and --node_rank on each host",
    "pdsh": "install pdsh, or leave out --launcher pdsh: the default needs plain ssh only",
    "slurm": "run this on a machine of a Slurm cluster, or leave out --launcher slurm",
    "openmpi": "install Open MPI, or leave out --launcher openmpi",
    "mpich": "install MPICH, or leave out --launcher mpich",
}


def run(made: Job) -> int:
    """Start `made` on its hosts and return its exit status: that of the first node that failed, or 128 + signal."""
    own = secret.new()
    programs = [Program(_name(made, command.node), command, own) for command in backends.commands(made)]
    require(programs[0].command.words[0], made.request.hosts.launcher)
    # Whatever mpirun, say, has started on this machine would outlive it. An ssh leaves nothing, unless the user
    # wants it to: a connection that other commands share.
    others = None if made.request.hosts.launcher == "ssh" else processes.begin()
    crew = JobCrew(programs, made.request.min_nodes)
    crew.run()
    if others is not None and crew.status:
        processes.end(others)
    return crew.status


def require(program: str, launcher: str) -> None:
    """Raise `LaunchError` when there is no `program`, which `launcher` needs."""
    if shutil.which(program) is None:
        raise LaunchError(f"--launcher {launcher}: there is no program {program!r}; {_MISSING[launcher]}")


def reason_of_ssh(program: Program) -> str | None:
    """What ssh said when it had no connection, or lost it; None where the status is that of what ran there."""
    if program.killed_by is not None:
        return f"ssh was killed by {signal.Signals(program.killed_by).name}"
    # A script may end with 255, too; then its node has said so, or the node of another host has.
    if program.status != NO_CONNECTION or not program.last or program.last.startswith(_OF_NODES):
        return None
    return "ssh: " + program.last.decode(errors="replace").strip().removeprefix("ssh: ")


def _name(made: Job, node: int | None) -> str:
    return made.request.hosts.launcher if node is None else made.world.hosts[node].name


class JobCrew(Crew):
    """The nodes of one job, or the program that starts them.

    When one fails, the others have `leisure` seconds to end by themselves: they hear of it through their store.

    Attributes:
        status: the exit status of the job; that of the first cause of its end.
    """

    leisure = 5.0

    def __init__(self, programs: Sequence[Program], min_nodes: int | None = None) -> None:
        super().__init__(programs)
        self.status = 0
        self._outputs = Outputs()
        self._least = len(programs) if min_nodes is None else min_nodes
        self._left = len(programs)
        self._ending = False
        self._named: set[str] = set()  # the lost hosts that were named, here or by the first host

    def received(self, program: Program, is_stderr: bool, lines: bytes) -> None:
        """Hand on what a node wrote, but for a host's loss that ended the job and was named already."""
        self._outputs.put(is_stderr, _LOST_LINE.sub(self._first_time, lines) if is_stderr else lines)

    def _first_time(self, found: re.Match[bytes]) -> bytes:
        name = found[1].decode(errors="replace")
        again = name in self._named
        self._named.add(name)
        return b"" if again and self._ending else found[0]

    def _lost(self, name: str, why: str) -> None:
        if name not in self._named:
            self._named.add(name)
            self.said(f"host {name}: lost ({why})")

    def held_back(self) -> bool:
        """While whoever reads our output is behind; the nodes still hear from us."""
        return self._outputs.full

    def said(self, text: str) -> None:
        """One line of the launcher's own, among those of the nodes."""
        self._outputs.put(True, f"zero run: {text}\n".encode(errors="surrogateescape"))

    def ended(self, program: Program) -> None:
        """A node has ended; the first that did not end well ends the job, unless it can go on without."""
        if not program.status:
            return
        node = program.command.node
        lost = reason_of_ssh(program) if program.command.heartbeat else None
        if self._ending:
            # The other hosts may have missed the first one before ssh did; no node is left there to say so.
            if node == 0 and lost is not None and program.killed_by is None and self.stopped_by is None:
                self._lost(program.name, lost)
            return
        self._left -= 1
        if lost is not None:
            self._lost(program.name, lost)
        elif program.killed_by is not None:
            self.said(f"{program.name} was killed by {signal.Signals(program.killed_by).name}")
        elif program.status == NO_CONNECTION and not program.last:
            self.said(f"host {program.name}: ended with status {NO_CONNECTION}")
        if node and (lost or program.status in (NO_CONNECTION, LOST)) and self._left >= self._least:
            self.said(f"host {program.name} is left out; the job needs {self._least} of its hosts and has {self._left}")
            return
        # The others do not know of a lost host before it has been silent for some time.
        self._end(program.status, min(self.leisure, _LOST_LEISURE) if lost else self.leisure)

    def tick(self) -> None:
        """A signal, or a reader that is gone, ends the job."""
        if self.stopped_by is not None and not self._ending:
            self._ending = True  # the crew has begun to
            self.status = 128 + self.stopped_by
            self.said(f"stopped by {signal.Signals(self.stopped_by).name}")
        elif not self._ending and (found := self._outputs.error):
            name, error = found
            if isinstance(error, BrokenPipeError):
                self.said(f"stopped: nobody reads its {name} any more")
                self._end(CLOSED_PIPE)
            else:
                self.said(f"stopped: cannot write to {name}: {error.strerror}")
                self._end(WRITE_ERROR)

    def wrap_up(self) -> None:
        """Write what is left to write; the status of a job that ended well is that of a reader that did not."""
        self.write_out(self._outputs)
        if self.stopped_by is not None and not self.status:
            self.status = 128 + self.stopped_by
        elif not self.status and (found := self._outputs.error):
            self.status = CLOSED_PIPE if isinstance(found[1], BrokenPipeError) else WRITE_ERROR

    def _end(self, status: int, leisure: float = 0.0) -> None:
        self._ending = True
        self.status = status
        self.end(TERMINATE, leisure)
