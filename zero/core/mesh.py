"""The ranks that one unit is shared along, as a mesh of two axes: along *shard* it is cut, along *replica* repeated.

Stage 0 is a mesh whose shard axis has size 1, stages 1 to 3 one whose replica axis has, and HSDP (MiCS) has both;
nothing else in the core asks for the stage. A mesh belongs to its unit: units of one engine may have different ones,
and all other code asks the unit for it. What concerns all ranks together is the world's (zero/core/world.py).
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from zero.core.comm import Axis
from zero.core.world import World, world_of_one
from zero.plan.grid import AXES, DATA, DENSE, EXPERT_AXES, Grid, UnitAxes
from zero.plan.layout import Layout, Span
from zero.plan.sharding import Sharding, summed_here


@dataclass(frozen=True)
class Mesh:
    """The axes that a unit is shared along.

    shard, replica: see the module;
    data:      all ranks of both, which hold the unit: for its first values, and what one of them tells the others;
    counts:    whether this rank counts its span in norms, and writes it: not where others hold the same;
    peers:     the ranks that hold the same values, or the other parts of what is cut by a `Cut`, this one included;
    world:     all ranks of the engine;
    axes:      of the grid, that it is made of;
    order:     places in the world in the order of the spans that the ranks there count, group after group;
    secondary: with hpZ, the ranks of this node, which hold a second copy of the parameters cut among them, or None;
    across:    with hpZ, the ranks with the same place in the other nodes, this one included, or None;
    local:     whether replicas train by themselves between means of their parameters (local SGD).
    """

    shard: Axis
    replica: Axis
    data: Axis
    peers: Axis
    world: Axis
    counts: bool = True
    axes: UnitAxes = DENSE
    order: tuple[int, ...] = (0,)
    secondary: Axis | None = None
    across: Axis | None = None
    local: bool = False
    _indices: dict[Any, torch.Tensor] = field(default_factory=dict, compare=False, repr=False)

    @property
    def span(self) -> int:
        """Which of `data.size` equal spans of a flat buffer this rank counts in norms and writes to checkpoints.

        It lies inside the rank's shard, and no other rank that holds the unit has the same.
        """
        return self.shard.rank * self.replica.size + self.replica.rank

    @property
    def summed(self) -> Mesh:
        """The mesh that gradients are summed over, and norms are of: this one, or that of the own replica."""
        if not self.local:
            return self
        order = tuple(map(self.world.ranks.index, self.shard.ranks))
        return replace(self, replica=self.world.point(), data=self.shard, order=order)

    def counted_span(self, layout: Layout) -> Span:
        """The span of a unit with this layout that this rank counts and writes; empty where others do for it."""
        span = layout.shard(self.span, self.data.size)
        return span if self.counts else span._replace(numel=0)

    def counterpart(self, rank: int) -> int:
        """The place along data of the one here that is where global `rank` is among those that it shares with."""
        place = self.world.ranks.index(rank)
        first = self.order.index(place) // self.data.size * self.data.size
        return sorted(self.order[first : first + self.data.size]).index(place)

    @property
    def nested(self) -> bool:
        """Whether the ranks along shard follow each other, so that sums along shard first are those of neighbours."""
        at = self.data.ranks.index(self.shard.ranks[0])
        return self.data.ranks[at : at + self.shard.size] == self.shard.ranks

    def by_span(self, values: torch.Tensor) -> torch.Tensor:
        """Values of each rank of the world [world.size, ...], in the order of the spans that they count."""
        if len(self.order) == self.data.size and self.nested:  # by views, for which no device is waited for
            own = values.narrow(0, min(self.order), self.data.size)
            return own.unflatten(0, (self.replica.size, self.shard.size)).transpose(0, 1).flatten(0, 1)
        return values[self._index(self.order, values.device)]

    def by_place(self, rows: torch.Tensor) -> torch.Tensor:
        """The reverse: rows of the spans [data.size, ...], in the order of the ranks that count them."""
        return rows[self._index(tuple(map(self.order.index, sorted(self.order))), rows.device)]

    def _index(self, places: tuple[int, ...], device: torch.device) -> torch.Tensor:
        """These as an index on the device: copied there once, since the host would wait for it at each step."""
        if (places, device) not in self._indices:
            self._indices[places, device] = torch.tensor(places, device=device)
        return self._indices[places, device]


class Meshes:
    """Makes the meshes of one engine's units from the axes of its grid, each once; making one is collective.

    grid: of all ranks of the world. What is not sharded at all (stage 0) is repeated along the axes that it would be
    sharded along. State of dense units is sharded over the ranks that share a sequence, too;
    secondary_size: ranks of a node for hpZ, a divisor of the world's size; 1 for none;
    reduce: `zero.reduce`: see `summed_here`; local: see `Mesh`.
    """

    def __init__(
        self,
        world: World,
        grid: Grid,
        sharding: Sharding,
        secondary_size: int = 1,
        reduce: str = "auto",
        timeout: float = math.inf,
        local: bool = False,
    ) -> None:
        self.grid, self.local = grid, local
        self._cut = sharding.optim
        self._dense = DENSE if grid.size("tp") == 1 else DENSE._replace(same=("tp",))
        self._world, self._timeout, self._reduce = world, timeout, reduce
        self._secondary_size = secondary_size
        self._axes: dict[tuple[int, ...], Axis] = {}  # by places in the world
        self._made: dict[UnitAxes, Mesh] = {}

    @property
    def sizes(self) -> tuple[int, int]:
        """How many ranks have samples of their own, and over how many gradients are summed."""
        return self.grid.size(*DATA), self.grid.size(*DATA, "cp")

    @property
    def made(self) -> tuple[Mesh, ...]:
        """Those that there are, whose spans are counted by different ranks."""
        return tuple({mesh.order: mesh for mesh in self._made.values()}.values())

    @property
    def same_part(self) -> Axis:
        """The ranks that hold the same part of the model: all, but for those along pp; collective."""
        return self.along(*AXES[1:])

    @property
    def apart(self) -> Axis:
        """The ranks that have other stages, samples or tokens: all, but for those along tp; collective."""
        return self.along(*AXES[:-1])

    def along(self, *names: str) -> Axis:
        """The ranks along these axes of the grid; collective."""
        return self._along(names, reduces=False)

    def apart_along(self, purpose: str, *names: str) -> Axis:
        """As `along`, with a group that nothing else is sent over; collective."""
        axis, world = self.along(*names), self._world
        if axis.size == 1:
            return axis
        group = world.new_group(self.grid.ranks(names, world.rank), self._timeout, purpose)
        return replace(axis, group_ref=weakref.ref(group), second_ref=None)

    def lines(self, shape: tuple[int, ...], purpose: str) -> list[dist.ProcessGroup]:
        """This rank's group along each dim of a mesh of this shape of all ranks with samples; collective."""
        places = torch.tensor(self.grid.ranks(DATA, self._world.rank)).view(shape)
        own = (places == self._world.rank).nonzero()[0].tolist()
        found = []
        for dim in range(len(shape)):
            line = places[tuple(slice(None) if dim == at else place for at, place in enumerate(own))]
            found.append(self._world.new_group(line.tolist(), self._timeout, f"{purpose} {dim}"))
        return found

    def of(self, axes: UnitAxes = DENSE) -> Mesh:
        """The mesh of units that are cut and repeated along these axes of the grid."""
        axes = self._on_grid(axes)
        if axes not in self._made:
            shard, replica = (self._with_sums(self._along(names)) for names in axes[:2])
            data, peers = self.along(*axes.shard, *axes.replica), self.along(*axes.peers)
            counts = self.grid.ranks(axes.same, self._world.rank)[0] == self._world.rank
            order = self.grid.spans(axes)
            self._made[axes] = Mesh(
                shard, replica, data, peers, self._world, counts, axes, order, *self._secondary(axes), local=self.local
            )
        return self._made[axes]

    def alike(self, axes: UnitAxes) -> list[tuple[int, ...]]:
        """The groups of places in the world that have the same parameters of these axes."""
        axes = self._on_grid(axes)
        return self.grid.lists(*axes.shard, *axes.replica, *axes.same)

    def _on_grid(self, axes: UnitAxes) -> UnitAxes:
        """The axes with that of sequences among them, and with those of sums; without a shard where nothing is cut."""
        axes = self._dense if axes == DENSE else axes
        shard, replica = axes.shard, (*axes.replica, *axes.sums)
        if "cp" not in (*shard, *replica) and not {*EXPERT_AXES[2:]} & {*shard, *replica}:
            shard, replica = ((*shard, "cp"), replica) if shard else (shard, (*replica, "cp"))
        if not self._cut:
            shard, replica = (), (*replica, *shard)
        return UnitAxes(shard, replica, axes.same, axes.parts)

    def _secondary(self, axes: UnitAxes) -> tuple[Axis | None, Axis | None]:
        if self._secondary_size == 1 or axes != self._on_grid(DENSE):
            return None, None
        size = self._world.size
        nodes = Grid(size, {"dp_replicate": size // self._secondary_size, "dp_shard": self._secondary_size})
        return self._along(("dp_shard",), False, nodes), self._along(("dp_replicate",), False, nodes)

    def _along(self, names: Sequence[str], reduces: bool = True, grid: Grid | None = None) -> Axis:
        """This rank's group along these axes; NCCL `reduces` over a communicator of its own.

        Ranks that are equal share the groups, whichever axes they lie along: each communicator takes some 100 MB.
        """
        world = self._world
        own = (grid or self.grid).ranks(names, world.rank)
        if len(own) == 1:
            return world.point()
        axis = self._axes.get(own)
        if axis is None:
            group = world.group if len(own) == world.size else world.new_group(own, self._timeout, "gathers")
            ranks = tuple(world.ranks[place] for place in own)
            axis = Axis(weakref.ref(group), len(own), own.index(world.rank), world.native, world.watchdog, ranks)
        if reduces and world.native and axis.second_ref is None:
            axis = replace(axis, second_ref=weakref.ref(world.new_group(own, self._timeout, "reductions")))
        self._axes[own] = axis
        return axis

    def _with_sums(self, axis: Axis) -> Axis:
        """The axis, and what is summed along it here."""
        per_node = self._world.per_node
        together = bool(per_node) and axis.ranks[0] // per_node == axis.ranks[-1] // per_node
        return replace(axis, summed_here=summed_here(self._reduce, together))


def mesh_of_one() -> Mesh:
    """The mesh of a process that shares nothing with others, also where there is a process group."""
    alone = world_of_one().point()
    return Mesh(alone, alone, alone, alone, alone)
