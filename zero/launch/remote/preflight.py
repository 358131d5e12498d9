"""A look at all hosts before anything starts there; whatever is wrong on any of them is said at once.

On a host `python -m zero.launch.remote.preflight JSON` prints what it says of itself, as JSON. It imports no torch, so
many hosts answer within a second or two.
"""

from __future__ import annotations

import json
import platform
import socket
import sys
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from zero.launch.args.run import check_script
from zero.launch.backends import to_host
from zero.launch.contract import NO_CONNECTION
from zero.launch.hosts import addresses
from zero.launch.job import Job
from zero.launch.launch_messages import LaunchError, listed, raise_all, say
from zero.launch.process.group import ProcessGroup
from zero.launch.process.process import Command, Process
from zero.launch.remote.job_runner import require
from zero.log import counted

MARK = "zero_probe"  # so that nothing that a login prints is taken for the answer
_MOST = 64 * 1024  # bytes of a host's output that are kept


class ProbeGroup(ProcessGroup):
    """Runs one short program per host, and keeps what it writes.

    late: the names of those that did not end in time.
    """

    patience = 0.0
    seconds = 15.0  # for all hosts; longer than the ConnectTimeout of ssh, whose message says more than ours

    def __init__(self, processes: Sequence[Process]) -> None:
        super().__init__(processes)
        self.late: set[str] = set()
        self._until = time.monotonic() + self.seconds
        self._kept: dict[tuple[str, bool], bytes] = {}

    def received(self, process: Process, is_stderr: bool, lines: bytes) -> None:
        """Keep what came last."""
        key = (process.name, is_stderr)
        self._kept[key] = (self._kept.get(key, b"") + lines)[-_MOST:]

    def tick(self) -> None:
        """Do not wait for longer than was said."""
        if not self.late and time.monotonic() > self._until:
            self.late = {process.name for process in self.processes if process.status is None}
            self.end()

    def text(self, name: str, is_stderr: bool) -> str:
        """What the process called `name` wrote."""
        return self._kept.get((name, is_stderr), b"").decode(errors="replace")


def check(job: Job) -> int:
    """Raise `LaunchError` with all that keeps `job` from starting on its hosts.

    Returns 0, or 128 + the signal that came meanwhile. Hosts are looked at where ssh reaches them; what Slurm and MPI
    start has daemons of its own.
    """
    if job.request.hosts.launcher != "ssh":
        return 0
    require("ssh", "ssh")
    group = ProbeGroup([Process(host.name, _command(job, node)) for node, host in enumerate(job.world.hosts)])
    group.run()
    if group.stopped_by is not None:
        return 128 + group.stopped_by
    here = versions()
    problems = []
    for process in group.processes:
        out, err = group.text(process.name, False), group.text(process.name, True)
        if process.name in group.late:
            last = _last(err)
            texts = [f"did not answer within {group.seconds:g} s" + (f"; its last line was: {last}" if last else "")]
        else:
            texts = problems_of(job, process.status or 0, out, err, here)
        away = process.name in group.late or process.status == NO_CONNECTION
        if away and process.command.node and job.request.elastic.max_nodes is not None:
            say(f"host {process.name} {texts[0]}; it may join later")
            continue
        problems += [f"host {process.name}: {text}" for text in texts]
    if problems:
        hosts = counted(len(group.processes), "host")
        raise_all([f"nothing was started on the {hosts} (--no_check starts without a look at them):", *problems])
    return 0


def problems_of(job: Job, status: int, out: str, err: str, here: dict[str, str]) -> list[str]:
    """What is wrong with a host whose probe ended with `status` and wrote `out` and `err`."""
    answer = _answer(out)
    if answer is not None:
        there = answer["versions"]
        other = [f"{name} {there.get(name)}, here {ours}" for name, ours in here.items() if there.get(name) != ours]
        return [*([f"has other versions than this machine: {listed(other)}"] if other else []), *answer["problems"]]
    last = _last(err)
    if status == NO_CONNECTION:
        return [f"cannot be reached (ssh: {last.removeprefix('ssh: ') or 'ended without a word'})"]
    if status in (126, 127):
        return [f"there is no {sys.executable} that can run ({last})"]
    if "No module named" in err and "zero" in last:
        return [f"the Python there, {sys.executable}, has no zero of this version ({last})"]
    if job.folder in err:
        return [f"cannot go to the folder {job.folder} ({last})"]
    return [f"the look at it ended with status {status}" + (f" ({last})" if last else "")]


def _command(job: Job, node: int) -> Command:
    request = job.request
    asked = {
        "script": request.script,
        "module": request.module,
        "no_python": request.no_python,
        "address": job.master_addr,
        "port": job.master_port if node == 0 else None,
    }
    words = [*job.python(), "-m", "zero.launch.remote.preflight", json.dumps(asked)]
    return Command([*to_host(request.hosts, job.world.hosts[node].name), job.shell(words)], node)


def _answer(out: str) -> dict[str, Any] | None:
    for line in out.splitlines():
        try:
            answer = json.loads(line)
        except ValueError:
            continue
        if isinstance(answer, dict) and MARK in answer:
            return answer[MARK]
    return None


def _last(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def versions() -> dict[str, str]:
    """What has to be the same on all hosts."""
    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = "(not installed)"
    zero = sys.modules["zero"].__version__  # of the package that this module is in
    return {"Python": platform.python_version(), "zero": zero, "torch": torch}


def look(script: str, module: bool, no_python: bool, address: str | None, port: int | None) -> dict[str, Any]:
    """The versions here and what would keep a job from starting; `port` is for the first host only."""
    problems = []
    try:
        check_script(script, module, no_python)
    except LaunchError as error:
        problems.append(str(error))
    if address is not None:
        try:
            socket.getaddrinfo(address, None)
        except OSError as error:
            problems.append(f"does not know the first host as {address!r} ({error.strerror}); --master_addr names it")
    if port is not None and (why := addresses.port_problem(port)):
        problems.append(f"cannot listen on port {port}, where the hosts meet ({why}); --master_port names another")
    return {"versions": versions(), "problems": problems}


if __name__ == "__main__":
    sys.stdout.write("\n" + json.dumps({MARK: look(**json.loads(sys.argv[1]))}) + "\n")
