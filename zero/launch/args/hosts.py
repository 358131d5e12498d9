"""The flags of `zero run` that say which hosts there are and how to reach them."""

from __future__ import annotations

import argparse
import math
import shlex
from dataclasses import dataclass, fields
from typing import Any

from zero.launch.hosts.hostfile import DEFAULT, MOST
from zero.launch.hosts.selection import SlotChoice
from zero.launch.launch_messages import LaunchError

_FACTORS = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
LAUNCHERS = ("ssh", "slurm", "openmpi", "mpich")  # all but the first by daemons of their own, which end all with one
_OF_DEEPSPEED = {
    "impi": "the mpirun of Intel MPI is --launcher mpich",
    "mvapich": "the mpirun of MVAPICH is --launcher mpich",
}


@dataclass(frozen=True)
class HostFlags:
    """Which hosts, and how to reach them. The last two are of the command line that the launcher writes for a node."""

    hostfile: str | None = None  # None: the default one, where there is one; empty: none
    include: str = ""
    exclude: str = ""
    launcher: str = "ssh"
    launcher_args: tuple[str, ...] = ()
    ssh_port: int | None = None
    no_ssh: bool = False
    node_rank: int | None = None
    no_check: bool = False
    env_file: str | None = None
    no_env_files: bool = False
    no_local_rank: bool = False  # of DeepSpeed's launcher: see RunRequest.gives_local_rank
    world: str | None = None  # as HostWorld.encode writes it, in place of a hostfile
    stdin: bool = False  # the launcher's messages come by it, see node/launcher_pipe.py

    def choice(self, num_nodes: int | None, num_gpus: int | None) -> SlotChoice:
        """What is to be taken of the hosts there are."""
        return SlotChoice(self.include, self.exclude, num_nodes, num_gpus)

    def check(self) -> None:
        """Raise `LaunchError` for flags that cannot stand together."""
        if self.node_rank is not None and not self.no_ssh:
            raise LaunchError("--node_rank: means something with --no_ssh only, where each host starts itself")
        if self.ssh_port is not None and self.launcher != "ssh":
            raise LaunchError(f"--ssh_port: {self.launcher} does not ask us; put the port into ~/.ssh/config")
        if self.ssh_port is not None and self.no_ssh:
            raise LaunchError("--ssh_port and --no_ssh: give one of them")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give `parser` the flags of `HostFlags`."""
    which = parser.add_argument_group("which hosts")
    about = f"lines NAME slots=N (default: {DEFAULT} if there; '': this machine)"
    which.add_argument("-H", "--hostfile", metavar="FILE", help=about)
    about = "only these: worker-0@worker-1:0,2, all slots without a :"
    which.add_argument("-i", "--include", default="", metavar="SPEC", help=about)
    about = "all but these, written in the same way"
    which.add_argument("-e", "--exclude", default="", metavar="SPEC", help=about)
    how = parser.add_argument_group("how to reach them")
    about = f"{', '.join(LAUNCHERS)} (default: ssh, and what pdsh is taken for)"
    how.add_argument("--launcher", type=_launcher, default="ssh", metavar="NAME", help=about)
    about = "more arguments for it: --launcher_args='-v'"
    how.add_argument("--launcher_args", type=words, default=(), metavar="ARGS", help=about)
    how.add_argument("--ssh_port", type=port, metavar="P", help="the port of the hosts' ssh servers")
    how.add_argument("--no_ssh", action="store_true", help="this command runs on every host, with its --node_rank")
    how.add_argument("--node_rank", type=at_least(0), metavar="N", help="the place of this host, with --no_ssh")
    about = "do not look at the hosts before the start"
    how.add_argument("--no_check", "--no_ssh_check", action="store_true", help=about)
    about = "variables for all ranks, as in ~/.zero_env and .zero_env (lines NAME=VALUE)"
    how.add_argument("--env_file", metavar="FILE", help=about)
    how.add_argument("--no_env_files", action="store_true", help="do not read ~/.zero_env, .zero_env and DeepSpeed's")
    how.add_argument("--no_local_rank", action="store_true", help=argparse.SUPPRESS)
    how.add_argument("--world", help=argparse.SUPPRESS)
    how.add_argument("--stdin", action="store_true", help=argparse.SUPPRESS)


def filled(kind: type[Any], parsed: argparse.Namespace, **more: Any) -> Any:
    """A dataclass `kind` with `more`, and its other fields from the parsed arguments where they have them."""
    return kind(**{field.name: getattr(parsed, field.name) for field in fields(kind) if field.name in parsed} | more)


def at_least(low: int, most: int = 999_999_999):
    """A type of argument: integers from `low` to `most`."""

    def number(text: str) -> int:
        if not (text.isascii() and text.removeprefix("-").isdigit() and len(text) < 10) or not low <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"got {text!r}, wanted an integer of at least {low} and at most {most:,}")
        return int(text)

    return number


ranks_of_host = at_least(1, MOST)


def above_zero(text: str) -> float:
    """A type of argument: a number above 0, such as 7e9 or 7B."""
    factor = _FACTORS.get(text[-1:].lower(), 1.0)
    try:
        value = factor * float(text if factor == 1.0 else text[:-1])
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"got {text!r}, wanted a number above 0")
    return value


def port(text: str) -> int:
    """A type of argument: a port."""
    if not (text.isascii() and text.isdigit() and len(text) < 10) or not 1 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"got {text!r}, wanted a port from 1 to 65535")
    return int(text)


def _launcher(text: str) -> str:
    name = text.lower().replace("pdsh", "ssh")  # which reaches the same hosts, by connections of its own
    if name not in LAUNCHERS:
        instead = f"; {_OF_DEEPSPEED[name]}" if name in _OF_DEEPSPEED else ""
        raise argparse.ArgumentTypeError(f"got {text!r}, wanted one of {', '.join(LAUNCHERS)}{instead}")
    return name


def words(text: str) -> tuple[str, ...]:
    """A type of argument: words as a shell splits them."""
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"got {text!r}, which no shell would split: {error}") from error
