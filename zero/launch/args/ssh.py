"""The command line of `zero ssh`."""

from __future__ import annotations

import argparse

from zero.launch.args import hosts as host_args
from zero.launch.args.hosts import HostFlags

_ABOUT = """Run a command on all hosts of a hostfile at once, by the login shell there.

One argument is a line for that shell, as in 'cd /data && ls | wc -l'; several are a command and its arguments, each as
it is. Every line of output begins with the name of its host. The command has an empty stdin and no terminal, and ends
when this one does. The exit status is that of the first host, in the hostfile's order, where the command failed; 255
is what ssh has for a host that it cannot reach."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give `parser` the arguments of `zero ssh`."""
    parser.usage = "zero ssh [options] command [arguments]"
    parser.description = _ABOUT
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    host_args.add_choice(parser, "-f", "-H", "--hostfile")
    parser.add_argument("--ssh_port", type=host_args.port, metavar="P", help="the port of the hosts' ssh servers")
    about = "more arguments for ssh: --launcher_args='-F config'"
    parser.add_argument("--launcher_args", type=host_args.words, default=(), metavar="ARGS", help=about)
    # As in zero run: what stands behind the first word, and a "--", is the command's.
    parser.add_argument("words", nargs=argparse.PARSER, metavar="command", help="the command, or a line for the shell")


def request(parsed: argparse.Namespace) -> tuple[HostFlags, list[str]]:
    """Which hosts, and the words of the command, of the parsed arguments."""
    words = parsed.words[1:] if parsed.words[0] == "--" else parsed.words
    return host_args.filled(HostFlags, parsed), words
