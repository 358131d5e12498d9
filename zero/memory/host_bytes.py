"""What one rank keeps of its state off the device: in host memory and in files, byte by byte, before it is allocated.

What the optimizer updates together lies together: a *record* is the state of one unit's shard in one piece, so that
one request moves all of it between a drive and memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from zero.plan.formats import ITEMSIZE, Formats, runs
from zero.plan.layout import round_up
from zero.plan.placement import Placement, Where, is_updated, keeps_copy
from zero.plan.units import UnitPlan

LINE = 64  # bytes: entries start on cache lines, so that vector loads are aligned and threads share none
PAGE = 4096  # bytes: what goes to a drive past the page cache starts and ends on a page
MIB = 2**20


class Entry(NamedTuple):
    """One array of a record: `numel` elements of `dtype`, a key of ITEMSIZE, from byte `offset` of the record on.

    Names: "shard", the parameters; "master", what is kept beside them for their exact values; "moment 0.1", values
    of moment 0 in run 1 of the shard; "scales 0.1", the scales of those where they are in 8 bit.
    """

    name: str
    dtype: str
    numel: int
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of the array, without the padding behind it."""
        return ITEMSIZE[self.dtype] * self.numel


class Record(NamedTuple):
    """The state of one unit's shard: its arrays in order, and the bytes of all, a multiple of PAGE."""

    entries: tuple[Entry, ...]
    nbytes: int

    @property
    def moments_at(self) -> int:
        """The byte at which moments begin; before it lie shard and master."""
        return next((entry.offset for entry in self.entries if entry.name.startswith("moment")), self.nbytes)


def record(unit: UnitPlan, rank: int, parts: int, formats: Formats, mirrored: bool) -> Record:
    """Lay out the state of shard `rank` of `parts` of a unit; empty for a unit that no optimizer updates.

    `mirrored`: the parameters' own shard is not in host memory, so that the record has a copy; in fp32 that is the
    master itself. Without it, fp32 parameters are masters where they are and no entry holds them.
    """
    if not is_updated(unit):
        return Record((), 0)
    entries, end = [], 0
    for name, dtype, numel in _arrays(unit, rank, parts, formats, mirrored):
        start = round_up(end, LINE)
        entries.append(Entry(name, dtype, numel, start))
        end = start + entries[-1].nbytes
    return Record(tuple(entries), round_up(end, PAGE))


def _arrays(unit: UnitPlan, rank: int, parts: int, formats: Formats, mirrored: bool) -> Iterator[tuple[str, str, int]]:
    """Name, dtype and elements of what a record holds, in order."""
    window, master = unit.layout.shard(rank, parts), formats.master_dtype(unit.dtype)
    if mirrored:
        yield "shard", unit.dtype, window.numel
    if master is not None:
        yield "master", master, window.numel
    for index, run in enumerate(runs(unit, window, formats.moments)):
        for state in range(formats.states):
            for kind, dtype, numel in formats.moment_arrays(run.numel, run.format):
                yield f"{kind} {state}.{index}", dtype, numel


def gradient_nbytes(unit: UnitPlan, parts: int, accumulate_dtype: str) -> int:
    """Bytes that one rank's shard of the unit's gradient takes in host memory, whole pages."""
    return round_up(ITEMSIZE[accumulate_dtype] * (unit.layout.numel // parts), PAGE)


def parameter_nbytes(unit: UnitPlan, parts: int) -> int:
    """Bytes that one rank's shard of the unit's parameters takes off the device, whole pages."""
    return round_up(ITEMSIZE[unit.dtype] * (unit.layout.numel // parts), PAGE)


class HostBytes(NamedTuple):
    """Bytes of one rank off the device, by what they are for.

    masters, moments: records that stay in memory, padding included; copies of shards are among the masters;
    parameters:       shards of parameters that stay in memory;
    gradients:        shards of gradients of all units whose optimizer state is off the device;
    buffers:          buffers through which records and shards pass on their way between drive and memory;
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
        """Host memory of all of it: everything but the files."""
        return sum(self) - self.files


def host_bytes(
    units: Sequence[UnitPlan],
    placements: Sequence[Placement],
    rank: int,
    parts: int,
    formats: Formats,
    accumulate: str,
    mirrored: bool,
    buffer_count: int,
    param_buffer_count: int,
) -> HostBytes:
    """Add up what rank `rank` of `parts` keeps off the device.

    `accumulate`: the dtype of gradients there; `mirrored`: the device is not the host; `buffer_count`: buffers, each as
    large as the largest record in a file; `param_buffer_count`: the same for shards of parameters.
    """
    masters = moments = parameters = gradients = files = slot = param_slot = 0
    for unit, placement in zip(units, placements, strict=True):
        shard = parameter_nbytes(unit, parts)
        if placement.params is Where.HOST:
            parameters += shard
        elif placement.params is Where.FILE:
            files += shard
            param_slot = max(param_slot, shard)
        if placement.optimizer is Where.DEVICE or not is_updated(unit):
            continue
        kept = record(unit, rank, parts, formats, keeps_copy(placement, mirrored))
        gradients += gradient_nbytes(unit, parts, accumulate)
        if placement.optimizer is Where.HOST:
            masters += kept.moments_at
            moments += kept.nbytes - kept.moments_at
        else:
            files += kept.nbytes
            slot = max(slot, kept.nbytes)
    buffers = buffer_count * slot + param_buffer_count * param_slot
    return HostBytes(masters, moments, parameters, gradients, buffers, files)


def host_table(held: HostBytes) -> str:
    """The bytes as a table in MiB, one line for each kind that is there, and the memory of all."""
    rows = [(name, nbytes) for name, nbytes in held._asdict().items() if nbytes and name != "files"]
    rows.append(("host memory in all", held.memory))
    if held.files:
        rows.append(("files", held.files))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"  {name:<{width}} {nbytes / MIB:12,.1f} MiB" for name, nbytes in rows)
