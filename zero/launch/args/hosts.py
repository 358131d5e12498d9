"""The flags that say which hosts there are and how to reach them: of `zero run`, and those of `zero ssh`."""

from __future__ import annotations

import argparse
import math
import shlex
from dataclasses import dataclass, fields
from typing import Any

from zero.launch.hosts.hostfile import DEFAULT, MOST
from zero.launch.hosts.selection import SlotChoice
from zero.launch.launch_messages import LaunchError

LAUNCHERS = ("ssh", "pdsh", "slurm", "openmpi", "mpich")
BY_SSH = ("ssh", "pdsh")  # the others start processes by daemons of their own
ENDS_ALL = tuple(name for name in LAUNCHERS if name not in BY_SSH)  # when they lose a host
_OF_DEEPSPEED = {
    "impi": "the mpirun of Intel MPI is --launcher mpich",
    "mvapich": "the mpirun of MVAPICH is --launcher mpich",
}
_SSH = """Run a command on all hosts of a hostfile at once, by the login shell there.

One argument is a line for that shell, as in 'cd /data && ls | wc -l'; several are a command and its arguments, each as
it is. Every line of output begins with the name of its host. The command has an empty stdin and no terminal, and ends
when this one does. The exit status is that of the first host, in the hostfile's order, where the command failed; 255
is what ssh has for a host that it cannot reach."""


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
    world: str | None = None  # as HostWorld.encode writes it, in place of a hostfile
    stdin: str | None = None  # what of the launcher's is on it, see node/launcher_pipe.py

    def choice(self, num_nodes: int | None, num_gpus: int | None) -> SlotChoice:
        """What is to be taken of the hosts there are."""
        return SlotChoice(self.include, self.exclude, num_nodes, num_gpus)

    def check(self) -> None:
        """Raise `LaunchError` for flags that cannot stand together."""
        if self.node_rank is not None and not self.no_ssh:
            raise LaunchError("--node_rank: means something with --no_ssh only, where each host starts itself")
        if self.ssh_port is not None and self.launcher not in BY_SSH:
            raise LaunchError(f"--ssh_port: {self.launcher} does not ask us; put the port into ~/.ssh/config")
        if self.ssh_port is not None and self.no_ssh:
            raise LaunchError("--ssh_port and --no_ssh: give one of them")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give `parser` the flags of `HostFlags`."""
    add_choice(parser.add_argument_group("which hosts"), "-H", "--hostfile", none="; '': this machine")
    how = parser.add_argument_group("how to reach them")
    about = f"{', '.join(LAUNCHERS)} (default: ssh)"
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
    how.add_argument("--world", help=argparse.SUPPRESS)
    how.add_argument("--stdin", help=argparse.SUPPRESS)


def add_ssh(parser: argparse.ArgumentParser) -> None:
    """Give `parser` the arguments of `zero ssh`."""
    parser.usage = "zero ssh [options] command [arguments]"
    parser.description = _SSH
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_choice(parser, "-f", "-H", "--hostfile")
    parser.add_argument("--ssh_port", type=port, metavar="P", help="the port of the hosts' ssh servers")
    about = "more arguments for ssh: --launcher_args='-F config'"
    parser.add_argument("--launcher_args", type=words, default=(), metavar="ARGS", help=about)
    # As in zero run: what stands behind the first word, and a "--", is the command's.
    parser.add_argument("words", nargs=argparse.PARSER, metavar="command", help="the command, or a line for the shell")


def ssh_request(parsed: argparse.Namespace) -> tuple[HostFlags, list[str]]:
    """Which hosts, and the words of the command, of the parsed arguments."""
    words = parsed.words[1:] if parsed.words[0] == "--" else parsed.words
    return filled(HostFlags, parsed), words


def add_choice(parser: argparse._ActionsContainer, *names: str, none: str = "") -> None:
    """Give `parser` the flags that choose hosts; the hostfile's has `names`, and `none` says what is taken without."""
    about = f"lines NAME slots=N (default: {DEFAULT} if there{none})"
    parser.add_argument(*names, metavar="FILE", help=about)
    about = "only these: worker-0@worker-1:0,2, all slots without a :"
    parser.add_argument("-i", "--include", default="", metavar="SPEC", help=about)
    about = "all but these, written in the same way"
    parser.add_argument("-e", "--exclude", default="", metavar="SPEC", help=about)


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
    """A type of argument: a number above 0."""
    try:
        value = float(text)
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
    name = text.lower()
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
