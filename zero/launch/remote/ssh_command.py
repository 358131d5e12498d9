"""`zero ssh`: a command on all hosts at once."""

from __future__ import annotations

import shlex
import signal
from collections.abc import Sequence
from pathlib import Path

from zero.launch.args.hosts import HostFlags
from zero.launch.backends import to_host
from zero.launch.contract import NO_CONNECTION
from zero.launch.hosts import hostfile, selection
from zero.launch.launch_messages import LaunchError, listed
from zero.launch.process.group import ProcessGroup
from zero.launch.process.output import OutputPump, prefixed
from zero.launch.process.process import Command, Process
from zero.launch.remote.job_runner import require

# What runs on a host. sshd does not end a command whose connection is gone; so the command runs in a session of its
# own, which is ended when our end of stdin is closed. No line breaks: csh, as a login shell, takes none in quotes.
_SESSION = " ".join(
    [
        "exec 3<&0 </dev/null; gone=; trap 'gone=1' USR1; own=$(command -v setsid);",
        '$own "${SHELL:-sh}" -c "$1" 3<&- & child=$!;',
        "{ cat <&3; while kill -s USR1 $$; do sleep 1; done; } >/dev/null 2>&1 & watch=$!;",
        "exec 3<&-; wait $child; status=$?;",
        'if [ -n "$gone" ]; then exec 2>/dev/null;',
        "for number in TERM KILL; do kill -s $number -- -$child || kill -s $number $child; sleep 1; done; fi;",
        "kill $watch; exit $status",
    ]
)


class CommandGroup(ProcessGroup):
    """The same command on every host; each line with the host's name in front.

    Attributes:
        closed: the exit status where our output cannot be written any more, else 0.
    """

    patience = 4.0
    command = "zero ssh"

    def __init__(self, processes: Sequence[Process]) -> None:
        super().__init__(processes, OutputPump())
        self.closed = 0

    def received(self, process: Process, is_stderr: bool, lines: bytes) -> None:
        """Hand it on."""
        self.outputs.put(is_stderr, prefixed(f"{process.name}: ".encode(), lines))

    def tick(self) -> None:
        """End with the reader."""
        if not self.closed and self.outputs.status:
            self.closed = self.outputs.status
            self.end()

    def wrap_up(self) -> None:
        """Say who failed, and write what is left to write."""
        if self.stopped_by is not None:
            self.say(f"stopped by {signal.Signals(self.stopped_by).name}")
        elif not self.closed and (failed := [_failed(process) for process in self.processes if process.status]):
            self.say(f"failed on {len(failed)} of {len(self.processes)} hosts: {listed(failed)}")
        self.outputs.finish(self.stopped)


def run(flags: HostFlags, command: list[str]) -> int:
    """Run the command; the exit status is that of the first host, in the hostfile's order, that failed."""
    require("ssh", "ssh")
    path = hostfile.DEFAULT if flags.hostfile is None else flags.hostfile
    if flags.hostfile is None and not Path(path).exists():
        raise LaunchError(f"there is no hostfile {path}; give one with -f")
    hosts = selection.select(hostfile.read(path), flags.choice(None, None))
    # One word is a line for the shell there, several are a command and its arguments.
    text = command[0] if len(command) == 1 else shlex.join(command)
    line = shlex.join(["exec", "sh", "-c", _SESSION, "zero", text])
    group = CommandGroup(
        [
            Process(host.name, Command([*to_host(flags, host.name), line], node, {}, True))
            for node, host in enumerate(hosts)
        ]
    )
    group.run()
    if group.stopped_by is not None:
        return 128 + group.stopped_by
    return group.closed or next((process.status for process in group.processes if process.status), 0)


def _failed(process: Process) -> str:
    why = ", which is ssh's own when it has no connection" if process.status == NO_CONNECTION else ""
    return f"{process.name} (exit status {process.status}{why})"
