"""The command `zero plan --groups`: the groups of ranks of a grid. Bytes are for zero/tools/plan/model_plan.py."""

from __future__ import annotations

import argparse
import sys

from zero.plan.grid import AXES, DATA, Grid, GridError


def run(given: argparse.Namespace) -> int:
    """Print what was asked for; returns the exit status."""
    try:
        if not given.groups:
            raise GridError(
                "nothing to print: add --params N, such as 70e9, or a model, for the memory that it takes, or --groups "
                "for the groups of ranks along each axis"
            )
        sizes = {axis: getattr(given, axis) for axis in AXES if getattr(given, axis) is not None}
        if given.world is None or len(given.world) != 1:
            raise GridError("--world: --groups wants one number of ranks")
        grid, inside = Grid(given.world[0], sizes), ranks_per_host(given)
    except GridError as error:
        print(f"zero plan: error: {error}", file=sys.stderr)
        return 2
    print("\n".join(groups_text(grid)))
    for line in grid.warnings(inside):
        print(f"zero plan: warning: {line}", file=sys.stderr)
    return 0


def ranks_per_host(given: argparse.Namespace) -> int:
    """Of the parsed arguments. Raises GridError for hosts of which each would not have the same number of ranks."""
    if given.nodes is None:
        return given.ranks_per_host
    if given.world is None or len(given.world) != 1:
        raise GridError("--nodes: wants one number of ranks, in --world; for others say --ranks-per-host")
    if given.world[0] % given.nodes:
        raise GridError(f"--nodes: got {given.nodes}, wanted a divisor of the {given.world[0]} ranks of --world")
    return given.world[0] // given.nodes


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
    lines = [f"{grid.world} rank{'s' * (grid.world != 1)}{': ' * bool(factors)}{factors}"]
    for kind, lists in kinds.items():
        if lists:
            lines += [f"{kind}: {len(lists)} of {len(lists[0])}", "  " + " ".join(str(list(ranks)) for ranks in lists)]
    return lines
