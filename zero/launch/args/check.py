"""The command line of `zero check`."""

import argparse
from dataclasses import dataclass, field
from typing import Any

from zero.launch.args.hosts import above_zero, at_least, filled, ranks_of_host
from zero.launch.args.run import ConfigFlags, add_config, check_script

_ABOUT = """Run a training script a few steps under each ZeRO stage and in plain torch, and compare what comes out.

The script runs once for each line of the table, and some times more in plain torch: alone, with weights that are moved
by their last bit, which shows what rounding does, and beside each run of a stage that differs from those before. There
it takes each step from the weights of that run, so differences do not grow from step to step.
It runs as it is, with stage and accumulation of its config replaced, until it has taken the steps; then it is ended.
Each run is a process of its own, forked from one of its rank that has imported torch and zero.
Its output is shown only when it fails. It must seed its random numbers, and must not depend on the time or on earlier
runs. The micro-batch stays what the config says, and the global batch follows the accumulation. The exit status is 0
when all is well, and 1 when a run differs or fails."""


OPTIONS = ("--steps", "--stages", "--accumulation", "--num_gpus", "--nproc", "--ranks", "--timeout", "--offload")


@dataclass(frozen=True, kw_only=True)
class ScriptRequest:
    """A script that a command runs more than once, each time with other values in its configuration."""

    script: str
    script_args: tuple[str, ...]
    num_gpus: int | None
    steps: int
    config: ConfigFlags = field(default_factory=ConfigFlags)

    def check(self) -> None:
        """Raise `LaunchError` for what can be known to be wrong before anything starts."""
        check_script(self.script, module=False, no_python=False)
        self.config.check()

    def command(self, *program: str) -> list[str]:
        """The arguments of a launcher; `program`: what runs the script, whose words come behind it."""
        ranks = [] if self.num_gpus is None else ["--num_gpus", str(self.num_gpus)]
        # This machine only, also where there is a hostfile that zero run would take by itself.
        return ["run", "--hostfile", "", *ranks, *self.config.words(), "--", *program, self.script, *self.script_args]


@dataclass(frozen=True, kw_only=True)
class CheckRequest(ScriptRequest):
    """What `zero check` was asked to do."""

    stages: tuple[int, ...]
    accumulations: tuple[int, ...]
    timeout: float
    offload: bool = False

    @property
    def stray_options(self) -> tuple[str, ...]:
        """Arguments of the script that look like ours; where it has no such options, they were meant for us."""
        return tuple(arg for arg in self.script_args if arg.split("=")[0] in OPTIONS)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give `parser` the arguments of `zero check`."""
    parser.usage = "zero check [options] script [arguments of the script]"
    parser.description = _ABOUT
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--stages", type=_numbers, default=(0, 1, 2, 3), metavar="0,3", help="default: all four")
    about = "micro-batches per step (default: 1,2)"
    parser.add_argument("--accumulation", type=_numbers, default=(1, 2), metavar="1,2", help=about)
    about = "seconds that one run may take (default: 600)"
    parser.add_argument("--timeout", type=above_zero, default=600.0, metavar="S", help=about)
    about = "also with optimizer state and parameters in host memory, stages 1 to 3"
    parser.add_argument("--offload", action="store_true", help=about)
    add_script(parser, steps=3)


def add_script(parser: argparse.ArgumentParser, steps: int) -> None:
    """Give `parser` the arguments of `ScriptRequest`."""
    about = "optimizer steps per run (default: %(default)s)"
    parser.add_argument("--steps", type=at_least(1), default=steps, metavar="N", help=about)
    about = "processes, as in zero run (default: one per visible GPU)"
    parser.add_argument("--num_gpus", "--nproc", "--ranks", type=ranks_of_host, metavar="N", help=about)
    add_config(parser)
    parser.add_argument("script", help="the training script; the arguments after it are its own")
    parser.add_argument("script_args", nargs=argparse.REMAINDER, metavar="...", help=argparse.SUPPRESS)


def of_script(parsed: argparse.Namespace) -> dict[str, Any]:
    """The fields of `ScriptRequest` that have other forms as arguments."""
    return {
        "script_args": tuple(parsed.script_args),
        "config": ConfigFlags(parsed.config, tuple(parsed.sets)),
    }


def request(parsed: argparse.Namespace) -> CheckRequest:
    """The request that the parsed arguments make."""
    return filled(CheckRequest, parsed, accumulations=parsed.accumulation, **of_script(parsed))


def _numbers(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.isdigit() for part in parts):
        raise argparse.ArgumentTypeError(f"got {text!r}, wanted numbers with commas between them, such as 0,3")
    return tuple(dict.fromkeys(int(part) for part in parts))
