"""The command line of `zero run`."""

import argparse
import importlib.machinery
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

_ABOUT = """Run a training script with one process per GPU of this machine, or with N processes on the CPU.

Each process finds RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT in its
environment, as under torchrun. No --local_rank is added to the arguments of the script: read LOCAL_RANK.
The exit status is that of the first rank that failed, or 128 + n when signal n killed it."""


class LaunchError(ValueError):
    """What was asked for cannot be started; nothing has been."""


@dataclass(frozen=True)
class Request:
    """What `zero run` was asked to do."""

    script: str
    script_args: tuple[str, ...]
    num_gpus: int | None  # None: as many as there are
    num_nodes: int
    master_addr: str
    master_port: int | None  # None: a free one
    module: bool
    no_python: bool
    max_restarts: int
    log_dir: str | None
    dry_run: bool

    def command(self) -> list[str]:
        """The command line of every rank."""
        if self.no_python:
            return [self.script, *self.script_args]
        mode = ["-m"] if self.module else []
        # -u, so that the last lines of a rank that dies are not lost in a buffer
        return [sys.executable, "-u", *mode, self.script, *self.script_args]

    def check(self) -> None:
        """Raise `LaunchError` for what can be known to be wrong before anything starts."""
        if self.num_nodes != 1:
            raise LaunchError(
                f"--num_nodes: got {self.num_nodes}, but this release starts one machine only; "
                "on several, run the script under torchrun on each"
            )
        if self.module and self.no_python:
            raise LaunchError("--module and --no_python: give one of them")
        if self.module:
            self._check_module()
        elif self.no_python:
            if shutil.which(self.script) is None:
                raise LaunchError(f"there is no program {self.script!r} in PATH or in {Path.cwd()}")
        elif not Path(self.script).exists():
            where = "" if os.path.isabs(self.script) else f" in {Path.cwd()}"
            raise LaunchError(f"there is no script {self.script!r}{where}")

    def _check_module(self) -> None:
        # Only the first part of the name: to look deeper would import the package here.
        top = self.script.split(".")[0]
        if importlib.machinery.PathFinder.find_spec(top, [os.getcwd(), *sys.path]) is None:
            raise LaunchError(f"there is no module {top!r} in {Path.cwd()} or in the Python path")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give `parser` the arguments of `zero run`."""
    parser.usage = "zero run [options] script [arguments of the script]"
    parser.description = _ABOUT
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--num_gpus",
        "--num_accelerators",
        type=_at_least(1),
        metavar="N",
        help="processes on this machine; default: one per visible GPU, or one on the CPU where there is none",
    )
    parser.add_argument(
        "--num_nodes", type=_at_least(1), default=1, metavar="N", help="machines; only 1 in this release"
    )
    parser.add_argument(
        "--master_addr", default="127.0.0.1", metavar="A", help="address of rank 0 (default: %(default)s)"
    )
    parser.add_argument("--master_port", type=_port, metavar="P", help="port of rank 0 (default: one that is free)")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--module", action="store_true", help="run the script as python -m does")
    how.add_argument("--no_python", action="store_true", help="run the script itself, without python")
    parser.add_argument(
        "--max_restarts",
        type=_at_least(0),
        default=0,
        metavar="N",
        help="start all ranks again after a failure, at most N times; TORCHELASTIC_RESTART_COUNT tells them how often "
        "that was (default: %(default)s)",
    )
    parser.add_argument(
        "--log_dir",
        "--enable_each_rank_log",
        metavar="DIR",
        help="also write the output of each rank to files in a new folder below DIR",
    )
    parser.add_argument("--dry-run", action="store_true", help="print what would run, and start nothing")
    parser.add_argument("script", help="the training script; the arguments after it are its own")
    parser.add_argument("script_args", nargs=argparse.REMAINDER, metavar="...", help=argparse.SUPPRESS)


def request(given: argparse.Namespace) -> Request:
    """The request that the parsed arguments make."""
    return Request(
        script=given.script,
        script_args=tuple(given.script_args),
        num_gpus=given.num_gpus,
        num_nodes=given.num_nodes,
        master_addr=given.master_addr,
        master_port=given.master_port,
        module=given.module,
        no_python=given.no_python,
        max_restarts=given.max_restarts,
        log_dir=given.log_dir,
        dry_run=given.dry_run,
    )


def _at_least(low: int):
    def number(text: str) -> int:
        if not text.lstrip("-").isdigit() or int(text) < low:
            raise argparse.ArgumentTypeError(f"got {text!r}, wanted an integer of at least {low}")
        return int(text)

    return number


def _port(text: str) -> int:
    if not text.isdigit() or not 1 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"got {text!r}, wanted a port from 1 to 65535")
    return int(text)
