"""From a request to the processes that will run: how many, on which port, in which environment."""

import os
import shlex
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass

from zero.launch.args import LaunchError, Request

THREADS = "OMP_NUM_THREADS"
_PATIENCE = 30  # seconds for the kernel to take a port from ranks that were killed


@dataclass(frozen=True)
class Plan:
    """The processes of one machine."""

    ranks: int
    master_addr: str
    master_port: int
    shared: Mapping[str, str]  # what every rank gets on top of the environment of the launcher
    notes: tuple[str, ...]  # what was decided for the user, to be said once

    def environment(self, rank: int) -> dict[str, str]:
        """What rank `rank` gets on top of the environment of the launcher."""
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.ranks),
            "LOCAL_WORLD_SIZE": str(self.ranks),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
            **self.shared,
        }


def plan(request: Request, gpus: int) -> Plan:
    """Decide on the processes for a machine on which `gpus` GPUs are visible."""
    ranks, notes = _ranks(request, gpus)
    shared = {}
    if THREADS not in os.environ:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        shared[THREADS] = str(max(1, cores // ranks))
        notes.append(f"{THREADS}={shared[THREADS]} for each rank ({cores} cores, {ranks} ranks)")
    port = _free_port() if request.master_port is None else _checked_port(request.master_port)
    return Plan(ranks, request.master_addr, port, shared, tuple(notes))


def lines(request: Request, made: Plan) -> list[str]:
    """The command lines of all ranks, as a shell would take them."""
    command = shlex.join(request.command())
    return [
        " ".join(f"{key}={shlex.quote(value)}" for key, value in made.environment(rank).items()) + f" {command}"
        for rank in range(made.ranks)
    ]


def restart_port(asked: int | None) -> int:
    """The port for the next attempt: another free one, or the one that was asked for, once it is free again."""
    if asked is None:
        return _free_port()
    end = time.monotonic() + _PATIENCE
    while True:
        try:
            return _checked_port(asked)
        except LaunchError:
            if time.monotonic() > end:
                raise
            time.sleep(0.1)


def _ranks(request: Request, gpus: int) -> tuple[int, list[str]]:
    if request.num_gpus is None:
        if gpus:
            return gpus, []
        return 1, ["no GPU is visible: 1 process on the CPU (--num_gpus N starts N)"]
    if gpus and request.num_gpus > gpus:
        raise LaunchError(
            f"--num_gpus: got {request.num_gpus}, but {gpus} GPU{'s are' if gpus > 1 else ' is'} visible; "
            "hide them with CUDA_VISIBLE_DEVICES= to run on the CPU"
        )
    return request.num_gpus, []


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _checked_port(port: int) -> int:
    with socket.socket() as probe:
        # As torch's store does it: a port that an ended run left in TIME_WAIT is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise LaunchError(
                f"--master_port: cannot listen on {port} ({error.strerror}); leave it out for a free one"
            ) from error
    return port
