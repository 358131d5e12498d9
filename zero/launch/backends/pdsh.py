"""pdsh: one program that holds a connection to each host.

It hands nothing on from its own stdin, but keeps that of each ssh open until it ends; so the nodes end with their stdin
here, too, only that nothing can be written on it, such as the job's secret: that they are to have in their environment.
"""

from __future__ import annotations

import os
from dataclasses import replace

from zero.launch.backends.command import Command
from zero.launch.backends.ssh import OPTIONS
from zero.launch.job import Job

_NODE = "--node_rank=%n"


def commands(job: Job) -> list[Command]:
    """One command line for all hosts; pdsh puts the number of the host in its list for %n."""
    flags = job.request.hosts
    tied = replace(job, request=replace(job.request, hosts=replace(flags, tied=0)))
    # %h, %u and %n are replaced wherever they stand, so every other percent sign is doubled.
    words = [word.replace("%", "%%") for word in tied.node_words("%n")]
    words[words.index(_NODE.replace("%", "%%"))] = _NODE
    text = replace(tied, folder=tied.folder.replace("%", "%%")).shell(words)
    names = [host.name for host in job.world.hosts]
    # -S: the exit status is the largest of the hosts'. -f: all at once. -b: one Ctrl-C is enough. -N: lines of ranks
    # name their host already.
    pdsh = ["pdsh", "-R", "ssh", "-S", "-b", "-N", "-f", str(len(names)), *flags.launcher_args]
    return [Command([*pdsh, "-w", ",".join(names), text], None, {"PDSH_SSH_ARGS_APPEND": _ssh_args(flags.ssh_port)})]


def _ssh_args(port: int | None) -> str:
    """The arguments of each ssh, after those that the user has for pdsh already; spaces are what parts them."""
    options = [f"-o{option}" for option in OPTIONS]
    own = os.environ.get("PDSH_SSH_ARGS_APPEND", "").split()
    return " ".join([*own, *options, *([f"-p{port}"] if port is not None else [])])
