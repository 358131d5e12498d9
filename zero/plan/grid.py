"""The world as a grid of axes, and the groups of ranks along them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

# From outermost to innermost: neighbours along the last one are consecutive ranks.
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
DATA = ("dp_replicate", "dp_shard")


class UnitAxes(NamedTuple):
    """The axes of the ranks that share a unit.

    It is cut along `shard` and repeated along `replica`, and its gradient is summed along both. Along `same` ranks have
    equal values and equal gradients, which are not summed; along `parts` are the other parts of parameters that are cut
    by a `Cut`.
    """

    shard: tuple[str, ...]
    replica: tuple[str, ...]
    same: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()

    @property
    def beside(self) -> tuple[str, ...]:
        """The axes along which gradients are not summed."""
        return (*self.same, *self.parts)


DENSE = UnitAxes(("dp_shard",), ("dp_replicate",))
PARTS = DENSE._replace(parts=("tp",))


class GridError(ValueError):
    """Sizes that do not make a grid of the existing ranks."""


@dataclass(frozen=True)
class Grid:
    """`world` ranks numbered along the axes of `AXES`, the last one fastest.

    sizes: by axis; missing ones are 1, except dp_shard, which then takes the remaining ranks.
    Raises GridError for sizes that do not make up `world` ranks.
    """

    world: int
    sizes: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if unknown := sorted(self.sizes.keys() - set(AXES)):
            raise GridError(f"no axis is called {', '.join(map(repr, unknown))}; there are {', '.join(AXES)}")
        for axis, size in {"world": self.world, **self.sizes}.items():
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise GridError(f"{axis}: got {size!r}, wanted an integer of at least 1")
        product = math.prod(self.sizes.values())
        factors = " x ".join(f"{axis} {self.sizes[axis]}" for axis in AXES if axis in self.sizes)
        if "dp_shard" in self.sizes and product != self.world:
            raise GridError(f"{factors} = {product} ranks, but there are {self.world}")
        if self.world % product:
            raise GridError(f"{factors} = {product} does not divide the {self.world} ranks there are")
        rest = {"dp_shard": self.world // product} if "dp_shard" not in self.sizes else {}
        sizes = {axis: {**self.sizes, **rest}.get(axis, 1) for axis in AXES}
        object.__setattr__(self, "sizes", sizes)

    def size(self, *axes: str) -> int:
        """The number of ranks along these axes together."""
        return math.prod(self.sizes[axis] for axis in axes)

    def lists(self, *axes: str) -> list[tuple[int, ...]]:
        """The groups along these axes together, each ascending, ordered by first rank; they partition the world."""
        strides = self._strides()
        fixed = [range(0, self.sizes[axis] * strides[axis], strides[axis]) for axis in AXES if axis not in axes]
        along = [range(0, self.sizes[axis] * strides[axis], strides[axis]) for axis in AXES if axis in axes]
        members = [sum(offsets) for offsets in itertools.product(*along)]
        return [tuple(sum(start) + member for member in members) for start in itertools.product(*fixed)]

    def ranks(self, axes: str | Sequence[str], rank: int) -> tuple[int, ...]:
        """The group of `rank` along one axis, or several."""
        if not 0 <= rank < self.world:
            raise GridError(f"rank: got {rank}, wanted one of 0 to {self.world - 1}")
        strides, along = self._strides(), (axes,) if isinstance(axes, str) else tuple(axes)
        start = rank - sum(rank // strides[axis] % self.sizes[axis] * strides[axis] for axis in along)
        ranges = [range(0, self.sizes[axis] * strides[axis], strides[axis]) for axis in AXES if axis in along]
        return tuple(start + sum(offsets) for offsets in itertools.product(*ranges))

    def spans(self, axes: UnitAxes) -> tuple[int, ...]:
        """All ranks, by groups of a unit's holders, in the order of the spans of it that they count.

        The span of a rank is place along shard x size of replica + place along replica.
        """
        return tuple(
            self.ranks(axes.replica, first)[place]
            for holders in self.lists(*axes.shard, *axes.replica)
            for first in self.ranks(axes.shard, holders[0])
            for place in range(self.size(*axes.replica))
        )

    def embedding(self) -> list[tuple[int, ...]]:
        """The ranks that share a tied embedding: the first and the last of each group along pp."""
        return [(ranks[0], ranks[-1]) if len(ranks) > 1 else ranks for ranks in self.lists("pp")]

    def warnings(self, ranks_per_host: int) -> list[str]:
        """Warnings of unusual grids: odd numbers of data-parallel ranks, tensor parallelism between hosts."""
        lines, data, tp = [], self.size(*DATA), self.sizes["tp"]
        if data & (data - 1):
            lines.append(f"dp is {data}, not a power of two: batches and shards seldom divide by it")
        crossing = [ranks for ranks in self.lists("tp") if ranks[0] // ranks_per_host != ranks[-1] // ranks_per_host]
        if crossing:
            lines.append(
                f"tp is {tp} with {ranks_per_host} ranks on each host: {len(crossing)} of its groups cross hosts, the "
                f"first with ranks {crossing[0][0]} to {crossing[0][-1]}, and each layer sends between them"
            )
        return lines

    def _strides(self) -> dict[str, int]:
        """The distance in ranks of neighbours along each axis."""
        strides, stride = {}, 1
        for axis in reversed(AXES):
            strides[axis] = stride
            stride *= self.sizes[axis]
        return strides
