"""`zero doctor`: whether ranks can be started here and talk to each other, and what is missing for which use."""

from __future__ import annotations

import os
import resource
import shlex
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from zero.launch.hosts.addresses import port_problem
from zero.launch.launched import PORT
from zero.log import counted
from zero.memory.available import available_nbytes
from zero.tools.report.machine import GIB, Facts, gather, in_gib
from zero.tools.started_ranks import SECONDS, run_on_ranks

_TRY_SECONDS = 10  # for a program to say its version
_LEAST_SHARED, _LEAST_DISK, _LITTLE_DISK, _LEAST_FILES = GIB, GIB, 10 * GIB, 4096
_COMPILERS = ("c++", "g++", "clang++")

OK, NOTE, PROBLEM = "ok", "note", "problem"


class Finding(NamedTuple):
    """What was looked at, how it is, and what that means; for all but OK, how to mend it.

    state: OK; NOTE, where some use is not possible, or something may become too little; PROBLEM, where training is
    not possible or much slower than it should be.
    """

    name: str
    state: str
    text: str


def run() -> int:
    """Look, print one line for each finding as soon as it is known; the exit status is 1 if there is a problem."""
    states = []
    for finding in findings(gather()):
        print(f"{finding.state:<8} {finding.name}: {finding.text}", flush=True)
        states.append(finding.state)
    problems, notes = states.count(PROBLEM), states.count(NOTE)
    print(f"\n{counted(problems, 'problem')}, {counted(notes, 'note')}")
    return 1 if problems else 0


def findings(facts: Facts) -> Iterator[Finding]:
    """All there is to say, what takes seconds last."""
    gpus = facts["gpus"]
    kernels = f"{facts['cpu']['picked']} on the CPU" + (f", CUDA on {len(gpus)} GPU(s)" if gpus else "")
    yield from (Finding("kernels", PROBLEM, text) for text in facts["problems"])
    if not facts["problems"]:
        yield Finding("kernels", OK, f"{kernels}; `zero report` says more")
    yield from programs(bool(gpus))
    yield from network()
    yield from limits()
    yield from disks([Path.cwd(), Path(tempfile.gettempdir())])
    yield collectives("gloo", 2)
    if gpus and facts["versions"]["nccl"]:
        yield collectives("nccl", len(gpus))
    elif gpus:
        yield Finding("nccl", PROBLEM, "this torch was built without it; install torch for CUDA from pytorch.org")


def programs(gpus: bool) -> Iterator[Finding]:
    """Compilers, and what starts ranks on other hosts."""
    chosen = os.environ.get("CXX", "").split()[:1]
    compiler = next(filter(None, map(shutil.which, [*chosen, *_COMPILERS])), None)
    how = "apt-get install g++ (Debian, Ubuntu) or dnf install gcc-c++ (Fedora, RHEL)"
    yield _program(
        "C++ compiler", compiler, "--version", "builds the CPU kernels when zero is installed from source", how
    )
    if gpus:
        folder = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
        nvcc = shutil.which("nvcc") or shutil.which("nvcc", path=f"{folder}/bin")
        how = "install the CUDA toolkit, or say in CUDA_HOME where it is"
        yield _program("nvcc", nvcc, "--version", "builds the CUDA kernels when zero is installed from source", how)
    how = "apt-get install openssh-client or dnf install openssh-clients"
    yield _program("ssh", shutil.which("ssh"), "-V", "`zero run --hostfile` starts ranks on other hosts by it", how)
    how = "apt-get install openmpi-bin or dnf install openmpi, or load the module of your cluster"
    use = "only `zero run --launcher openmpi` and its kin need it"
    yield _program("mpirun", shutil.which("mpirun"), "--version", use, how)


def _program(name: str, found: str | None, flag: str, use: str, how: str) -> Finding:
    """flag: with which it ends at once, and well if it runs here at all."""
    if found is None:
        return Finding(name, NOTE, f"not found; {use}. To get it: {how}")
    why = _failure([found, flag])
    text = f"{found} does not run: {why}; {use}. To get it whole: {how}"
    return Finding(name, NOTE, text) if why else Finding(name, OK, found)


def _failure(command: list[str]) -> str:
    """How the end of a command that should end at once was not a good one, with the last it wrote; "" if it was."""
    with tempfile.TemporaryFile() as output:  # no pipe: what the command has started may hold that, and go on
        streams = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
        try:
            status = subprocess.run(command, **streams, timeout=_TRY_SECONDS, check=False).returncode
        except subprocess.TimeoutExpired:
            return f"`{shlex.join(command)}` has not ended after {_TRY_SECONDS} s"
        except OSError as error:
            return str(error.strerror)
        output.seek(0)
        said = [line for line in output.read().decode(errors="replace").splitlines() if any(map(str.isalnum, line))]
    return f"exit status {status}: {said[-1].strip() if said else 'it wrote nothing'}" if status else ""


def network() -> Iterator[Finding]:
    """The name of this machine, and the port where ranks of several hosts meet."""
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
    except OSError as error:
        text = f"this machine does not know its own name {name!r} ({error.strerror}); gloo looks it up. "
        yield Finding("host name", NOTE, f"{text}Add `127.0.0.1 {name}` to /etc/hosts, or set GLOO_SOCKET_IFNAME=lo")
    else:
        yield Finding("host name", OK, name)
    why = port_problem(PORT)
    text = f"cannot be listened on ({why}); on one machine a free one is taken, on several hosts give --master_port"
    yield Finding(f"port {PORT}", NOTE, text) if why else Finding(f"port {PORT}", OK, "free")


def limits() -> Iterator[Finding]:
    """Of this process and machine: open files, shared memory, main memory."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files != resource.RLIM_INFINITY and files < _LEAST_FILES:
        text = f"at most {files}; large worlds and DataLoader workers need more: `ulimit -n 65536`"
        yield Finding("open files", NOTE, text)
    else:
        yield Finding("open files", OK, "without limit" if files == resource.RLIM_INFINITY else f"at most {files:,}")
    shared = Path("/dev/shm")
    if shared.is_dir():
        free = shutil.disk_usage(shared).free
        text = f"{in_gib(free)} free in {shared}"
        if free < _LEAST_SHARED:
            text += ", through which DataLoader workers pass batches; in a container: `docker run --shm-size 8g`"
        yield Finding("shared memory", NOTE if free < _LEAST_SHARED else OK, text)
    yield Finding("main memory", OK, f"{in_gib(available_nbytes())} that this process may still take")


def disks(folders: list[Path]) -> Iterator[Finding]:
    """Room for checkpoints and for temporary files."""
    for folder in dict.fromkeys(folders):
        free = shutil.disk_usage(folder).free
        state = PROBLEM if free < _LEAST_DISK else NOTE if free < _LITTLE_DISK else OK
        more = "" if state == OK else "; a checkpoint takes 12 to 16 bytes per parameter: free some, or save elsewhere"
        yield Finding("disk", state, f"{in_gib(free)} free in {folder}{more}")


def collectives(backend: str, ranks: int) -> Finding:
    """Start ranks as `zero run` does and let them run each collective once."""
    name = f"{backend} on {counted(ranks, 'rank')}"
    ended = run_on_ranks(ranks, "zero.tools.report.collectives", backend)
    tail = f"; the end of what the ranks wrote:\n{ended.said}" if ended.said else ", and the ranks wrote nothing"
    if ended.status is None:
        return Finding(name, PROBLEM, f"not done after {SECONDS} s{tail}")
    wrong = [f"rank {rank}: {line}" for rank, text in ended.wrote.items() for line in text.splitlines()]
    if wrong:
        return Finding(name, PROBLEM, "; ".join(wrong) + "; ranks of this machine cannot train together")
    if ended.status or len(ended.wrote) < ranks:
        return Finding(name, PROBLEM, f"exit status {ended.status}{tail}")
    return Finding(name, OK, "each collective gives what it should")
