"""A job on hosts: who runs where, in which environment, and the command line of each node."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from zero.launch.args.run import RunRequest
from zero.launch.contract import SHUTDOWN
from zero.launch.hosts import environment as variables
from zero.launch.hosts import hostfile, nodelist, selection
from zero.launch.hosts.host_world import Host, HostWorld, decode
from zero.launch.launch_messages import LaunchError
from zero.launch.launched import PORT
from zero.log import counted

MOST_BYTES = 128 * 1024 - 1  # of one argument of a program: MAX_ARG_STRLEN of Linux, less the zero at its end
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class Job:
    """The job that every backend starts, each in its own way."""

    request: RunRequest
    world: HostWorld
    master_addr: str
    master_port: int
    environment: Mapping[str, str]  # what a node's processes get on top of what its own login gives
    folder: str  # where they run, as the launcher does
    notes: tuple[str, ...] = ()  # what was decided for the user, to be said once
    secrets: Mapping[str, str] = field(default_factory=dict)  # more of the environment, which stands on no command line

    def node_words(self, node: str | None) -> list[str]:
        """The program and arguments of the launcher on the host number `node`, with the variables set by `env`.

        `node` None: the node is to find out by itself, from what a scheduler tells it.
        """
        request = self.request
        flags = {
            "--node_rank": node,
            "--launcher": request.hosts.launcher,
            "--world": self.world.encode(),
            "--master_addr": self.master_addr,
            "--master_port": self.master_port,
            "--max_restarts": request.elastic.max_restarts or None,
            "--min_nodes": request.elastic.min_nodes,
            "--max_nodes": request.elastic.max_nodes,
            "--shutdown_timeout": None if (seconds := request.elastic.shutdown_timeout) == SHUTDOWN else seconds,
            "--log_dir": request.log_dir,
            "--bind_core_list": request.bind_core_list,
        }
        switches = {
            "--module": request.module,
            "--no_python": request.no_python,
            "--bind_cores_to_rank": request.bind_cores,
            "--quiet": request.quiet,
            "--as-deepspeed": request.as_deepspeed,
            "--no_local_rank": request.as_deepspeed and not request.gives_local_rank,
            "--stdin": request.hosts.stdin,
            "--no_env_files": True,  # what they say stands in front of this already
        }
        return [
            *[*self.python(), "-u", "-m", "zero", "run", "--no_ssh"],
            # One word each, so that a value that begins with a dash is no flag.
            *(f"{flag}={value}" for flag, value in flags.items() if value is not None),
            *request.config.words(),
            *(switch for switch, on in switches.items() if on),
            *["--", request.script, *request.script_args],
        ]

    def python(self) -> list[str]:
        """The launcher's Python on a host, with the job's variables set by `env`."""
        variables = [f"{name}={value}" for name, value in self.environment.items()]
        return [*(["env", *variables] if variables else []), sys.executable]

    def shell(self, words: list[str]) -> str:
        """One line for `sh` that runs `words` in the job's folder, in place of the shell. The only quoting there is.

        Any login shell in the manner of sh takes it; csh wants no line breaks in it, and fish no backslashes.
        """
        # exec: a signal or a hang-up for the shell has to reach the launcher.
        text = f"cd {shlex.quote(self.folder)} && exec {shlex.join(words)}"
        if (nbytes := len(text.encode(errors="surrogateescape"))) > MOST_BYTES:
            raise LaunchError(
                f"the command line of a node has {nbytes} bytes, more than the {MOST_BYTES} that a program takes "
                "as one argument; put some of the script's arguments, or of the variables, into a file"
            )
        return text


def job_of(request: RunRequest, environment: Mapping[str, str], folder: Path) -> Job | None:
    """The job of `request` on the hosts of a hostfile or an allocation; None where none are named.

    `environment` is the launcher's, `folder` where it runs.
    """
    chosen = _hosts(request, environment)
    if chosen is None:
        return None
    hosts, notes = chosen[0][: request.elastic.max_nodes], chosen[1]
    world = HostWorld(hosts)
    flags = request.hosts
    if request.elastic.min_nodes is not None and request.elastic.min_nodes > len(hosts):
        raise LaunchError(f"--min_nodes: got {request.elastic.min_nodes}, but the job has {_hosts_in_words(hosts)}")
    if flags.node_rank is not None and flags.node_rank >= len(hosts):
        raise LaunchError(f"--node_rank: got {flags.node_rank}, wanted 0 to {len(hosts) - 1}: {_hosts_in_words(hosts)}")
    loopback = [host.name for host in hosts if host.name in _LOOPBACK]
    if len(hosts) > 1 and loopback and request.master_addr is None:
        raise LaunchError(
            f"host {loopback[0]!r} is another machine to each of the hosts; give it the name that the others know it by"
        )
    from_files = variables.from_files(environment, folder, flags.env_file, not flags.no_env_files)
    values = sorted({**variables.forwarded(environment), **from_files.values}.items())
    return Job(
        request,
        world,
        request.master_addr or (hosts[0].name if len(hosts) > 1 else "127.0.0.1"),
        request.master_port or PORT,  # a free one cannot be looked for on another host
        {name: text for name, text in values if not variables.is_secret(name)},
        str(folder),
        () if request.quiet else (*notes, *note_of_files(from_files)),
        {name: text for name, text in values if variables.is_secret(name)},
    )


def note_of_files(from_files: variables.Variables) -> tuple[str, ...]:
    """What is to be said of variables that come from files: their names, as values may be secrets."""
    if not from_files.values:
        return ()
    return (f"{', '.join(from_files.values)} from {', '.join(from_files.files)}",)


def node_of(request: RunRequest, world: HostWorld, environment: Mapping[str, str]) -> int:
    """The number of the host that this process, a node of `world`, runs on."""
    if request.hosts.node_rank is not None:
        return request.hosts.node_rank
    # By name: Slurm numbers the nodes in an order of its own.
    if name := environment.get("SLURMD_NODENAME"):
        return world.node(name)
    raise LaunchError("--no_ssh: give --node_rank too, from 0 on the first host to the number of hosts less 1")


def _hosts(request: RunRequest, environment: Mapping[str, str]) -> tuple[tuple[Host, ...], tuple[str, ...]] | None:
    flags = request.hosts
    if flags.world is not None:
        return decode(flags.world).hosts, ()
    choice = flags.choice(request.num_nodes, request.num_gpus)
    path = hostfile.DEFAULT if flags.hostfile is None and Path(hostfile.DEFAULT).exists() else flags.hostfile
    if path:
        notes = () if flags.hostfile else (f"the hosts are those of {path}",)
        return selection.select(hostfile.read(path), choice), notes
    if flags.launcher == "slurm":
        hosts = nodelist.allocation(environment, request.num_gpus)
        if hosts is None:
            raise LaunchError(
                "--launcher slurm: there is no hostfile, and this is not inside an allocation "
                f"({nodelist.LIST} is not set)"
            )
        return selection.select(hosts, choice), ()
    if flags.no_ssh:
        raise LaunchError("--no_ssh: give --hostfile, the same on every host")
    return None


def _hosts_in_words(hosts: tuple[Host, ...]) -> str:
    return f"{counted(len(hosts), 'host')}: {selection.described(hosts)}"
