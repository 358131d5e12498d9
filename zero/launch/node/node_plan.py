"""From a request to the processes that will run on this machine: how many, on which port, in which environment."""

import gc
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from zero.launch import as_deepspeed
from zero.launch.args.run import LaunchError, RunRequest
from zero.launch.contract import CONFIG, SETS
from zero.launch.hosts import environment as variables
from zero.launch.hosts import selection
from zero.launch.hosts.addresses import free_port, is_this_machine, port_problem
from zero.launch.hosts.devices import numbered, on_node, parse_cores, shared_cores, visible
from zero.launch.hosts.host_world import Host, HostWorld, decode
from zero.launch.job import node_of, note_of_files
from zero.launch.launch_messages import listed
from zero.launch.node import bind
from zero.launch.process.process import Command
from zero.log import VARIABLE, counted

THREADS = "OMP_NUM_THREADS"
DEVICES = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class NodePlan:
    """The processes of one machine, which is the host number `node` of `world`."""

    world: HostWorld
    node: int
    master_addr: str
    master_port: int
    shared: Mapping[str, str]  # what every rank gets on top of the environment of the launcher
    notes: tuple[str, ...]  # what was decided for the user, to be said once
    bound: tuple[tuple[int, ...], ...] = ()  # the cores of each local rank; empty: those that the launcher has

    @property
    def ranks(self) -> int:
        """The number of processes of this machine."""
        return len(self.world.ranks(self.node))

    def environment(self, local: int) -> dict[str, str]:
        """What rank number `local` of this machine gets on top of the environment of the launcher."""
        return {**self.world.environment(self.node, local, self.master_addr, self.master_port), **self.shared}


class _ThisHost(NamedTuple):
    """Which of the hosts this machine is, and the devices that its ranks are to see; None: as the launcher does."""

    world: HostWorld
    node: int
    devices: tuple[str, ...] | None
    notes: tuple[str, ...] = ()


def gpu_count() -> int:
    """The number of GPUs that this machine lets us see. torch is imported only where it could be any."""
    if visible(os.environ) == ():
        return 0
    # Nothing of it is garbage: to look for some costs a quarter of the import, and again when the process ends.
    gc.disable()
    try:
        import torch
    finally:
        gc.freeze()
        gc.enable()
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def plan(request: RunRequest, gpus: int) -> NodePlan:
    """Decide on the processes for a machine on which `gpus` GPUs are visible."""
    here = _of_world(request, gpus) if request.hosts.world is not None else _alone(request, gpus)
    notes = list(here.notes)
    shared: dict[str, str] = {}
    from_files = variables.from_files(os.environ, Path.cwd(), request.hosts.env_file, not request.hosts.no_env_files)
    shared.update(from_files.values)
    notes += note_of_files(from_files)
    if request.as_deepspeed:
        notes += [] if here.node or as_deepspeed.is_open(os.environ) else [as_deepspeed.note()]
        shared.update(as_deepspeed.variables({**os.environ, **shared}))
    if request.gives_local_rank and not here.node:
        notes.append("the script gets --local_rank=N, as from DeepSpeed's launcher; --no_local_rank leaves it out")
    if request.config.file is not None:
        shared[CONFIG] = os.path.abspath(request.config.file)
    if request.config.sets:
        shared[SETS] = json.dumps(request.config.sets)
    if here.devices is not None:
        shared[DEVICES] = ",".join(here.devices)
    ranks = len(here.world.ranks(here.node))
    bound = _bound(request, ranks)
    if THREADS not in os.environ and THREADS not in shared:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        count = sum(map(len, bound)) or cores
        shared[THREADS] = str(max(1, count // ranks))
        notes.append(f"{THREADS}={shared[THREADS]} for each rank ({counted(count, 'core')}, {counted(ranks, 'rank')})")
    port = free_port() if request.master_port is None else request.master_port
    if request.master_port is not None and here.node == 0 and (why := port_problem(port)):
        raise LaunchError(f"--master_port: cannot listen on {port} ({why}); leave it out for a free one")
    if request.quiet:
        notes.clear()
        shared[VARIABLE] = "warning"
    return NodePlan(here.world, here.node, request.master_addr or "127.0.0.1", port, shared, tuple(notes), bound)


def command(request: RunRequest, plan: NodePlan, local: int, ends: bool) -> list[str]:
    """The command line of rank number `local` here; `ends`: the rank is to end when its launcher is killed."""
    words = request.command(local)
    if not (ends or plan.bound):
        return words
    bound = ";".join(",".join(map(str, one)) for one in plan.bound)
    return [sys.executable, "-I", "-S", bind.__file__, str(os.getpid()) if ends else "", bound, *words]


def lines(request: RunRequest, plan: NodePlan) -> list[str]:
    """The command lines of all ranks of this machine, as a shell would take them."""
    words = [command(request, plan, local, ends=False) for local in range(plan.ranks)]
    return [Command(each, None, plan.environment(local)).line() for local, each in enumerate(words)]


def _of_world(request: RunRequest, gpus: int) -> _ThisHost:
    """For a node that is told who the hosts are."""
    world = decode(request.hosts.world or "")
    node = node_of(request, world, os.environ) if len(world.hosts) > 1 else 0
    devices = world.hosts[node].devices
    if "SLURMD_NODENAME" in os.environ and request.hosts.no_ssh:
        return _ThisHost(world, node, on_node(devices, os.environ))
    seen = visible(os.environ)
    if seen is None:
        outside = [device for device in devices if gpus and device.isdigit() and int(device) >= gpus]
        if outside:
            raise LaunchError(
                f"host {world.hosts[node].name!r} has {counted(gpus, 'GPU')} and so no slot {outside[0]!r}"
            )
    notes = [] if seen in (None, (), devices) else [f"{DEVICES}={','.join(seen)} is not used: the hosts' slots are"]
    return _ThisHost(world, node, devices, tuple(notes))


def _alone(request: RunRequest, gpus: int) -> _ThisHost:
    """For a machine that is the only one."""
    more = request.elastic
    nodes = [("--num_nodes", request.num_nodes), ("--min_nodes", more.min_nodes), ("--max_nodes", more.max_nodes)]
    for flag, value in nodes:
        if value is not None and value > 1:
            raise LaunchError(f"{flag}: got {value}, but there is this machine only; name others with --hostfile")
    choice = request.hosts.choice(None, request.num_gpus)
    if not (choice.include or choice.exclude):
        ranks, notes = request.num_gpus, ()
        if ranks is None:
            ranks = gpus or 1
            notes = () if gpus else ("no GPU is visible: 1 process on the CPU (--num_gpus N starts N)",)
        elif ranks > gpus > 0:
            raise LaunchError(
                f"--num_gpus: got {ranks}, but {counted(gpus, 'GPU')} {'are' if gpus > 1 else 'is'} visible; "
                "hide them with CUDA_VISIBLE_DEVICES= to run on the CPU"
            )
        return _ThisHost(HostWorld((Host("localhost", numbered(ranks)),)), 0, None, notes)
    if not gpus:
        raise LaunchError("--include and --exclude choose from a hostfile's slots or from GPUs, and no GPU is visible")
    seen = visible(os.environ)
    pool = numbered(gpus) if seen is None else seen[:gpus]
    names = [part.partition(":")[0].strip() for part in (choice.include or choice.exclude).split("@")]
    name = next((name for name in names if is_this_machine(name)), "localhost")
    chosen = selection.select([Host(name, pool)], choice)
    return _ThisHost(HostWorld(chosen), 0, chosen[0].devices)


def _bound(request: RunRequest, ranks: int) -> tuple[tuple[int, ...], ...]:
    """The cores of each of `ranks` local ranks; empty where they are to be bound to none."""
    if not request.bind_cores:
        return ()
    if not hasattr(os, "sched_setaffinity"):
        raise LaunchError("--bind_cores_to_rank: this system has no way to bind a process to cores; leave it out")
    allowed = sorted(os.sched_getaffinity(0))
    chosen = allowed if request.bind_core_list is None else parse_cores(request.bind_core_list)
    if outside := [str(core) for core in chosen if core not in allowed]:
        raise LaunchError(
            f"--bind_core_list: core {listed(outside)} is not one that this machine gives to the launcher, which may "
            f"run on {listed([str(core) for core in allowed])}"
        )
    return tuple(shared_cores(chosen, ranks))
