"""The global gradient norm, with the same bits at every stage, computed where the gradients are."""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from zero.core import comm
from zero.core.comm import backend_of
from zero.core.sharded_module import ShardedModule
from zero.core.unit import Unit
from zero.core.unit_table import UnitTable
from zero.core.world import World
from zero.kernels import cuda
from zero.kernels.norm import sum_squares, sum_squares_into
from zero.memory.available import host_threads

# For the exact norm. Each square below 1 is cut to two numbers of BITS bits each; 2^22 of the first fill
# an int64 to 2^62.
BITS = 40
CHUNK = 1 << 22
# Python's integers are sent as limbs of 31 bits, whose sum over ranks fits an int64. This many limbs are enough for
# the squares of 2^106 elements.
LIMB = 31
LIMBS = 6


class RankFlags(enum.IntFlag):
    """Conditions of one rank, as bits."""

    LATE_GRADIENTS = 1  # it has gradients that are not reduced yet
    GATHERED_PARAMETERS = 2  # GatheredParameters holds units that are cut
    LOSS = 4  # it knows the loss
    BACKWARD = 8  # it has run a backward
    SIGNAL = 16  # a signal has come by which the run is to be saved and ended


class RankReport(NamedTuple):
    """A rank's report to the others, sent with its part of the norm.

    loss, tokens: of the step; batch: a hash below 2^53 of its first batch, 0 if there is none; count: what its
    micro-batches add to the divisor of a mean over all ranks', and the weight of its loss; backwards: how many it has
    run; squares: see zero/engine/unit_norms.py, equally many on all ranks. They may be fp64 tensors [] on the units'
    device, which are read together with the norm, without another wait.
    """

    flags: RankFlags = RankFlags(0)
    loss: float | torch.Tensor = 0.0
    tokens: float | torch.Tensor = 0.0
    batch: float | torch.Tensor = 0.0
    count: float | torch.Tensor = 1.0
    backwards: float = 0.0
    squares: tuple[float | torch.Tensor, ...] = ()

    @property
    def numbers(self) -> list[float | torch.Tensor]:
        """All values in one list."""
        return [*self[:-1], *self.squares]


class Norm(NamedTuple):
    """L2 norm of the reduced gradients over all units and ranks, fp64 [], and each rank's report.

    rows: fp64 [ranks, k]: two numbers that `reports_of` skips, and the rank's report. The second is the place of
    the first unit of the table whose gradient is not finite there; their number if there is none, or without a check.
    """

    value: torch.Tensor
    rows: torch.Tensor

    @property
    def count(self) -> torch.Tensor:
        """The sum of all ranks' `count`, fp64 []."""
        return self.rows[:, 2 + RankReport._fields.index("count")].sum()


def global_norm(sharded: ShardedModule, report: RankReport) -> Norm:
    """The norm of the sums of gradients; collective.

    It brings each rank's report to all. Every rank squares its span of each unit in fp64, whether its shard is that
    span or, if gradients are not sharded, the whole; units of one mesh add up first, then spans in order, then meshes.
    So all stages add the same numbers in the same order. A rank adds 0 for a mesh of which it has no unit.
    """
    units, meshes, device = sharded.trained, sharded.meshes.made, sharded.device
    squares = _row([_squares(unit) for unit in units], device)
    bad = _first_bad(squares, sharded.table) if cuda.reads_wait(device) else len(sharded.table.names)
    of_mesh = [[at for at, unit in enumerate(units) if unit.mesh.order == mesh.order] for mesh in meshes]
    sums = [_sum(squares if len(at) == len(units) else _chosen(squares, at)) for at in of_mesh]
    rows = comm.gather_scalars(_row([*sums, bad, *report.numbers], device), sharded.world, read=False)
    total = _sum(torch.stack([_sum(mesh.summed.by_span(rows[:, at])) for at, mesh in enumerate(meshes)]))
    if sharded.meshes.local:  # each replica's own; where that of any is not finite, all skip the step
        total = total + rows[:, : len(sums)].sum() * 0.0
    # torch's root of an fp64 number may be one ulp off on a CPU.
    root = total.sqrt() if cuda.reads_wait(device) else torch.full_like(total, math.sqrt(total))
    return Norm(root, rows[:, len(sums) - 1 :])


def _chosen(values: torch.Tensor, at: list[int]) -> torch.Tensor:
    """The values at these places, by views: an index would be copied to the device, for which the host waits."""
    return torch.cat([values[each : each + 1] for each in at]) if at else values[:0]


def hosts_connected(world: World) -> bool:
    """Whether `flags_of` works: the ranks' hosts can send messages without their GPUs."""
    return world.size == 1 or backend_of(world.group, torch.device("cpu")) == "gloo"


def flags_of(report: RankReport, world: World) -> dict[int, RankFlags]:
    """The flags of each global rank; this rank's are in `report`. Waits for other ranks, but for no device."""
    own = torch.tensor([int(report.flags)])
    rows = comm.gather_scalars(own, world, "conditions of the ranks", read=False)
    return {rank: RankFlags(flags) for rank, (flags,) in zip(world.ranks, rows.tolist(), strict=True)}


def exact_norm(sharded: ShardedModule, report: RankReport) -> Norm:
    """The same norm as `global_norm`, computed exactly; collective.

    The same bits however gradients are sharded or ordered: squares of fp32 numbers are exact in fp64; relative to the
    largest gradient of all they are cut to a fixed number of binary places, and integers add up without
    rounding. Independent of world size, stage, units and their meshes. The cut loses less than 2^-80 of the largest
    square per element: at 2^30 elements a relative error of the norm below 2^-50. inf or NaN if an element is.
    """
    world, device = sharded.world, sharded.device
    parts = [unit.counted(unit.gradients.shard) for unit in sharded.trained]
    rows = comm.gather_scalars(_row([largest_of(parts), len(sharded.table.names), *report.numbers], device), world)
    bound = rows[:, 0].amax()  # NaN if there is one
    if (largest := bound.item()) == 0 or not math.isfinite(largest):
        return Norm(bound, rows)
    exponent = math.frexp(largest)[1]
    own = sum_of_squares(parts, exponent)
    limbs = [own >> LIMB * index & (1 << LIMB) - 1 for index in range(LIMBS)]
    total = 0
    for row in comm.gather_scalars(torch.tensor(limbs, dtype=torch.int64, device=device), world).tolist():
        total += sum(limb << LIMB * index for index, limb in enumerate(row))
    return Norm(torch.full_like(bound, norm_of(total, exponent)), rows)


def largest_of(parts: Iterable[torch.Tensor]) -> float:
    """The largest absolute value of all elements, 0 without any; inf or NaN if there is one (NaN before inf)."""
    values = [torch.linalg.vector_norm(part, math.inf) for part in parts if part.numel()]
    # Some may be in host memory, others on the device.
    return torch.stack([value.to(values[0].device) for value in values]).amax().item() if values else 0.0


def sum_of_squares(parts: Iterable[torch.Tensor], exponent: int) -> int:
    """The sum of (x / 2^exponent)^2 over fp32 tensors, in units of 2^-80; every |x| must be below 2^exponent."""
    total = 0
    for part in parts:
        sums = [_cut(chunk, exponent) for chunk in part.view(-1).split(CHUNK)]
        for high, low in torch.stack(sums).tolist() if sums else ():
            total += (high << BITS) + low
    return total


def norm_of(total: int, exponent: int) -> float:
    """The root of a result of `sum_of_squares`."""
    return math.ldexp(math.sqrt(total), exponent - BITS)


def _first_bad(squares: torch.Tensor, table: UnitTable) -> torch.Tensor:
    """The place in the table of the first of these units whose squares are not finite; the table's length without one.

    On the device, as an fp64 number, without a wait.
    """
    first = squares.isfinite().cumprod(0).sum()
    if len(table.places) == len(table.names):
        return first.double()
    places = torch.tensor([*table.places, len(table.names)], dtype=torch.float64).to(squares.device, non_blocking=True)
    return places.index_select(0, first.view(1))[0]


def _squares(unit: Unit) -> float | torch.Tensor:
    """The sum of the squares of this rank's span; if a device computes it, an fp64 number there."""
    known, mesh = unit.gradients.sum.squares(), unit.mesh.summed
    if known is not None:  # of the whole shard, which every replica has
        return known if mesh.replica.rank == 0 and mesh.counts else 0.0
    part = unit.gradients.shard if mesh.local else unit.counted(unit.gradients.shard)
    if not cuda.reads_wait(part.device):
        # The host reads the gradients that it holds for a GPU with all its threads, as in its updates.
        return sum_squares(part, host_threads() if unit.buffer.full.is_cuda else None)
    squares = torch.empty((), dtype=torch.float64, device=part.device)
    sum_squares_into(part, squares)
    return squares


def _sum(values: torch.Tensor) -> torch.Tensor:
    """The sum of fp64 [n], in an order that depends only on n; on a CPU from the first to the last."""
    # Each of the two functions has a fixed order on only one kind of device.
    return values.sum() if values.is_cuda or not len(values) else values.cumsum(0)[-1]


def _row(values: Sequence[float | torch.Tensor], device: torch.device) -> torch.Tensor:
    """The values as fp64 [n] on the device of the tensors among them, without a wait."""
    if not cuda.reads_wait(device):
        return torch.tensor([float(value) for value in values], dtype=torch.float64)
    parts = [torch.empty(0, dtype=torch.float64, device=device)]
    for there, group in itertools.groupby(values, lambda value: isinstance(value, torch.Tensor)):
        together = list(group)
        numbers = torch.stack(together) if there else torch.tensor(together, dtype=torch.float64)
        parts.append(numbers.to(device, non_blocking=True))
    return torch.cat(parts)


def _cut(chunk: torch.Tensor, exponent: int) -> torch.Tensor:
    """The sums of both halves of the bits, int64 [2]; all products are by powers of two or of 24 bits, thus exact."""
    squares = chunk.double().mul_(2.0**-exponent).square_().mul_(2.0**BITS)
    high = squares.floor()
    low = squares.sub_(high).mul_(2.0**BITS)
    return torch.stack([high.to(torch.int64).sum(), low.to(torch.int64).sum()])


def reports_of(world: World, rows: Sequence[Sequence[float]]) -> dict[int, RankReport]:
    """The report of each global rank, from the rows of a `Norm`."""
    pairs = zip(world.ranks, rows, strict=True)
    return {rank: RankReport(RankFlags(int(flags)), *rest[:5], tuple(rest[5:])) for rank, (_, _, flags, *rest) in pairs}
