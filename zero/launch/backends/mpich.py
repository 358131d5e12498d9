"""MPICH and what uses its mpiexec (Hydra), such as Intel MPI: one launcher per host; the ranks use no MPI."""

from __future__ import annotations

from zero.launch.backends.command import Command
from zero.launch.job import Job


def commands(job: Job) -> list[Command]:
    """One command line for all hosts, with a part of its own for each; part i runs on host i of the list.

    The node's command line is one argument for sh: a lone ":" among the script's arguments would begin another part.
    """
    names = ",".join(host.name for host in job.world.hosts)
    words = ["mpirun", *job.request.hosts.launcher_args, "-hosts", names, "-ppn", "1", "-bind-to", "none"]
    for node in range(len(job.world.hosts)):
        words += [":"] if node else []
        words += ["-n", "1", "sh", "-c", job.shell(job.node_words(str(node)))]
    return [Command(words)]
