"""The command line of `zero run`."""

import argparse
import importlib.machinery
import os
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from zero.launch.args.hosts import HostFlags, at_least, filled, port, ranks_of_host
from zero.launch.args.hosts import add_arguments as add_host_arguments
from zero.launch.contract import SHUTDOWN
from zero.launch.hosts import selection
from zero.launch.hosts.devices import parse_cores
from zero.launch.launch_messages import LaunchError as LaunchError

_ABOUT = """Run a training script with one process per GPU of this machine, or with N processes on the CPU; or, with
a hostfile, with one process for each slot of its hosts.

Each process finds RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT in its
environment, as under torchrun. No --local_rank is added to the arguments of the script, but under --as-deepspeed, as
DeepSpeed's launcher does; there --no_local_rank leaves it out.
The exit status is that of the first rank that failed, or 128 + n when signal n killed it."""
# Flags of DeepSpeed or torchrun: taken for what is always so here, or refused with what to do instead.
_LEVELS = ("debug", "info", "warning", "error", "critical")
_QUIET = _LEVELS[2:]
_ALWAYS = ("--force_multi", "--standalone")
_MEETING = "the hosts of a --hostfile find each other, at --master_addr and --master_port if you give them"
_ELASTIC = "--max_restarts N restarts the ranks, with --min_nodes M on fewer hosts when some are lost"
# Of these no other program than a launcher is told.
_OF_LAUNCHERS = (
    *("--num_gpus", "--num_accelerators", "--nproc_per_node", "--nproc-per-node", "--nproc", "--num_processes"),
    *("--num_nodes", "--nnodes", "--hostfile", "--master_addr", "--master_port", "--max_restarts"),
    *("--set", "--bind_cores_to_rank", "--as-deepspeed", "--as_deepspeed"),
)
_REFUSED = {
    "--save_pid": "no file with a process id is written; the shell has it in $! after `zero run ... &`",
    "--venv_script": "every host runs the Python that runs this command, and so its environment; variables go into "
    ".zero_env or --env_file",
    "--autotuning": "`zero tune script.py` finds a configuration",
    "--elastic_training": _ELASTIC,
    "--min_elastic_nodes": _ELASTIC,
    **dict.fromkeys(("--rdzv_backend", "--rdzv_endpoint", "--rdzv_id", "--rdzv_conf"), _MEETING),
    "--max_elastic_nodes": f"{_ELASTIC}, and --max_nodes N on hosts that come later",
}


class ConfigFlags(NamedTuple):
    """What `initialize` takes in the ranks where the script gives it no configuration."""

    file: str | None = None
    sets: tuple[str, ...] = ()  # values in place of those of the file, as "a.b=c"

    def words(self) -> list[str]:
        """As they stand on a command line, one word each."""
        return [*([f"--config={self.file}"] if self.file is not None else []), *(f"--set={text}" for text in self.sets)]

    def check(self) -> None:
        """Raise `LaunchError` for a file that is not there, and for what is no value of a key."""
        if self.file is not None and not os.path.isfile(self.file):
            raise LaunchError(f"--config: there is no file {self.file!r} in {Path.cwd()}")
        for text in self.sets:
            if not all(text.partition("=")):
                raise LaunchError(f"--set: got {text!r}, wanted KEY=VALUE, such as zero_optimization.stage=3")


@dataclass(frozen=True)
class ElasticFlags:
    """How often, and with which hosts, a job goes on, and how long its ranks have to end."""

    max_restarts: int = 0
    min_nodes: int | None = None
    max_nodes: int | None = None
    shutdown_timeout: int = SHUTDOWN

    def check(self, num_nodes: int | None, launcher: str | None) -> None:
        """Raise `LaunchError` for flags that do not go together."""
        if self.max_nodes is not None and num_nodes not in (None, self.max_nodes):
            raise LaunchError("--num_nodes and --max_nodes: give one of them")
        if self.max_nodes is not None and self.min_nodes is None:
            raise LaunchError("--max_nodes: give --min_nodes, too, with how many hosts the job goes on")
        if self.max_nodes is not None and self.min_nodes > self.max_nodes:
            raise LaunchError(f"--min_nodes: got {self.min_nodes}, more than the {self.max_nodes} of --max_nodes")
        if self.min_nodes is not None and launcher not in (None, "ssh"):
            raise LaunchError(f"--min_nodes: {launcher} ends all hosts when one is lost; use --launcher ssh")


@dataclass(frozen=True)
class RunRequest:
    """The arguments of `zero run`."""

    script: str
    script_args: tuple[str, ...]
    num_gpus: int | None  # None: as many as there are
    num_nodes: int | None  # None: as many as there are
    master_addr: str | None  # None: this machine, or the first host
    master_port: int | None  # None: a free one
    module: bool
    no_python: bool
    log_dir: str | None
    dry_run: bool
    hosts: HostFlags = field(default_factory=HostFlags)
    elastic: ElasticFlags = field(default_factory=ElasticFlags)
    bind_cores: bool = False
    bind_core_list: str | None = None
    quiet: bool = False
    as_deepspeed: bool = False
    config: ConfigFlags = field(default_factory=ConfigFlags)

    @property
    def gives_local_rank(self) -> bool:
        """Whether scripts get `--local_rank=N`: of DeepSpeed's launchers the one that uses ssh gives it."""
        return self.as_deepspeed and not self.hosts.no_local_rank and self.hosts.launcher == "ssh"

    @property
    def stray_options(self) -> tuple[str, ...]:
        """Options of a launcher among the arguments of a script that has no such word: they were meant for us."""
        given = dict.fromkeys(word.partition("=")[0] for word in self.script_args)
        if self.module or self.no_python or not (given := [word for word in given if word in _OF_LAUNCHERS]):
            return ()
        text = Path(self.script).read_text(errors="replace")
        return tuple(word for word in given if word.lstrip("-") not in text)

    def command(self, local: int) -> list[str]:
        """The command line of rank number `local` of its host."""
        script = [self.script, *([f"--local_rank={local}"] if self.gives_local_rank else []), *self.script_args]
        if self.no_python:
            return script
        mode = ["-m"] if self.module else []
        # -u, so that the last lines of a rank that dies are not lost in a buffer
        return [sys.executable, "-u", *mode, *script]

    def check(self) -> None:
        """Raise `LaunchError` for what can be known to be wrong before anything starts."""
        self.hosts.check()
        selection.check(self.hosts.choice(self.num_nodes, self.num_gpus))
        self.elastic.check(self.num_nodes, None if self.hosts.no_ssh else self.hosts.launcher)
        if self.bind_core_list is not None:
            if not self.bind_cores:
                raise LaunchError("--bind_core_list: says which cores --bind_cores_to_rank binds to; give both")
            parse_cores(self.bind_core_list)
        if self.module and self.no_python:
            raise LaunchError("--module and --no_python: give one of them")
        check_script(self.script, self.module, self.no_python)
        self.config.check()


class _RefusedFlag(argparse.Action):
    """Says what to do instead, before anything else that may be wrong with the command line."""

    def __call__(self, parser, namespace, values, option_string=None) -> None:
        """Leave with the message."""
        parser.error(f"{option_string}: this flag of another launcher is not here: {_REFUSED[option_string]}")


def check_script(script: str, module: bool, no_python: bool) -> None:
    """Raise `LaunchError` where this machine does not have what is to run."""
    if module:
        # Only the first part of the name: to look deeper would import the package here.
        top = script.split(".")[0]
        here = importlib.machinery.PathFinder.find_spec(top, [os.getcwd()])
        # Not in sys.path alone: an editable installation has a finder of its own. Old ones may lack the method.
        finders = [finder for finder in sys.meta_path if hasattr(finder, "find_spec")]
        if here is None and not any(finder.find_spec(top, None) for finder in finders):
            raise LaunchError(f"there is no module {top!r} in {Path.cwd()} or in the Python path")
    elif no_python:
        if shutil.which(script) is None:
            raise LaunchError(f"there is no program {script!r} in PATH or in {Path.cwd()}")
    elif script.lower().endswith((".json", ".hjson", ".yaml", ".yml")):
        raise LaunchError(f"{script!r} is a configuration by its name, and no script; give it by --config {script}")
    elif not os.path.exists(script):
        where = "" if os.path.isabs(script) else f" in {Path.cwd()}"
        raise LaunchError(f"there is no script {script!r}{where}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give `parser` the arguments of `zero run`."""
    parser.usage = "zero run [options] script [arguments of the script]"
    parser.description = _ABOUT
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    about = "processes per host; default: one per slot, or per visible GPU, or one on the CPU where there is none"
    parser.add_argument("--num_gpus", "--num_accelerators", type=ranks_of_host, metavar="N", help=about)
    # As torchrun and accelerate launch spell it.
    same = ("--nproc_per_node", "--nproc-per-node", "--nproc", "--num_processes")
    parser.add_argument(*same, dest="num_gpus", type=_processes, help=argparse.SUPPRESS)
    parser.add_argument("--nnodes", action=_NumberOfNodes, type=_nodes, help=argparse.SUPPRESS)
    add_config(parser)
    about = "the first N hosts of the hostfile (default: all)"
    parser.add_argument("--num_nodes", type=at_least(1), metavar="N", help=about)
    about = "address of rank 0 (default: this machine, or the first host)"
    parser.add_argument("--master_addr", metavar="A", help=about)
    about = "port of rank 0 (default: one that is free; 29500 on several hosts)"
    parser.add_argument("--master_port", type=port, metavar="P", help=about)
    how = parser.add_mutually_exclusive_group()
    how.add_argument("-m", "--module", action="store_true", help="run the script as python -m does")
    how.add_argument("--no_python", action="store_true", help="run the script itself, without python")
    about = "start all ranks again after a failure, at most N times; TORCHELASTIC_RESTART_COUNT tells them how often "
    about += "that was (default: %(default)s)"
    parser.add_argument("--max_restarts", type=at_least(0), default=0, metavar="N", help=about)
    about = "also write the output of each rank to files in a new folder below DIR"
    parser.add_argument("--log_dir", "--enable_each_rank_log", metavar="DIR", help=about)
    about = "when a host is lost, start again if N are left (default: all)"
    parser.add_argument("--min_nodes", type=at_least(1), metavar="N", help=about)
    about = "as --num_nodes; hosts that are lost or come late join at the next restart"
    parser.add_argument("--max_nodes", type=at_least(1), metavar="N", help=about)
    about = f"seconds that ranks have from a signal to SIGKILL, to save, say (default: {SHUTDOWN})"
    same = ("--shutdown_timeout", "--shutdown-timeout")
    parser.add_argument(*same, type=at_least(1), default=SHUTDOWN, metavar="SECONDS", help=about)
    about = "give each rank cores of its own"
    parser.add_argument("--bind_cores_to_rank", dest="bind_cores", action="store_true", help=about)
    parser.add_argument("--bind_core_list", metavar="1,3-5", help="the cores to give (default: all of the host)")
    about = "in the ranks, `import deepspeed` gives zero: for programs that were written for DeepSpeed"
    parser.add_argument("--as-deepspeed", "--as_deepspeed", action="store_true", help=about)
    parser.add_argument("--dry-run", "--dry_run", action="store_true", help="print what would run, and start nothing")
    parser.add_argument("-q", "--quiet", action="store_true", help="say only what goes wrong, in the ranks too")
    for flag in _ALWAYS:
        parser.add_argument(flag, action="store_true", help=argparse.SUPPRESS)
    for flag in _REFUSED:
        parser.add_argument(flag, action=_RefusedFlag, nargs="?", help=argparse.SUPPRESS)
    parser.add_argument("--log_level", type=str.lower, choices=_LEVELS, default="info", help=argparse.SUPPRESS)
    add_host_arguments(parser)
    # One argument for all words: a second one would take a "--" that belongs to the script for a mark of its own.
    about = "the training script; the arguments after it are its own"
    parser.add_argument("command_line", nargs=argparse.PARSER, metavar="script", help=about)


def _nodes(text: str) -> tuple[int, int | None]:
    """As torchrun takes it: a number of hosts, or the least and the most, as in 1:4."""
    low, colon, high = text.partition(":")
    return at_least(1)(low), at_least(1)(high) if colon else None


class _NumberOfNodes(argparse.Action):
    """What --nnodes says, as --num_nodes or as --min_nodes and --max_nodes."""

    def __call__(self, parser, namespace, values, option_string=None) -> None:
        """Take it."""
        low, high = values
        more = {"num_nodes": low} if high is None else {"min_nodes": low, "max_nodes": high}
        for name, value in more.items():
            setattr(namespace, name, value)


def _processes(text: str) -> int | None:
    """As torchrun takes it: a number, or what stands for as many as there are."""
    return None if text in ("gpu", "auto") else ranks_of_host(text)


def add_config(parser: argparse.ArgumentParser) -> None:
    """Give `parser` the arguments of `ConfigFlags`."""
    about = "the configuration that initialize() takes in a script that gives it none"
    parser.add_argument("--config", metavar="FILE", help=about)
    about = "a value in place of the one in that file, such as zero_optimization.stage=3; may be repeated"
    parser.add_argument("--set", dest="sets", action="append", default=[], metavar="KEY=VALUE", help=about)


def request(parsed: argparse.Namespace) -> RunRequest:
    """The request that the parsed arguments make."""
    words = parsed.command_line
    script, *script_args = words[1:] if words[0] == "--" else words
    quiet = parsed.quiet or parsed.log_level in _QUIET
    hosts, elastic = filled(HostFlags, parsed), filled(ElasticFlags, parsed)
    config = ConfigFlags(parsed.config, tuple(parsed.sets))
    more = {"script": script, "script_args": tuple(script_args), "hosts": hosts, "quiet": quiet, "config": config}
    return filled(RunRequest, parsed, elastic=elastic, **more)
