"""`zero plan --params`: the table of bytes per rank."""

from __future__ import annotations

import argparse
import sys


def plan(given: argparse.Namespace) -> int:
    """Print the table; returns the exit status."""
    from zero.config import ConfigError
    from zero.sizes.estimate import estimate

    axes = [name for name in ("tp", "pp", "cp", "dp_shard", "dp_replicate") if getattr(given, name) not in (None, 1)]
    try:
        if given.groups:
            raise ValueError("--params and --groups: one table at a time; give one of them")
        if axes:
            raise ValueError(
                f"--{axes[0].replace('_', '-')}: the memory is that of data-parallel ranks; leave it out, or say "
                "zero.shard_size in the configuration"
            )
        found = estimate(
            given.params, given.config, given.world, device=given.device, layers=given.layers, width=given.width
        )
    except (ConfigError, ValueError) as error:
        print(f"zero plan: error: {error}", file=sys.stderr)
        return 2
    print(found)
    return 0
