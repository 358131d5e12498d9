"""The bytes of state that one rank keeps off the device, in host memory and in files, before they are allocated.

A *record* is the whole state of one unit's shard in one piece, because the optimizer updates it together: so
one request moves all of it between a drive and memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from zero.plan.formats import ITEMSIZE, Formats, runs
from zero.plan.layout import round_up
from zero.plan.placement import Placement, Where, is_updated, keeps_copy
from zero.plan.units import Parts, UnitPlan, of_each

LINE = 64  # bytes: arrays start on cache lines, so that vector loads are aligned and threads share none
PAGE = 4096  # bytes: reads and writes past the page cache start and end on a page
SLOTS = 2  # on the device, each for the largest record: streamed state of at most two units is there at once
MIB = 2**20


def record_nbytes(unit: UnitPlan, rank: int, parts: int, formats: Formats, mirrored: bool) -> tuple[int, int]:
    """Bytes of the record of shard `rank` of `parts` of a unit, whole pages in all: masters, then moments.

    Each array begins on a cache line. `mirrored`: the parameters' own shard is not in host memory, so that the record
    has a copy, which counts among the masters; in fp32 that is the master itself. Without it, fp32 parameters are
    masters where they are. The padding counts with the last part. Both are 0 if no optimizer updates the unit.
    """
    if not is_updated(unit):
        return 0, 0
    window, master = unit.layout.shard(rank, parts), formats.master_dtype(unit.dtype)
    first = [(unit.dtype, window.numel)] if mirrored else []
    first += [] if master is None else [(master, window.numel)]
    of_moments = [formats.moment_arrays(run.numel, run.format) for run in runs(unit, window, formats.moments)]
    masters = _on_lines(first)
    moments = formats.of_unit(unit).states * sum(map(_on_lines, of_moments))
    total = round_up(masters + moments, PAGE)
    return (masters, total - masters) if moments else (total, 0)


def _on_lines(arrays: Iterable[tuple[str, int]]) -> int:
    """Bytes of arrays, given as dtype and elements, which begin on cache lines."""
    return sum(round_up(ITEMSIZE[dtype] * numel, LINE) for dtype, numel in arrays)


def shard_nbytes(unit: UnitPlan, parts: int, dtype: str) -> int:
    """Bytes that one rank's shard of the unit's parameters, or of its gradient, takes off the device, whole pages."""
    return round_up(ITEMSIZE[dtype] * (unit.layout.numel // parts), PAGE)


class HostBytes(NamedTuple):
    """Bytes of one rank off the device, by purpose.

    masters, moments: records that stay in memory, padding included; copies of shards are among the masters;
    parameters:       shards of parameters that stay in memory;
    gradients:        shards of gradients of all units that the host updates;
    buffers:          buffers for records and shards between drive and memory;
    files:            on drives, not in memory.
    """

    masters: int
    moments: int
    parameters: int
    gradients: int
    buffers: int
    files: int

    @property
    def memory(self) -> int:
        """All host memory: everything but the files."""
        return sum(self) - self.files


def host_bytes(
    units: Sequence[UnitPlan],
    placements: Sequence[Placement],
    rank: Parts,
    parts: Parts,
    formats: Formats,
    accumulate: str,
    mirrored: bool,
    buffer_count: int,
    param_buffer_count: int,
) -> HostBytes:
    """Add up the bytes that shard `rank` of `parts`, of all units or of each, keeps off the device.

    `accumulate`: the dtype of gradients there; `mirrored`: the device is not the host; `buffer_count`: buffers, each as
    large as the largest record in a file; `param_buffer_count`: the same for shards of parameters.
    """
    masters = moments = parameters = gradients = files = slot = param_slot = 0
    shards = zip(units, placements, of_each(rank, units), of_each(parts, units), strict=True)
    for unit, placement, own, cut in shards:
        shard = shard_nbytes(unit, cut, unit.dtype)
        if placement.params is Where.HOST:
            parameters += shard
        elif placement.params is Where.FILE:
            files += shard
            param_slot = max(param_slot, shard)
        if placement.optimizer is Where.DEVICE or not is_updated(unit):
            continue
        kept = record_nbytes(unit, own, cut, formats, keeps_copy(placement, mirrored))
        gradients += 0 if placement.streamed else shard_nbytes(unit, cut, accumulate)
        if placement.optimizer is Where.HOST:
            masters += kept[0]
            moments += kept[1]
        else:
            files += sum(kept)
            slot = max(slot, sum(kept))
    buffers = buffer_count * slot + param_buffer_count * param_slot
    return HostBytes(masters, moments, parameters, gradients, buffers, files)


def host_table(held: HostBytes) -> str:
    """The bytes as a table in MiB: one line for each kind above 0, and the total memory."""
    rows = [(name, nbytes) for name, nbytes in held._asdict().items() if nbytes and name != "files"]
    rows.append(("host memory in all", held.memory))
    if held.files:
        rows.append(("files", held.files))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"  {name:<{width}} {nbytes / MIB:12,.1f} MiB" for name, nbytes in rows)
