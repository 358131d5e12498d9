"""`zero run`: on this machine, or on the hosts of a job."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from zero.launch import backends
from zero.launch.args.run import RunRequest
from zero.launch.hosts.addresses import is_this_machine
from zero.launch.job import Job, job_of
from zero.launch.launch_messages import say
from zero.launch.node.node import run as run_node
from zero.launch.remote import job_runner, preflight


def run(request: RunRequest, groups: Callable[[Sequence[int]], list[str]] = lambda hosts: []) -> int:
    """Do what `zero run` was asked to; the exit status is that of the first rank that failed.

    groups: lines of a dry run about so many ranks on each host.
    """
    request.check()
    if request.stray_options:
        words = ", ".join(request.stray_options)
        say(f"{words} behind the script: given to it, which does not name it; options of zero run go before the script")
    job = job_of(request, os.environ, Path.cwd())
    if job is None:
        if request.hosts.launcher != "ssh":
            say(f"--launcher {request.hosts.launcher} is not used: there is no hostfile, so this is one machine")
        return run_node(request, groups)
    # A node is told who the hosts are, with nothing left to choose.
    hosts = replace(request.hosts, world=job.world.encode(), include="", exclude="")
    on_node = replace(request, num_nodes=None, num_gpus=None, hosts=hosts)
    names = [host.name for host in job.world.hosts]
    if len(names) == 1 and (request.hosts.no_ssh or is_this_machine(names[0])):
        return run_node(on_node, groups)
    if request.hosts.no_ssh:
        return run_node(replace(on_node, master_addr=job.master_addr, master_port=job.master_port))
    for note in job.notes:
        say(note)
    if request.dry_run:
        print("\n".join([*groups(job.world.counts), *lines(job)]))
        return 0
    stopped = 0 if request.hosts.no_check else preflight.check(job)
    return stopped or job_runner.run(job)


def lines(job: Job) -> list[str]:
    """What would run where: the hosts and their ranks as comments of a shell, and the command lines."""
    comments = []
    for node, host in enumerate(job.world.hosts):
        ranks = job.world.ranks(node)
        which = f"ranks {ranks[0]} to {ranks[-1]} on devices" if len(ranks) > 1 else f"rank {ranks[0]} on device"
        comments.append(f"# {host.name}: {which} {','.join(host.devices)}")
    commands = [command.line() for command in backends.commands(job)]
    if len(commands) < len(comments):
        return [*comments, *commands]
    return [line for pair in zip(comments, commands, strict=True) for line in pair]
