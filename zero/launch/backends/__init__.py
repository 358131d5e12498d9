"""The ways to start a job on its hosts: a function from the job to command lines for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from zero.launch.backends import mpich, openmpi, pdsh, slurm, ssh
from zero.launch.backends.command import Command
from zero.launch.job import Job

BACKENDS: Mapping[str, Callable[[Job], list[Command]]] = {
    "ssh": ssh.commands,
    "pdsh": pdsh.commands,
    "slurm": slurm.commands,
    "openmpi": openmpi.commands,
    "mpich": mpich.commands,
}


def commands(job: Job) -> list[Command]:
    """The command lines that start `job` by the launcher that was asked for."""
    return BACKENDS[job.request.hosts.launcher](job)
