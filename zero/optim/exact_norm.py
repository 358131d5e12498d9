"""The global gradient norm as a sum of integers: the same bits however the gradients are cut or ordered.

Squares of fp32 numbers are exact in fp64. Relative to the largest gradient of all they are cut to a fixed number
of bits behind the point, and integers add up without rounding, so that no order and no grouping can show.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

from zero.core import comm
from zero.core.mesh import Mesh
from zero.core.unit import Unit
from zero.optim.clip import Norm, Says

# Each square below 1 is taken as BITS bits, and as many again behind them; 2^22 of the first fill an int64 to 2^62.
BITS = 40
CHUNK = 1 << 22
# Python's integers travel as limbs of 31 bits, of which a sum over ranks stays inside an int64.
LIMB = 31
LIMBS = 6


def exact_norm(units: Sequence[Unit], mesh: Mesh, says: Says) -> Norm:
    """The norm of the plain sum (no mean taken); collective. What any rank `says` reaches all with it.

    Independent of world size, stage and units. What is cut off is below 2^-80 of the largest square, for each
    element: at 2^30 elements a relative error of the norm below 2^-50. inf or NaN when an element is.
    """
    axis = mesh.data
    device = units[0].full.device if units else torch.device("cpu")
    parts = [unit.gradients.shard.chunk(mesh.replica.size)[mesh.replica.rank] for unit in units]
    largest = torch.tensor([largest_of(parts), float(says)], dtype=torch.float64, device=device)
    # As Python numbers, where NaN has to be looked for: max() would pass it over.
    found, told = zip(*comm.gather_scalars(largest, axis).tolist(), strict=True)
    said = [Says(int(word)) for word in told]
    if any(math.isnan(value) for value in found):
        return Norm(math.nan, said)
    bound = max(found)
    if bound == 0 or math.isinf(bound):
        return Norm(bound, said)
    exponent = math.frexp(bound)[1]
    limbs = torch.tensor(_limbs(sum_of_squares(parts, exponent)), dtype=torch.int64, device=device)
    total = 0
    for row in comm.gather_scalars(limbs, axis).tolist():
        total += sum(limb << LIMB * index for index, limb in enumerate(row))
    return Norm(norm_of(total, exponent), said)


def largest_of(parts: Iterable[torch.Tensor]) -> float:
    """The largest absolute value of all elements, 0 without any; inf or NaN when there is one (NaN before inf)."""
    found = [torch.linalg.vector_norm(part, math.inf) for part in parts if part.numel()]
    # Some may lie in host memory, others on the device.
    return torch.stack([value.to(found[0].device) for value in found]).amax().item() if found else 0.0


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


def _cut(chunk: torch.Tensor, exponent: int) -> torch.Tensor:
    """The sums of both halves of the bits, int64 [2]; all products are by powers of two or of 24 bits, thus exact."""
    squares = chunk.double().mul_(2.0**-exponent).square_().mul_(2.0**BITS)
    high = squares.floor()
    low = squares.sub_(high).mul_(2.0**BITS)
    return torch.stack([high.to(torch.int64).sum(), low.to(torch.int64).sum()])


def _limbs(total: int) -> list[int]:
    if total >> LIMB * LIMBS:
        raise RuntimeError(f"the sum of squares has {total.bit_length()} bits; there is room for {LIMB * LIMBS}")
    return [total >> LIMB * index & (1 << LIMB) - 1 for index in range(LIMBS)]
