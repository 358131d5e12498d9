"""Hosts without a network: a program `ssh` that runs on this machine what the real one would run on a host.

What is tested with it is the launcher's own side. A host is a script of the test's where there is one, which gets the
command line as its argument, and otherwise sh, as a login shell is.
"""

from __future__ import annotations

import os
import select
import shlex
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import IO, Any

from nodes import eventually

ROOT = Path(__file__).parent.parent
TIMEOUT = 120  # seconds that no command of these tests takes, unless it hangs
_SSH = """#!/bin/sh
while :; do case $1 in -T) shift;; -[opF]) shift 2;; *) break;; esac; done
host=$1; shift
echo "$host $*" >>"$HOSTS/calls"
[ -x "$HOSTS/$host" ] && exec "$HOSTS/$host" "$*"
exec sh -c "$*"
"""
# Times that a user does not set; shorter, so that a test of what happens after them need not wait.
_MAIN = """
import sys
from zero.launch.remote import job_runner, preflight
{changes}
from zero.__main__ import main
sys.exit(main())
"""


def in_python(program: str) -> str:
    """A host that runs a program, which gets its own path; a first line `#!` names no Python whose path has a space."""
    return f'exec {shlex.quote(sys.executable)} -u -c {shlex.quote(program)} "$0"'


# A node that ends as it is told to on its stdin, or with that, and says so.
OBEYS = in_python("""
import json, os, sys
sys.stdin.readline()  # the job's secret
name = os.path.basename(sys.argv[1])
sys.stdout.write(f"up {name}\\n")
told = ({"kind": "closed", "status": 129} if not line else json.loads(line) for line in iter(sys.stdin.readline, 0))
told = next(each for each in told if each["kind"] != "alive")
sys.stdout.write(f"{name} {json.dumps(told)}\\n")
sys.exit(told["status"])
""")


class Hosts:
    """A folder with a hostfile `H` of `names`, and what runs on them."""

    def __init__(self, folder: Path, *names: str) -> None:
        self.folder = folder
        self.mark = f"HOSTS_{uuid.uuid4().hex}"
        (folder / "bin").mkdir()
        (folder / "hosts").mkdir()
        self.program("ssh", _SSH)
        (folder / "H").write_text("".join(f"{name} slots=1\n" for name in names))
        (folder / "t.py").write_text("print('ran')\n")

    def program(self, name: str, text: str) -> None:
        """Put a program on the PATH."""
        _write(self.folder / "bin" / name, text)

    def host(self, name: str, text: str) -> None:
        """Say what the host `name` does; a text without a first line of its own is for sh."""
        _write(self.folder / "hosts" / name, text if text.startswith("#!") else f"#!/bin/sh\n{text}")

    def calls(self) -> str:
        """The hosts that were called, and what for."""
        path = self.folder / "hosts" / "calls"
        return path.read_text() if path.exists() else ""

    def start(self, *words: str, before: str = "", path: str | None = None, **changes: float) -> subprocess.Popen:
        """Start `zero` with these words, by a shell where there is something for it to do `before`."""
        lines = "\n".join(f"{name.replace('__', '.')} = {value}" for name, value in changes.items())
        command = [sys.executable, "-c", _MAIN.format(changes=lines), *words]
        if before:
            command = ["sh", "-c", f'{before}\nexec "$@"', "sh", *command]
        usual = os.pathsep.join([str(self.folder / "bin"), os.environ["PATH"]])
        own = {"PYTHONPATH": str(ROOT), "HOSTS": str(self.folder / "hosts"), "PATH": path or usual, self.mark: "1"}
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "ZERO_"))}
        return subprocess.Popen(
            command,
            cwd=self.folder,
            env={**kept, **own},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def zero(self, *words: str, **more: str | float) -> tuple[int, str, str]:
        """Exit status, stdout and stderr of `zero` with these words."""
        return self.finish(self.start(*words, **more))

    def run(self, *words: str, **more: str | float) -> tuple[int, str, str]:
        """Of `zero run` on the hosts, without a look at them before."""
        return self.zero("run", "-H", "H", "--no_check", *words, "t.py", **more)

    def finish(self, process: subprocess.Popen) -> tuple[int, str, str]:
        """Wait for the end of what `start` started; nothing of it is left then."""
        try:
            out, err = process.communicate(timeout=TIMEOUT)
        except subprocess.TimeoutExpired:
            process.kill()
            for pid in self.left():
                os.kill(pid, signal.SIGKILL)
            raise
        return process.returncode, out.decode(), err.decode()

    def left(self) -> list[int]:
        """The processes that are alive of all that was started."""
        mark = self.mark.encode()
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                if mark in path.read_bytes():  # empty for one that has ended
                    found.append(int(path.parent.name))
            except OSError:
                continue
        return found

    def nothing_left(self) -> bool:
        """Whether all that was started has ended, or does within moments."""
        return eventually(lambda: not self.left())


def read_until(stream: IO[Any], text: bytes, times: int = 1) -> bytes:
    """What a process wrote, as far as it has come when `text` is in it so many times; more may have come with it."""
    found, end = b"", time.monotonic() + TIMEOUT
    while found.count(text) < times:
        ready, _, _ = select.select([stream], [], [], max(0.0, end - time.monotonic()))
        assert ready, f"no {text!r} in {TIMEOUT} s, only {found!r}"
        data = os.read(stream.fileno(), 65536)
        assert data, f"the end came before {text!r}: {found!r}"
        found += data
    return found


def _write(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)
