"""The command line of `zero tune`."""

import argparse
from dataclasses import dataclass

from zero.launch.args.check import ScriptRequest, add_script, of_script
from zero.launch.args.hosts import above_zero, at_least, filled
from zero.launch.messages import LaunchError, check_writable

_ABOUT = """Find the fastest configuration of a training script: foretell all, try the best few for some steps each.

The script runs as it is, with other values in its configuration, until it has taken the steps; then it is ended. The
first run, with its own configuration, shows what the model costs. The global batch stays, and so do the optimizer and
the precision. A run that takes too much memory, or fails, is a line of the table. The exit status is 0 when a
configuration was written."""

SPACE = ("stage", "placement", "mesh", "recomputation", "micro_batch")


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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give `parser` the arguments of `zero tune`."""
    parser.usage = "zero tune [options] script [arguments of the script]"
    parser.description = _ABOUT
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


def request(parsed: argparse.Namespace) -> TuneRequest:
    """The request that the parsed arguments make."""
    return filled(TuneRequest, parsed, **of_script(parsed))
