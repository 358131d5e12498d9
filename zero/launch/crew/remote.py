"""`zero ssh`: a command on all hosts at once."""

from __future__ import annotations

import shlex
import signal
from collections.abc import Sequence
from pathlib import Path

from zero.launch.args.ssh import SshRequest
from zero.launch.backends.command import Command
from zero.launch.backends.ssh import to_host
from zero.launch.contract import CLOSED_PIPE
from zero.launch.crew.crew import Crew, Program
from zero.launch.crew.outlets import Outputs, prefixed
from zero.launch.crew.several import NO_CONNECTION, WRITE_ERROR, require
from zero.launch.errors import LaunchError, listed
from zero.launch.hosts import hostfile, selection

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


class RemoteCrew(Crew):
    """The same command on every host; each line with the host's name in front."""

    patience = 4.0

    def __init__(self, programs: Sequence[Program]) -> None:
        super().__init__(programs)
        self.closed = 0  # the status where nobody reads what we write any more
        self._outputs = Outputs()

    def received(self, program: Program, is_stderr: bool, lines: bytes) -> None:
        """Hand it on."""
        self._outputs.put(is_stderr, prefixed(f"{program.name}: ".encode(), lines))

    def held_back(self) -> bool:
        """While whoever reads our output is behind."""
        return self._outputs.full

    def said(self, text: str) -> None:
        """One line of our own."""
        self._outputs.put(True, f"zero ssh: {text}\n".encode(errors="surrogateescape"))

    def tick(self) -> None:
        """End with the reader."""
        if not self.closed and (found := self._outputs.error):
            self.closed = CLOSED_PIPE if isinstance(found[1], BrokenPipeError) else WRITE_ERROR
            self.end(b"")

    def wrap_up(self) -> None:
        """Say who failed, and write what is left to write."""
        if self.stopped_by is not None:
            self.said(f"stopped by {signal.Signals(self.stopped_by).name}")
        elif not self.closed and (failed := [_failed(program) for program in self.programs if program.status]):
            self.said(f"failed on {len(failed)} of {len(self.programs)} hosts: {listed(failed)}")
        self.write_out(self._outputs)


def run(request: SshRequest) -> int:
    """Run the command; the exit status is that of the first host, in the hostfile's order, that failed."""
    require("ssh", "ssh")
    path = hostfile.DEFAULT if request.flags.hostfile is None else request.flags.hostfile
    if request.flags.hostfile is None and not Path(path).exists():
        raise LaunchError(f"there is no hostfile {path}; give one with -f")
    hosts = selection.select(hostfile.read(path), request.flags.choice(None, None))
    # One word is a line for the shell there, several are a command and its arguments.
    text = request.words[0] if len(request.words) == 1 else shlex.join(request.words)
    line = shlex.join(["exec", "sh", "-c", _SESSION, "zero", text])
    crew = RemoteCrew(
        [
            Program(host.name, Command([*to_host(request.flags, host.name), line], node, {}, True))
            for node, host in enumerate(hosts)
        ]
    )
    crew.run()
    if crew.stopped_by is not None:
        return 128 + crew.stopped_by
    return crew.closed or next((program.status for program in crew.programs if program.status), 0)


def _failed(program: Program) -> str:
    if program.status == NO_CONNECTION:
        return f"{program.name} (exit status {NO_CONNECTION}, which is ssh's own when it has no connection)"
    return f"{program.name} (exit status {program.status})"
