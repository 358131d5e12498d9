"""The command lines of `zero check` and `zero tune`, which run a script more than once."""

import argparse
from dataclasses import dataclass, field
from typing import Any

from zero.launch.args.hosts import above_zero, at_least, filled, ranks_of_host
from zero.launch.args.run import ConfigFlags, add_config, check_script
from zero.launch.launch_messages import LaunchError, check_writable

_CHECK = """Run a training script a few steps under each ZeRO stage and in plain torch, and compare what comes out.

The script runs once for each line of the table, and some times more in plain torch: alone, with weights that are moved
by their last bit, which shows what rounding does, and beside each run of a stage that differs from those before. There
it takes each step from the weights of that run, so differences do not grow from step to step.
It runs as it is, with stage and accumulation of its config replaced, until it has taken the steps; then it is ended.
Each run is a process of its own, forked from one of its rank that has imported torch and zero.
Its output is shown only when it fails. It must seed its random numbers, and must not depend on the time or on earlier
runs. The micro-batch stays what the config says, and the global batch follows the accumulation. The exit status is 0
when all is well, and 1 when a run differs or fails."""
_TUNE = """Find the fastest configuration of a training script: foretell all, try the best few for some steps each.

The script runs as it is, with other values in its configuration, until it has taken the steps; then it is ended. The
first run, with its own configuration, shows what the model costs. The global batch stays, and so do the optimizer and
the precision. A run that takes too much memory, or fails, is a line of the table. The exit status is 0 when a
configuration was written."""

SPACE = ("stage", "placement", "mesh", "recomputation", "micro_batch")
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
    """The arguments of `zero check`."""

    stages: tuple[int, ...]
    accumulations: tuple[int, ...]
    timeout: float
    offload: bool = False

    @property
    def stray_options(self) -> tuple[str, ...]:
        """Arguments of the script that look like ours; where it has no such options, they were meant for us."""
        return tuple(arg for arg in self.script_args if arg.split("=")[0] in OPTIONS)


@dataclass(frozen=True, kw_only=True)
class TuneRequest(ScriptRequest):
    """What `zero tune` was asked to do; `memory` in GB (1e9 bytes), `limit` in seconds."""

    space: tuple[str, ...] = SPACE
    runs: int = 5
    limit: float = 600.0
    memory: float | None = None
    json: str = "zero.tuned.json"

    def check(self) -> None:
        """Raise `LaunchError` for what can be known to be wrong before anything starts."""
        super().check()
        if strange := [axis for axis in self.space if axis not in SPACE]:
            raise LaunchError(f"--space: got {strange[0]!r}, wanted some of {', '.join(SPACE)}, with commas")
        check_writable(self.json, "--json")


def add_check(parser: argparse.ArgumentParser) -> None:
    """Give `parser` the arguments of `zero check`."""
    parser.usage = "zero check [options] script [arguments of the script]"
    parser.description = _CHECK
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--stages", type=_numbers, default=(0, 1, 2, 3), metavar="0,3", help="default: all four")
    about = "micro-batches per step (default: 1,2)"
    parser.add_argument("--accumulation", type=_numbers, default=(1, 2), metavar="1,2", help=about)
    about = "seconds that one run may take (default: 600)"
    parser.add_argument("--timeout", type=above_zero, default=600.0, metavar="S", help=about)
    about = "also with optimizer state and parameters in host memory, stages 1 to 3"
    parser.add_argument("--offload", action="store_true", help=about)
    add_script(parser, steps=3)


def add_tune(parser: argparse.ArgumentParser) -> None:
    """Give `parser` the arguments of `zero tune`."""
    parser.usage = "zero tune [options] script [arguments of the script]"
    parser.description = _TUNE
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    about = f"what may differ from the script's configuration (default: {','.join(SPACE)})"
    parser.add_argument("--space", type=lambda text: tuple(text.split(",")), default=SPACE, metavar="A,B", help=about)
    about = "configurations to try beside the script's own (default: %(default)s)"
    parser.add_argument("--runs", type=at_least(1), default=5, metavar="N", help=about)
    about = "seconds for all runs together (default: %(default)g)"
    parser.add_argument("--limit", type=above_zero, default=600.0, metavar="S", help=about)
    about = "what a rank may take: of the GPU, or of main memory (default: what there is for each)"
    parser.add_argument("--memory", type=above_zero, metavar="GB", help=about)
    about = "where the best configuration is written (default: %(default)s)"
    parser.add_argument("--json", default="zero.tuned.json", metavar="FILE", help=about)
    add_script(parser, steps=5)


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


def check_request(parsed: argparse.Namespace) -> CheckRequest:
    """The request that the parsed arguments make."""
    return filled(CheckRequest, parsed, accumulations=parsed.accumulation, **of_script(parsed))


def tune_request(parsed: argparse.Namespace) -> TuneRequest:
    """The request that the parsed arguments make."""
    return filled(TuneRequest, parsed, **of_script(parsed))


def _numbers(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.isdigit() for part in parts):
        raise argparse.ArgumentTypeError(f"got {text!r}, wanted numbers with commas between them, such as 0,3")
    return tuple(dict.fromkeys(int(part) for part in parts))
