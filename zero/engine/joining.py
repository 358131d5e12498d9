"""Joining the process group of the ranks that were started together, by whatever launcher.

They meet at a store that rank 0 keeps. Where nobody has chosen a port for it, it listens on one that the kernel gives
it, and rank 0 writes that into a file in a folder of this user. The file's name comes from what only the ranks of one
job have in common, and it names the process that wrote it: one that a killed job left behind is not believed. It is
gone once all have come.
"""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
import json
import logging
import os
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from zero.core.comm import local_device
from zero.core.torch_private import nccl_options
from zero.core.world import outlast_messages
from zero.launch.launched import PORT, Launched, launched
from zero.log import log_once, rank_zero

# How often this process has met the others where nobody had chosen a port, and the port of the last time. It stands in
# the environment, as the port does.
_MET = "ZERO_MET"
_POLL = 0.02  # seconds between two looks at the file
_SAME = 10.0  # seconds by which the start of one process may differ in the eyes of two others: clocks are set
# Started on each host by mpirun of MPICH and Intel MPI; ranks are its children, or have a script between.
_PROXIES = ("hydra_pmi_proxy", "pmi_proxy")
_SHARED = (
    "torchrun's agent keeps the ranks' store when it restarts them, and with it the addresses of ranks that are gone: "
    "restarts may fail or hang; set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun on all hosts"
)
_ADVICE = "set MASTER_PORT for all ranks to a free port, and they need not tell each other"


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = PORT,
    verbose: bool = True,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Join the process group of the ranks that were started together; adopt the one that exists; else stay alone.

    The ranks may be those of `zero run`, torchrun, srun, or mpirun of Open MPI, MPICH or Intel MPI; see
    `zero.launch.launched`. Afterwards RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT
    are set. A world of one process needs no process group. The signature is that of DeepSpeed.

    dist_backend: defaults to NCCL, with gloo for the hosts, where every local rank has a GPU of its own; else gloo.
    auto_mpi_discovery: False to look at the variables of torchrun only. distributed_port: for ranks of mpirun on
    several hosts where MASTER_PORT is not set. timeout: for the ranks to come, and of the group; None: 10 minutes.
    init_method, rank, world_size: as of `torch.distributed.init_process_group`, for a process that no launcher has
    started.
    dist_init_required: False where the caller has made the group. verbose, config: not used.
    Raises ValueError when the environment is only half set, and for NCCL without a GPU; RuntimeError when there should
    be a group and is none.
    """
    restarted = _kept_by_agent(os.environ) and os.environ.get("TORCHELASTIC_MAX_RESTARTS") != "0"
    if restarted and (dist.is_initialized() or not _one_agent(os.environ)):
        log_once(logging.WARNING, _SHARED)
    if dist.is_initialized():
        _adopt(auto_mpi_discovery)
        return
    timeout = timedelta(minutes=10) if timeout is None else timeout
    if dist_init_required is False:
        raise RuntimeError(
            "init_distributed(dist_init_required=False): there is no process group; call "
            "torch.distributed.init_process_group first, or leave the argument out"
        )
    explicit = {"init_method": init_method, "rank": rank, "world_size": world_size}
    if init_method is not None or rank >= 0 or world_size >= 0:
        _join(dist_backend, timeout, **explicit)
        return
    terminal = sys.stdin is not None and not sys.stdin.closed and sys.stdin.isatty()
    environment, meetings = _before_meetings()
    found = launched(environment, distributed_port, auto_mpi_discovery, terminal)
    if found is None:
        return
    if found.port is not None:
        _complete(found, found.port)
        _join(dist_backend, timeout)
        return
    # A meeting of its own for each group: a rank that is ahead must not find the store of the group before.
    with met(found.job, meetings, found.rank, found.world_size, timeout) as port:
        _complete(found, port)
        os.environ.update({"MASTER_PORT": str(port), _MET: f"{meetings + 1}:{port}"})
        _join(dist_backend, timeout)


def refuse_alone(port: int = PORT) -> None:
    """Raise RuntimeError where a launcher has started other ranks and this one has no process group to meet them in."""
    found = None if dist.is_initialized() else launched(os.environ, port)
    if found is not None and found.world_size > 1:
        raise RuntimeError(
            f"dist_init_required=False: this is rank {found.rank} of {found.world_size} by its environment, but there "
            "is no process group, so each rank would train by itself; call torch.distributed.init_process_group first, "
            "leave the argument out, or set WORLD_SIZE=1 to train with this process alone"
        )


def refuse_nccl(backend: str | None) -> None:
    """Raise ValueError where NCCL is asked for and this process sees no GPU."""
    if "nccl" in (backend or "") and local_device().type == "cpu":
        raise ValueError(
            f"init_distributed(dist_backend={backend!r}): NCCL wants a GPU for each rank, and torch sees none here; "
            "leave the argument out, which takes NCCL where there are GPUs and else gloo, or say 'gloo'"
        )


def _before_meetings() -> tuple[dict[str, str], int]:
    """The environment without the port of an earlier group of this process, and how many such groups it has met for."""
    environment = dict(os.environ)
    count, _, port = environment.get(_MET, "").partition(":")
    if not count.isdecimal() or environment.get("MASTER_PORT") != port:
        return environment, 0
    del environment["MASTER_PORT"]
    return environment, int(count)


def _adopt(discover: bool) -> None:
    """Say in the environment which rank this is where only the launcher's own variables do, for `local_device`."""
    found = None
    with contextlib.suppress(ValueError):  # what does not fit has not kept the group from being made
        found = launched(os.environ, discover=discover)
    if found is not None and (found.rank, found.world_size) == (dist.get_rank(), dist.get_world_size()):
        _complete(found, found.port)


def _complete(found: Launched, port: int | None) -> None:
    for name, value in found.variables(port).items():
        os.environ.setdefault(name, value)


def _join(backend: str | None, timeout: timedelta, **explicit: Any) -> None:
    device = local_device()
    refuse_nccl(backend)
    if backend is None:
        ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        own_gpu = device.type == "cuda" and ranks_here <= torch.cuda.device_count()
        backend = "cpu:gloo,cuda:nccl" if own_gpu else "gloo"  # the hosts speak past their GPUs
        if device.type == "cuda" and not own_gpu:
            rank_zero(
                logging.INFO,
                "%d ranks share %d GPU(s): they talk over gloo, since NCCL wants a GPU for each",
                ranks_here,
                torch.cuda.device_count(),
            )
    if device.type == "cuda":
        torch.cuda.set_device(device)
    kept = None if explicit else own_store(os.environ, timeout)
    explicit = explicit or _store_of_attempt(os.environ, timeout)
    if "nccl" in backend and device.type == "cuda":
        explicit |= {"device_id": device, "pg_options": nccl_options(timeout)}
    dist.init_process_group(backend, timeout=timeout, **explicit)
    outlast_messages()
    del kept


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
    if environment["RANK"] != "0" or _kept_by_agent(environment):
        return None
    # ValueError: a name. OSError: what is wrong there torch will say; or the store of a group before is still there.
    with contextlib.suppress(ValueError, OSError):
        address = str(ipaddress.ip_address(environment["MASTER_ADDR"]))
        return _store(address, int(environment["MASTER_PORT"]), int(environment["WORLD_SIZE"]), timeout)
    return None


def _store_of_attempt(environment: Mapping[str, str], timeout: timedelta) -> dict[str, Any]:
    """For `init_process_group`, of an agent of torchrun that keeps the store: a part of it that is this attempt's alone.

    In the whole of it stand the addresses of ranks that are gone. Several agents have no such part in common, since each
    counts its restarts.
    """
    if not (_kept_by_agent(environment) and _one_agent(environment)):
        return {}
    store = dist.TCPStore(environment["MASTER_ADDR"], int(environment["MASTER_PORT"]), timeout=timeout)
    part = dist.PrefixStore(f"attempt {environment['TORCHELASTIC_RESTART_COUNT']}", store)
    return {"store": part, "rank": int(environment["RANK"]), "world_size": int(environment["WORLD_SIZE"])}


def _kept_by_agent(environment: Mapping[str, str]) -> bool:
    return environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _one_agent(environment: Mapping[str, str]) -> bool:
    return environment.get("GROUP_WORLD_SIZE") == "1"


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
    """The port in the file; None where there is none, or none whose writer is still alive."""
    with contextlib.suppress(OSError, ValueError, psutil.Error):
        port, pid, started = json.loads(path.read_text())
        if abs(psutil.Process(pid).create_time() - started) < _SAME:
            return port
    return None
