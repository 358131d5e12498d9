"""The world as a grid of axes, and the groups of ranks along them."""

from __future__ import annotations

import itertools
import math
import re
from bisect import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

# From outermost to innermost: neighbours along the last one are consecutive ranks.
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
DATA = ("dp_replicate", "dp_shard")
PARTS_OF_MODEL = ("pp", "tp", "ep")  # along these ranks have other parameters
EXPERT_AXES = ("pp", "dp_replicate", "efsdp", "ep")  # of the same ranks: efsdp x ep = dp_shard x cp x tp
WORDS = {f"{axis}_size": axis for axis in (*AXES, "ep")} | {"sp": "cp", "sp_size": "cp"}  # as Accelerate says


class UnitAxes(NamedTuple):
    """The axes of the ranks that share a unit.

    It is cut along `shard` and repeated along `replica`, and its gradient is summed along both. Along `same` ranks have
    equal values and equal gradients, which are not summed; along `sums` equal values, and gradients that are parts of a
    sum; along `parts` are the other parts of parameters that are resharded by a `Cut`.
    """

    shard: tuple[str, ...]
    replica: tuple[str, ...]
    same: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()
    sums: tuple[str, ...] = ()

    @property
    def peers(self) -> tuple[str, ...]:
        """The axes along which gradients are not summed."""
        return (*self.same, *self.parts)


DENSE = UnitAxes(("dp_shard",), ("dp_replicate",))
PARTS = DENSE._replace(parts=("tp",))  # of layers that are cut over tp ranks
SUMS = DENSE._replace(sums=("tp",))  # whole there, and fed a part of the activations
EXPERTS = UnitAxes(("efsdp",), ("dp_replicate",), parts=("ep",))


class GridError(ValueError):
    """Sizes that do not make a grid of the existing ranks."""


def by_axis(sizes: Mapping[str, int]) -> dict[str, int]:
    """The sizes by axis where `WORDS` may stand for axes. Raises GridError for one axis with two sizes."""
    found: dict[str, int] = {}
    for word, size in sizes.items():
        if found.setdefault(axis := WORDS.get(word, word), size) != size:
            raise GridError(f"{axis}: got {found[axis]} and, as {word}, {size}, for one axis; keep one of the two")
    return found


@dataclass(frozen=True)
class Grid:
    """`world` ranks numbered along the axes of `AXES`, the last one fastest, and along `EXPERT_AXES`.

    sizes: by axis or one of `WORDS`; missing ones are 1, except dp_shard, which then takes the remaining ranks.
    ep: consecutive ranks that experts are divided among; it divides dp_shard x cp x tp.
    `lists` and `ranks` know also mp, the model-parallel ranks of a replica (pp x tp), embedding, its first and last
    stage, and places along pp, as in "pp:0,3": those of these places form one group, and those of others another. An
    axis of 4 runs of 2 places is "tp/2" x "tp%2": along "tp/2" lie the same places of all runs, along "tp%2" one run.
    Raises GridError for sizes that do not make up `world` ranks, with the nearest that do.
    """

    world: int
    sizes: Mapping[str, int] = field(default_factory=dict)
    ep: int = 1

    def __post_init__(self) -> None:
        given = by_axis(self.sizes)
        if unknown := sorted(given.keys() - set(AXES)):
            raise GridError(f"no axis is called {', '.join(map(repr, unknown))}; there are {', '.join(AXES)}")
        for axis, size in {"world": self.world, **given, "ep": self.ep}.items():
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise GridError(f"{axis}: got {size!r}, wanted an integer of at least 1")
        product, whole = math.prod(given.values()), "dp_shard" in given
        factors = " x ".join(f"{axis} {given[axis]}" for axis in AXES if axis in given) + f" = {product}"
        if product != self.world if whole else self.world % product:
            wrong = "ranks, but there are {}" if whole else "does not divide the {} ranks there are"
            raise GridError(f"{factors} {wrong.format(self.world)}; {_nearest(given, self.world)}")
        sizes = dict.fromkeys(AXES, 1) | {"dp_shard": self.world // product} | given
        folded = sizes["dp_shard"] * sizes["cp"] * sizes["tp"]
        if folded % self.ep:
            near = _nearest({"ep": self.ep}, folded)
            raise GridError(f"ep {self.ep} does not divide dp_shard x cp x tp = {folded}; {near}")
        object.__setattr__(self, "sizes", sizes | {"efsdp": folded // self.ep, "ep": self.ep})

    def size(self, *axes: str) -> int:
        """The number of ranks along these axes together."""
        if (some := _some(axes)) is not None:
            return self.size(*some.axes) // self.sizes["pp"] * len(some.places)
        return math.prod(map(len, self._steps(axes)[0]))

    def lists(self, *axes: str) -> list[tuple[int, ...]]:
        """The groups along these axes together, each ascending, ordered by first rank; they partition the world."""
        if axes == ("embedding",):
            return [self.ranks("embedding", first) for first in range(self.world // self.sizes["pp"])]
        if (some := _some(axes)) is not None:
            whole = self.lists(*some.axes)
            return sorted(filter(None, (self._at(group, some, there) for group in whole for there in (True, False))))
        along, fixed = self._steps(axes)
        members = [sum(offsets) for offsets in itertools.product(*along)]
        return [tuple(sum(start) + member for member in members) for start in itertools.product(*fixed)]

    def ranks(self, axes: str | Sequence[str], rank: int) -> tuple[int, ...]:
        """The group of `rank` along one axis, or several; empty for embedding between the first and the last stage."""
        if not 0 <= rank < self.world:
            raise GridError(f"rank: got {rank}, wanted one of 0 to {self.world - 1}")
        names = (axes,) if isinstance(axes, str) else tuple(axes)
        if names == ("embedding",):
            ends = self.ranks("pp", rank)[:: max(1, self.sizes["pp"] - 1)]
            return ends if rank in ends else ()
        if (some := _some(names)) is not None:
            return self._at(self.ranks(some.axes, rank), some, rank in self._at((rank,), some, True))
        along, _ = self._steps(names)
        start = rank - sum(rank // each.step % len(each) * each.step for each in along)
        return tuple(start + sum(offsets) for offsets in itertools.product(*along))

    def spans(self, axes: UnitAxes) -> tuple[int, ...]:
        """All ranks, by groups of a unit's holders, in the order of the spans of it that they count.

        The span of a rank is place along shard x size of replica + place along replica.
        """
        return tuple(
            self.ranks(axes.replica, first)[place]
            for holders in self.lists(*axes.shard, *axes.replica)
            for first in self.ranks(axes.shard, holders[0])
            for place in range(len(self.ranks(axes.replica, first)))
        )

    @property
    def factors(self) -> str:
        """The axes of more than one rank, with their sizes, in words."""
        return " x ".join(f"{axis} {self.size(axis)}" for axis in AXES if self.size(axis) > 1)

    def text(self) -> list[str]:
        """Lines with the groups along each axis, those of one rank left out."""
        both, cp, ep = min(map(self.size, DATA)) > 1, self.size("cp") > 1, self.size("ep") > 1
        kinds = {
            "tensor parallel (tp)": ("tp",),
            "context parallel (cp)": ("cp",),
            "pipeline (pp)": ("pp",),
            "data parallel (dp)": DATA,
            "data and context parallel (dp x cp)": (*DATA, "cp") * cp,
            "shards of state (dp_shard)": ("dp_shard",) * both,
            "replicas of state (dp_replicate)": ("dp_replicate",) * both,
            "one replica of the model (mp: pp x tp)": ("mp",),
            "first and last stage (embedding)": ("embedding",),
            "experts (ep)": ("ep",),
            "shards of an expert's state (efsdp)": ("efsdp",) * ep,
        }
        lines = [f"{self.world} rank{'s' * (self.world > 1)}{': ' * bool(self.factors)}{self.factors}"]
        for kind, axes in kinds.items():
            if len((lists := self.lists(*axes))[0]) > 1:
                lines += [f"{kind}: {len(lists)} of {len(lists[0])}", f"  {' '.join(map(str, map(list, lists)))}"]
        return lines

    def warnings(self, ranks_per_host: int) -> list[str]:
        """Warnings of unusual grids: odd numbers of ranks along an axis, tensor parallelism between hosts."""
        lines, data = [], self.size(*DATA)
        for axis, what in ("tp", "heads and widths"), ("pp", "layers"):
            if (size := self.sizes[axis]) > 1 and size % 2:
                lines.append(f"{axis} is {size}, an odd number: {what} seldom divide by it")
        if data & (data - 1):
            lines.append(f"dp is {data}, not a power of two: batches and shards seldom divide by it")
        return lines + self.crossing([ranks_per_host] * -(-self.world // ranks_per_host))

    def crossing(self, hosts: Sequence[int]) -> list[str]:
        """A warning where tensor-parallel ranks are on several hosts, which have so many ranks each; or nothing."""
        ends = list(itertools.accumulate(hosts))
        found = [ranks for ranks in self.lists("tp") if bisect(ends, ranks[0]) != bisect(ends, ranks[-1])]
        if not found:
            return []
        each = (
            f"{hosts[0]} ranks on each host" if len({*hosts}) == 1 else f"hosts of {', '.join(map(str, hosts))} ranks"
        )
        return [
            f"tp is {self.sizes['tp']} with {each}: {len(found)} of its groups cross hosts, the first with ranks "
            f"{found[0][0]} to {found[0][-1]}, and each layer sends between them"
        ]

    def _at(self, group: tuple[int, ...], some: _Some, there: bool) -> tuple[int, ...]:
        """Those of the group that are at these places along pp, or are not."""
        each = self.world // self.sizes["pp"]
        return tuple(rank for rank in group if (rank // each in some.places) is there)

    def _steps(self, names: Sequence[str]) -> tuple[list[range], list[range]]:
        """The strides of a rank along each of these axes, and along each of the others, from the outermost in."""
        axes = {axis for name in names for axis in (("pp", "tp") if name == "mp" else (name,))}
        runs = {axis: int(run) for axis, run in (re.split("[/%]", name) for name in axes if re.search("[/%]", name))}
        order = AXES if {re.split("[/%]", name)[0] for name in axes} <= {*AXES} else EXPERT_AXES
        if not {re.split("[/%]", name)[0] for name in axes} <= {*order}:
            raise GridError(f"no groups are along {', '.join(names)}; axes are {AXES} and, for experts, {EXPERT_AXES}")
        stride, along, fixed = self.world, [], []
        for axis in order:
            step, run = stride // self.sizes[axis], runs.get(axis, 1)
            for name, steps in (
                (f"{axis}/{run}", range(0, stride, step * run)),
                (f"{axis}%{run}", range(0, step * run, step)),
            ):
                (along if {axis, name} & axes else fixed).append(steps)
            stride = step
        return along, fixed


class _Some(NamedTuple):
    """Axes of which pp stands for some places along it only."""

    axes: tuple[str, ...]
    places: tuple[int, ...]


def parts_of(axes: UnitAxes, world: int) -> int:
    """A number that all groups along these axes of a grid of `world` ranks divide."""
    some = _some((*axes.shard, *axes.replica, *axes.sums))
    return world if some is None else world * len(some.places)


def _some(names: Sequence[str]) -> _Some | None:
    for name in names:
        axis, _, places = name.partition(":")
        if places:
            plain = tuple(axis if each == name else each for each in names)
            return _Some(plain, tuple(map(int, places.split(","))))
    return None


def _nearest(sizes: Mapping[str, int], world: int) -> str:
    """Sizes that do make a grid: the next below these, and above; those of the axes that come first change least."""
    found = []
    for up in (False, True):
        rest, near = world, {}
        for axis, size in sorted(sizes.items(), key=lambda item: item[0] == "dp_shard"):  # that takes what is left
            fit = [each for each in range(1, rest + 1) if rest % each == 0]
            near[axis] = rest if axis == "dp_shard" else fit[min(bisect(fit, size - up) - (not up), len(fit) - 1)]
            rest //= near[axis]
        found.append(" x ".join(f"{axis} {size}" for axis, size in near.items()))
    return f"nearest that fit: {' or '.join(dict.fromkeys(found))}"
