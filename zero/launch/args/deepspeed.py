"""Flags of other launchers that are none of ours: each is taken, or refused with what to do instead."""

from __future__ import annotations

import argparse

LEVELS = ("debug", "info", "warning", "error", "critical")
QUIET = LEVELS[2:]
# What DeepSpeed or torchrun has to be told and is always so here.
_ALWAYS = ("--no_local_rank", "--force_multi", "--standalone")
_MEETING = "the hosts of a --hostfile find each other, at --master_addr and --master_port if you give them"
_ELASTIC = "--max_restarts N restarts the ranks, with --min_nodes M on fewer hosts when some are lost"
_REFUSED = {
    "--save_pid": "no file with a process id is written; the shell has it in $! after `zero run ... &`",
    "--venv_script": "every host runs the Python that runs this command, and so its environment; variables go into "
    ".zero_env or --env_file",
    "--autotuning": "`zero tune script.py` finds a configuration",
    "--elastic_training": _ELASTIC,
    "--min_elastic_nodes": _ELASTIC,
    **dict.fromkeys(("--rdzv_backend", "--rdzv_endpoint", "--rdzv_id", "--rdzv_conf"), _MEETING),
    "--max_elastic_nodes": f"{_ELASTIC}; --num_nodes says how many there are at most",
}
_LAUNCHERS = {
    "impi": "the mpirun of Intel MPI is --launcher mpich",
    "mvapich": "the mpirun of MVAPICH is --launcher mpich",
}


class _Refused(argparse.Action):
    """Says what to do instead, before anything else that may be wrong with the command line."""

    def __call__(self, parser, namespace, values, option_string=None) -> None:
        """Leave with the message."""
        parser.error(f"{option_string}: this flag of another launcher is not here: {_REFUSED[option_string]}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give `parser` the flags, which its help does not list."""
    for flag in _ALWAYS:
        parser.add_argument(flag, action="store_true", help=argparse.SUPPRESS)
    for flag in _REFUSED:
        parser.add_argument(flag, action=_Refused, nargs="?", help=argparse.SUPPRESS)
    parser.add_argument("--log_level", type=str.lower, choices=LEVELS, default="info", help=argparse.SUPPRESS)


def about_launcher(name: str) -> str:
    """What to take in place of a launcher of DeepSpeed's, in words that go on a message; empty for any other name."""
    return f"; {_LAUNCHERS[name]}" if name in _LAUNCHERS else ""
