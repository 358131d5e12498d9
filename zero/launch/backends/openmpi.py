"""Open MPI: mpirun starts one launcher per host; the ranks are the launcher's, and use no MPI."""

from __future__ import annotations

from zero.launch.backends.command import Command
from zero.launch.job import Job
from zero.launch.secret import VARIABLE


def commands(job: Job) -> list[Command]:
    """One command line for all hosts, with a part of its own for each.

    Each part names its host, as mpirun orders hosts in its own way, the one that it runs on first. The node's command
    line is one argument for sh: a lone ":" among the script's arguments would begin another part. The job's secret is
    in mpirun's environment, and only its name is here.
    """
    words = ["mpirun", *job.request.hosts.launcher_args, "--bind-to", "none"]
    for node, host in enumerate(job.world.hosts):
        words += [":"] if node else []
        words += ["-n", "1", "--host", host.name, "-x", VARIABLE, "sh", "-c", job.shell(job.node_words(str(node)))]
    return [Command(words)]
