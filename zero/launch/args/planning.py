"""The command line of `zero plan`."""

import argparse

from zero.launch.args.hosts import above_zero, at_least

MOST_RANKS = 1 << 20
_SIZES = {
    "tp": "ranks of tensor parallelism, which are consecutive",
    "pp": "stages of the pipeline",
    "cp": "ranks that share one sequence",
    "sp": "the same as --cp",
    "ep": "ranks that experts are divided among, which are consecutive",
    "dp_shard": "ranks that state is cut over; default: all that the other sizes leave",
    "dp_replicate": "times that cut state is repeated (HSDP)",
}


def add_plan(parser: argparse.ArgumentParser) -> None:
    """Give `parser` the arguments of `zero plan`."""
    about = (
        "module:function, which gives a model and its inputs, or a folder with the config.json of a Hugging Face model"
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help=about)
    parser.add_argument("--groups", action="store_true", help="print the groups of ranks along each axis")
    about = "print the GB per rank of a transformer of N parameters, such as 70e9, for each stage and placement"
    parser.add_argument("--params", type=above_zero, metavar="N", help=about)
    parser.add_argument("--layers", type=at_least(1), metavar="N", help="its layers (default: a 128th of the width)")
    parser.add_argument("--width", type=at_least(1), metavar="N", help="its width (default: 128 times the layers)")
    about = (
        "with it, time too: the name of a device such as h200 or a100, or measured: this machine, which is tried for "
    )
    about += "some seconds. cuda (the default) and cpu: bytes only, with a memory of its own or that of the host"
    parser.add_argument("--device", default="cuda", metavar="NAME", help=about)
    parser.add_argument(
        "--sequence",
        type=at_least(1),
        metavar="N",
        help="tokens of a sample, where the model is no function (default: 4096)",
    )
    about = "write the configuration of the fastest that fits, to a file or to where the table goes"
    parser.add_argument("--json", nargs="?", const="-", metavar="FILE", help=about)
    parser.add_argument("--all", action="store_true", help="print all rows, and not the best of each choice")
    parser.add_argument("--nodes", type=at_least(1), metavar="N", help="the number of hosts")
    parser.add_argument("--config", metavar="FILE", help="the JSON of the run (default: bf16 and AdamW)")
    about = "the number of ranks; several, as in 8,16,32, are compared (default: 1 to 1024)"
    parser.add_argument("--world", type=_counts, metavar="N", help=about)
    for axis, about in _SIZES.items():
        parser.add_argument(f"--{axis.replace('_', '-')}", type=at_least(1), metavar="N", help=about)
    about = "without --nodes (default: 8)"
    parser.add_argument("--ranks-per-host", type=at_least(1), default=8, metavar="N", help=about)


def _counts(text: str) -> list[int]:
    return sorted({at_least(1, MOST_RANKS)(count) for count in text.split(",")})
