"""Where ranks meet: the store that rank 0 keeps, and its port, told to the others on its host where none was chosen.

For that rank 0 lets its store listen on a port that the kernel gives it, and writes the port into a file in a folder
of this user. The file's name comes from what only the ranks of one job have in common, and it names the process that
wrote it: one that a killed job left behind is not believed. It is gone once all have come.
"""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
import json
import os
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path

import psutil
import torch.distributed as dist

_POLL = 0.02  # seconds between two looks at the file
_SAME = 10.0  # seconds by which the start of one process may differ in the eyes of two others: clocks are set
# Started on each host by mpirun of MPICH and Intel MPI; ranks are its children, or have a script between.
_PROXIES = ("hydra_pmi_proxy", "pmi_proxy")
_ADVICE = "set MASTER_PORT for all ranks to a free port, and they need not tell each other"


@contextlib.contextmanager
def met(job: str, meeting: int, rank: int, world_size: int, timeout: timedelta) -> Iterator[int]:
    """Gives the port of rank 0. What is inside connects to it; on rank 0, a store listens there that it shares.

    job: the same on all ranks of this job and on no others; "" for the ranks of MPICH, which are told by their
    common parent. meeting: its number among the meetings of these processes, which are told apart. Collective; all
    ranks are on this host. Raises RuntimeError when rank 0 does not come in time.
    """
    key = f"{job or _parent()} {meeting}"
    path = _folder() / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"
    if rank:
        yield _read(path, rank, timeout)
        return
    store = _store("127.0.0.1", 0, world_size, timeout)
    _write(path, store.port)
    try:
        yield store.port
    finally:
        path.unlink(missing_ok=True)


def own_store(environment: Mapping[str, str], timeout: timedelta) -> dist.TCPStore | None:
    """On rank 0 the store where the variables of torchrun say, to be held until the process group has its own.

    It listens at that address alone, as torch's would not. None on other ranks, where the launcher keeps the store, and
    where the address is a name, which other hosts may know by another address.
    """
    if environment["RANK"] != "0" or environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return None
    # ValueError: a name. OSError: what is wrong there torch will say; or the store of a group before is still there.
    with contextlib.suppress(ValueError, OSError):
        address = str(ipaddress.ip_address(environment["MASTER_ADDR"]))
        return _store(address, int(environment["MASTER_PORT"]), int(environment["WORLD_SIZE"]), timeout)
    return None


def _store(address: str, port: int, world_size: int, timeout: timedelta) -> dist.TCPStore:
    """A store that listens at `address` alone. Raises OSError where that cannot be."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    server = socket.create_server((address, port), family=family, backlog=4096)
    own = server.getsockname()[1], world_size, True, timeout
    # Shared: the process group's own store finds this one by its port, and does not listen anew.
    more = {"wait_for_workers": False, "multi_tenant": True, "master_listen_fd": server.detach()}
    return dist.TCPStore(address, *own, **more)


def _parent() -> str:
    """The process that started all ranks of this host, in words."""
    for process in psutil.Process().parents():
        if process.name() in _PROXIES:
            return f"hydra {process.pid}"
    raise ValueError(f"no process above this one is {' or '.join(_PROXIES)}, which starts the ranks; {_ADVICE}")


def _folder() -> Path:
    """A folder that only this user can read and write."""
    path = Path(tempfile.gettempdir()) / f"zero-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    found = path.lstat()
    if not path.is_dir() or path.is_symlink() or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise RuntimeError(f"{path} has to be a folder that only this user can enter, and is not; {_ADVICE}")
    return path


def _write(path: Path, port: int) -> None:
    for old in path.parent.glob("*.json*"):
        if _port(old) is None:
            old.unlink(missing_ok=True)  # of a rank 0 that was killed
    new = path.with_suffix(f".json-{os.getpid()}")
    process = psutil.Process()
    new.write_text(json.dumps([port, process.pid, process.create_time()]))
    new.replace(path)


def _read(path: Path, rank: int, timeout: timedelta) -> int:
    end = time.monotonic() + timeout.total_seconds()
    while (port := _port(path)) is None:
        if time.monotonic() > end:
            raise RuntimeError(
                f"rank {rank}: rank 0 has not said within {timeout.total_seconds():g} s on which port it listens, in "
                f"{path.parent}; has it reached zero.init_distributed() or zero.initialize()? Else {_ADVICE}"
            )
        time.sleep(_POLL)
    return port


def _port(path: Path) -> int | None:
    """What the file says; None where there is none, or none whose writer is still alive."""
    with contextlib.suppress(OSError, ValueError, psutil.Error):
        port, pid, started = json.loads(path.read_text())
        if abs(psutil.Process(pid).create_time() - started) < _SAME:
            return port
    return None
