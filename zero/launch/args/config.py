"""The command line of `zero config`."""

import argparse

from zero.launch.args.hosts import above_zero, at_least
from zero.launch.args.plan import MOST_RANKS

_ABOUT = """Ask what a run shall be like and write its configuration: a JSON that `zero.initialize` takes as it is.

Each question has a default, which an empty answer takes; for stage and placement the memory of each choice is shown,
as by zero plan. What --set says is not asked. Questions and memory go to stderr. The exit status is 0 when the JSON was
written, and 2 when there is an error in what was given, a file in the way, or no terminal to ask at."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give `parser` the arguments of `zero config`."""
    parser.description = _ABOUT
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--default", action="store_true", help="ask nothing: take the defaults")
    about = "set a value by its path, such as zero_optimization.stage=3; the value is JSON or text; may be repeated"
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help=about)
    about = "the file to write (default: %(default)s); - prints the JSON"
    parser.add_argument("-o", "--output", default="zero.json", metavar="FILE", help=about)
    parser.add_argument("--force", action="store_true", help="write over a file that is there")
    about = "parameters of the model, for the memory that is shown (asked; 1e9 by default)"
    parser.add_argument("--params", type=above_zero, metavar="N", help=about)
    parser.add_argument("--world", type=at_least(1, MOST_RANKS), metavar="N", help="ranks (asked; 8 by default)")
    about = "memory of one device, of which 60 %% may hold state (asked; 80 by default)"
    parser.add_argument("--memory", type=above_zero, metavar="GB", help=about)
    about = "cuda: a device with memory of its own (the default); cpu: ranks that train in host memory"
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help=about)
