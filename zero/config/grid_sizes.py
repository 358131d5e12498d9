"""The grid of ranks: what the file and what arguments of the script say of the sizes of its axes, in one place."""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from zero.config.file import File
from zero.config.unavailable import lookup
from zero.plan.grid import AXES, DATA, Grid, GridError

KEYS = {
    "tensor_parallel.autotp_size": "tp",
    "tensor_parallel.tp.tp_size": "tp",
    "sequence_parallel_size": "cp",
    "expert_parallel.autoep_size": "ep",
    "pipeline.stages": "pp",
}


class Told(NamedTuple):
    """Sizes by axis that arguments of the script say; `source` names them."""

    sizes: Mapping[str, int] = MappingProxyType({})
    source: str = ""


NOTHING_TOLD = Told()


def given_sizes(file: File) -> dict[str, Any]:
    """The sizes above 1 that the file says, by their keys."""
    values: dict[str, Any] = {"sequence_parallel_size": file.sequence_parallel_size}
    said = file.tensor_parallel
    values["tensor_parallel"] = {"autotp_size": said.autotp_size, "tp": {"tp_size": said.tp.tp_size}}
    values["pipeline"] = {"stages": file.pipeline.stages}
    values["expert_parallel"] = {"autoep_size": file.expert_parallel.autoep_size if file.expert_parallel.enabled else 1}
    found = {key: lookup(values, key) for key in KEYS}
    return {key: size for key, size in found.items() if size not in (None, 0, 1, "auto")}


def grid_of(file: File, world: int, told: Told) -> tuple[Grid, list[str]]:
    """The grid of `world` ranks; and a line for everything that is wrong, with which it is one of data ranks alone."""
    errors, sizes, names = [], dict(told.sizes), {}
    for key, size in given_sizes(file).items():
        axis, other = KEYS[key], sizes.get(KEYS[key], 1)
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            errors.append(f"{key}: got {size!r}, wanted an integer of at least 1")
        elif other not in (1, size):
            errors.append(f"{key}: got {size}, and {names.get(axis, told.source)} says {other}; keep one of the two")
        else:
            sizes[axis], names[axis] = size, key
    if "dp_shard" in sizes and "cp" not in told.sizes and sizes["dp_shard"] % sizes.get("cp", 1) == 0:
        sizes["dp_shard"] //= sizes.get("cp", 1)  # told of all that state is cut over
    shard, ep = next(iter(file.shard_sizes.values()), 0), sizes.pop("ep", 1)
    nothing_is_cut = not (file.zero_optimization.stage or ep > 1)
    if (shard or nothing_is_cut) and "dp_shard" not in sizes:
        sizes["dp_shard"] = max(1, shard // sizes.get("cp", 1))
        sizes.setdefault("dp_replicate", max(1, world // math.prod(sizes.get(axis, 1) for axis in AXES)))
    if not errors:
        try:
            grid = Grid(world, sizes, ep)
            if file.data_parallel_size in (None, ranks := grid.size(*DATA)):
                return grid, []
            errors.append(f"data_parallel_size: got {file.data_parallel_size}, and the other sizes make it {ranks}")
        except GridError as error:
            errors.append(f"{', '.join([*names.values(), *([told.source] if told.sizes else [])])}: {error}")
    return Grid(world), errors
