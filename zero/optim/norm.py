"""The global gradient norm, with the same bits at every stage, and the factor that clips gradients to a limit."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from zero.core import comm
from zero.core.mesh import Mesh
from zero.core.unit import Unit
from zero.kernels.norm import sum_squares, sum_squares_into
from zero.memory.available import host_threads

# Of the exact norm. Each square below 1 is taken as BITS bits, and as many again behind them; 2^22 of the first fill
# an int64 to 2^62.
BITS = 40
CHUNK = 1 << 22
# Python's integers travel as limbs of 31 bits, of which a sum over ranks stays inside an int64. So many are enough for
# the squares of 2^106 elements.
LIMB = 31
LIMBS = 6


class RankFlags(enum.IntFlag):
    """Conditions of a rank, as bits."""

    LATE_GRADIENTS = 1  # gradients have come that are not reduced yet
    GATHERED_PARAMETERS = 2  # GatheredParameters holds units that are cut
    LOSS = 4  # it knows the loss


class RankReport(NamedTuple):
    """What a rank reports to the others with its part of the norm.

    loss, tokens: of the step; batch: a hash below 2^53 of its first batch, 0 where there is none; squares: see
    zero/optim/unit_norms.py, as many on all ranks. Those may be fp64 tensors [] on the device of the units until then,
    which are read where the norm is, without another wait.
    """

    flags: RankFlags = RankFlags(0)
    loss: float | torch.Tensor = 0.0
    tokens: float | torch.Tensor = 0.0
    batch: float | torch.Tensor = 0.0
    squares: tuple[float | torch.Tensor, ...] = ()

    @property
    def numbers(self) -> list[float | torch.Tensor]:
        """All of it in one list."""
        return [*self[:-1], *self.squares]


class Norm(NamedTuple):
    """L2 norm of the reduced gradients over all units and ranks, and the report of each (global) rank."""

    value: float
    reports: dict[int, RankReport]

    def ranks(self, flag: RankFlags) -> list[int]:
        """The global ranks that have set it."""
        return [rank for rank, report in self.reports.items() if flag in report.flags]


def global_norm(units: Sequence[Unit], mesh: Mesh, report: RankReport) -> Norm:
    """The norm of the plain sum (no mean taken); collective. Every rank's report reaches all with it.

    Every rank squares its 1/world_size span of each unit in fp64, whether its shard is that span or, where
    gradients are not cut, the whole; units add up first, then spans in order. So all stages add the same
    numbers in the same order.
    """
    numbers = _numbers([*(_squares(unit, mesh) for unit in units), *report.numbers])
    own = 0.0
    for squares in numbers[: len(units)]:
        own += squares
    values = torch.tensor([own, *numbers[len(units) :]], dtype=torch.float64, device=_device(units))
    rows = comm.gather_scalars(values, mesh.data).tolist()
    total = 0.0
    for place in mesh.by_span:
        total += rows[place][0]
    # A NaN compares false.
    return Norm(math.sqrt(total) if total >= 0 else math.nan, _reports(mesh, rows))


def clip_factor(norm: float, limit: float) -> float:
    """What gradients of norm `norm` are multiplied with so that it is at most `limit`; 1 when limit is 0.

    As torch.nn.utils.clip_grad_norm_: limit / (norm + 1e-6), never above 1.
    """
    return min(1.0, limit / (norm + 1e-6)) if limit > 0 else 1.0


def exact_norm(units: Sequence[Unit], mesh: Mesh, report: RankReport) -> Norm:
    """The norm of the plain sum (no mean taken); collective. Every rank's report reaches all with it.

    The same bits however gradients are cut or ordered: squares of fp32 numbers are exact in fp64; relative to the
    largest gradient of all they are cut to a fixed number of bits behind the point, and integers add up without
    rounding. Independent of world size, stage and units. What is cut off is below 2^-80 of the largest square, for each
    element: at 2^30 elements a relative error of the norm below 2^-50. inf or NaN when an element is.
    """
    device = _device(units)
    parts = [unit.gradients.shard.chunk(mesh.replica.size)[mesh.replica.rank] for unit in units]
    largest = torch.tensor(_numbers([largest_of(parts), *report.numbers]), dtype=torch.float64, device=device)
    rows = comm.gather_scalars(largest, mesh.data).tolist()
    of_ranks = _reports(mesh, rows)
    # As Python numbers, where NaN has to be looked for: max() would pass it over.
    bounds = [row[0] for row in rows]
    if any(math.isnan(value) for value in bounds):
        return Norm(math.nan, of_ranks)
    bound = max(bounds)
    if bound == 0 or math.isinf(bound):
        return Norm(bound, of_ranks)
    exponent = math.frexp(bound)[1]
    own = sum_of_squares(parts, exponent)
    limbs = [own >> LIMB * index & (1 << LIMB) - 1 for index in range(LIMBS)]
    total = 0
    for row in comm.gather_scalars(torch.tensor(limbs, dtype=torch.int64, device=device), mesh.data).tolist():
        total += sum(limb << LIMB * index for index, limb in enumerate(row))
    return Norm(norm_of(total, exponent), of_ranks)


def largest_of(parts: Iterable[torch.Tensor]) -> float:
    """The largest absolute value of all elements, 0 without any; inf or NaN when there is one (NaN before inf)."""
    values = [torch.linalg.vector_norm(part, math.inf) for part in parts if part.numel()]
    # Some may lie in host memory, others on the device.
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
    """The root of what `sum_of_squares` gave."""
    return math.ldexp(math.sqrt(total), exponent - BITS)


def _squares(unit: Unit, mesh: Mesh) -> float | torch.Tensor:
    """The sum of the squares of this rank's span: where it is computed on a GPU, an fp64 number there."""
    known = unit.gradients.sum.squares()
    if known is not None:  # of the whole shard, which every replica has
        return known if mesh.replica.rank == 0 else 0.0
    part = unit.gradients.shard.chunk(mesh.replica.size)[mesh.replica.rank]
    if not part.is_cuda:
        # What the host holds of a GPU's model it reads with all threads it has, as its updates do.
        return sum_squares(part, host_threads() if unit.full.is_cuda else None)
    squares = torch.empty((), dtype=torch.float64, device=part.device)
    sum_squares_into(part, squares)
    return squares


def _numbers(values: Sequence[float | torch.Tensor]) -> list[float]:
    """The same as Python numbers; a device is waited for once."""
    on_device = [value for value in values if isinstance(value, torch.Tensor)]
    read = iter(torch.stack(on_device).tolist() if on_device else ())
    return [next(read) if isinstance(value, torch.Tensor) else value for value in values]


def _cut(chunk: torch.Tensor, exponent: int) -> torch.Tensor:
    """The sums of both halves of the bits, int64 [2]; all products are by powers of two or of 24 bits, thus exact."""
    squares = chunk.double().mul_(2.0**-exponent).square_().mul_(2.0**BITS)
    high = squares.floor()
    low = squares.sub_(high).mul_(2.0**BITS)
    return torch.stack([high.to(torch.int64).sum(), low.to(torch.int64).sum()])


def _reports(mesh: Mesh, rows: Sequence[Sequence[float]]) -> dict[int, RankReport]:
    """What stands behind the first number of each row."""
    pairs = zip(mesh.data.ranks, rows, strict=True)
    return {rank: RankReport(RankFlags(int(flags)), *rest[:3], tuple(rest[3:])) for rank, (_, flags, *rest) in pairs}


def _device(units: Sequence[Unit]) -> torch.device:
    return units[0].full.device if units else torch.device("cpu")
