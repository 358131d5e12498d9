"""The command `zero plan`: its arguments, and the groups of ranks of a grid. Bytes are for zero/sizes/command.py."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from zero.plan.grid import DATA, Grid, GridError

_SIZES = {
    "tp": "ranks of tensor parallelism, which are consecutive",
    "pp": "stages of the pipeline",
    "cp": "ranks that share one sequence",
    "dp_shard": "ranks that state is cut over; default: all that the other sizes leave",
    "dp_replicate": "times that cut state is repeated (HSDP)",
}


def add_arguments(parser: Any) -> None:
    """Give `parser` the arguments of `zero plan`."""
    about = (
        "module:function, which gives a model and its inputs, or a folder with the config.json of a Hugging Face model"
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help=about)
    parser.add_argument("--groups", action="store_true", help="print the groups of ranks along each axis")
    about = "print the GB per rank of a transformer of N parameters, such as 70e9, for each stage and placement"
    parser.add_argument("--params", type=float, metavar="N", help=about)
    parser.add_argument("--layers", type=int, metavar="N", help="its layers (default: a 128th of the width)")
    parser.add_argument("--width", type=int, metavar="N", help="its width (default: 128 times the layers)")
    about = (
        "with it, time too: the name of a device such as h200 or a100, or measured: this machine, which is tried for "
    )
    about += "some seconds. cuda (the default) and cpu: bytes only, with a memory of its own or that of the host"
    parser.add_argument("--device", default="cuda", metavar="NAME", help=about)
    parser.add_argument(
        "--sequence", type=int, metavar="N", help="tokens of a sample, where the model is no function (default: 4096)"
    )
    about = "write the configuration of the fastest that fits, to a file or to where the table goes"
    parser.add_argument("--json", nargs="?", const="-", metavar="FILE", help=about)
    parser.add_argument("--ask", metavar="NAME", help="answer a question about the configuration; all: every one")
    parser.add_argument("--all", action="store_true", help="print all rows, and not the best of each choice")
    about = "instead print the operators of a step with their FLOPs and bytes, of all units together or of each"
    parser.add_argument("--trace", nargs="?", const="all", choices=("all", "units"), help=about)
    about = "instead print which layers can be cut over tensor-parallel ranks, how, and why others not"
    parser.add_argument("--shardable", action="store_true", help=about)
    parser.add_argument("--nodes", type=int, metavar="N", help="the number of hosts")
    parser.add_argument("--config", metavar="FILE", help="the JSON of the run (default: bf16 and AdamW)")
    about = "the number of ranks; several, as in 8,16,32, to compare; without it, the smallest that fits is looked for"
    parser.add_argument("--world", type=_counts, metavar="N", help=about)
    for axis, about in _SIZES.items():
        parser.add_argument(f"--{axis.replace('_', '-')}", type=int, metavar="N", help=about)
    about = "without --nodes (default: 8)"
    parser.add_argument("--ranks-per-host", type=int, default=8, metavar="N", help=about)


def _counts(text: str) -> list[int]:
    return [int(count) for count in text.split(",")]


def run(given: argparse.Namespace) -> int:
    """Print what was asked for; returns the exit status."""
    try:
        if not given.groups:
            raise GridError(
                "nothing to print: add --params N, such as 70e9, or a model, for the memory that it takes, or --groups "
                "for the groups of ranks along each axis"
            )
        if given.ranks_per_host < 1:
            raise GridError(f"--ranks-per-host: got {given.ranks_per_host}, wanted an integer of at least 1")
        sizes = {axis: getattr(given, axis) for axis in _SIZES if getattr(given, axis) is not None}
        if given.world is None or len(given.world) != 1:
            raise GridError("--world: --groups wants one number of ranks")
        grid = Grid(given.world[0], sizes)
    except GridError as error:
        print(f"zero plan: error: {error}", file=sys.stderr)
        return 2
    print("\n".join(groups_text(grid)))
    for line in grid.warnings(given.ranks_per_host):
        print(f"zero plan: warning: {line}", file=sys.stderr)
    return 0


def groups_text(grid: Grid) -> list[str]:
    """The groups of a grid in words, an axis of one rank left out."""
    kinds = {
        "tensor parallel (tp)": grid.lists("tp") if grid.size("tp") > 1 else [],
        "context parallel (cp)": grid.lists("cp") if grid.size("cp") > 1 else [],
        "pipeline (pp)": grid.lists("pp") if grid.size("pp") > 1 else [],
        "data parallel (dp)": grid.lists(*DATA),
        "shards of state (dp_shard)": grid.lists("dp_shard") if grid.size("dp_replicate") > 1 else [],
        "replicas of state (dp_replicate)": grid.lists("dp_replicate") if grid.size("dp_replicate") > 1 else [],
        "one replica of the model (pp x tp)": grid.lists("pp", "tp") if grid.size("pp", "tp") > 1 else [],
        "first and last stage (embedding)": grid.embedding() if grid.size("pp") > 1 else [],
    }
    factors = " x ".join(f"{axis} {size}" for axis, size in grid.sizes.items() if size > 1)
    lines = [f"{grid.world} ranks{': ' * bool(factors)}{factors}"]
    for kind, lists in kinds.items():
        if lists:
            lines += [f"{kind}: {len(lists)} of {len(lists[0])}", "  " + " ".join(str(list(ranks)) for ranks in lists)]
    return lines
