"""`zero run`: on this machine, or on the hosts of a job."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from zero.launch import backends
from zero.launch.args.run import Request
from zero.launch.hosts.addresses import is_this_machine
from zero.launch.hosts.world import World
from zero.launch.job import Job, job
from zero.launch.node.plan import lines as node_lines
from zero.launch.node.plan import plan
from zero.launch.node.runner import run as run_node
from zero.launch.remote import job_runner, preflight
from zero.launch.say import say


def run(request: Request) -> int:
    """Do what `zero run` was asked to; the exit status is that of the first rank that failed."""
    request.check()
    made = job(request, os.environ, Path.cwd())
    if made is None:
        if request.hosts.launcher != "ssh":
            say(f"--launcher {request.hosts.launcher} is not used: there is no hostfile, so this is one machine")
        return run_node(request)
    hosts = made.world.hosts
    if len(hosts) == 1 and (request.hosts.no_ssh or is_this_machine(hosts[0].name)):
        return run_node(with_world(request, made))
    if request.hosts.no_ssh and len(hosts) > 1 and not request.dry_run:
        return run_node(there(request, made))
    if not request.dry_run:
        for note in made.notes:
            say(note)
        stopped = 0 if request.hosts.no_check else preflight.check(made)
        return stopped or job_runner.run(made)
    notes, text = made.notes, lines(made)
    if request.hosts.no_ssh:
        node = plan(there(request, made), gpus=0)  # so many only to be compared with the slots: that can wait
        notes, text = node.notes, node_lines(request, node)
    for note in notes:
        say(note)
    print("\n".join(text))
    return 0


def there(request: Request, made: Job) -> Request:
    """`request` as it is for one of several nodes, which has to know where they meet."""
    return replace(with_world(request, made), master_addr=made.master_addr, master_port=made.master_port)


def with_world(request: Request, made: Job) -> Request:
    """`request` as it is for a node: told who the hosts are, with nothing left to choose."""
    hosts = replace(request.hosts, world=made.world.encode(), include="", exclude="")
    return replace(request, num_nodes=None, num_gpus=None, hosts=hosts)


def lines(made: Job) -> list[str]:
    """What would run where: the hosts and their ranks as comments of a shell, and the command lines."""
    abouts = [about(made.world, node) for node in range(len(made.world.hosts))]
    found = backends.commands(made)
    if len(found) < len(abouts):
        return [*abouts, *(command.line() for command in found)]
    return [line for text, command in zip(abouts, found, strict=True) for line in (text, command.line())]


def about(world: World, node: int) -> str:
    """One host, its ranks and its devices, as a comment of a shell."""
    ranks, host = world.ranks(node), world.hosts[node]
    which = f"ranks {ranks[0]} to {ranks[-1]} on devices" if len(ranks) > 1 else f"rank {ranks[0]} on device"
    return f"# {host.name}: {which} {','.join(host.devices)}"
