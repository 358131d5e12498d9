"""The interface of everything that updates a unit's shard."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from zero.core.unit import Unit
from zero.core.world import World
from zero.kernels.moments import Moment
from zero.plan.formats import Formats
from zero.plan.layout import Fragment, Span

Group = Mapping[str, Any]


class Update(NamedTuple):
    """One unit's part of a step. It keeps the gradient, and the hyperparameters of the step, alive."""

    unit: Unit
    grad: torch.Tensor
    group: Group
    factor: float | torch.Tensor
    publish: bool = False  # send the new parameters to the other ranks as soon as they are computed


class ShardStates(Protocol):
    """The optimizer's state of the shards of units, to be read, written, saved and moved."""

    formats: Formats
    foreseen: bool  # size and layout of the state are known before the first step, as files require
    sized: bool = True  # `nbytes` counts the state before the first step, too

    def begin(self, unit: Unit, group: Group) -> None:
        """Make the state of the unit, if it is `foreseen`, so that it is in its place before the first step."""

    def nbytes(self, unit: Unit, group: Group) -> int:
        """Bytes of the unit's optimizer state, without the master."""

    def tensors(self, unit: Unit) -> Iterator[tuple[str, Span, torch.Tensor]]:
        """All existing tensors of the unit's state, as stored: name, elements of the shard, and the tensor."""

    def keys(self, unit: Unit, group: Group) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Torch's names of the states: those with an element per parameter, and single numbers of the unit."""

    def number(self, unit: Unit, group: Group, key: str) -> float:
        """The number `key`; "step" is an int."""

    def set_number(self, unit: Unit, group: Group, key: str, value: float) -> None:
        """Replace it."""

    def read(self, unit: Unit, group: Group, key: str, part: Fragment) -> torch.Tensor:
        """State `key` of a fragment of the shard, fp32 [n], a copy; before the first step, its initial values."""

    def write(self, unit: Unit, group: Group, key: str, part: Fragment, values: torch.Tensor) -> None:
        """Replace it by `values`, fp32 [n], rounded to nearest if the state is stored in fewer bits."""

    def kept(self, unit: Unit, group: Group, part: Fragment, make: Collection[str] = ()) -> dict[str, Kept]:
        """All states of a fragment of the shard as stored: views to read and write while the state is acquired.

        The last block of an 8-bit state is whole, so it may have padding elements after the fragment. Empty if the
        state does not exist yet; the keys in `make` are created.
        """

    def restart(self, unit: Unit, group: Group, part: Fragment | None = None) -> None:
        """Reset the states of a fragment to their initial values; without one, of the whole unit, with its numbers.

        The state must be acquired.
        """

    def rows(self, unit: Unit, group: Group, load: bool = False) -> Iterator[Rows]:
        """The state with one number per row of a matrix, as far as this rank has to save it; by default none.

        With `load` all of the unit's, new, to be filled on every rank.
        """
        return iter(())

    def forget(self) -> None:
        """Free all state."""


class ShardOptimizer(Protocol):
    """Updates the shard of one unit with one parameter group's hyperparameters.

    states: what it keeps of each unit between steps.
    """

    defaults: dict[str, Any]
    states: ShardStates
    factor_on_device: bool  # `update` on a GPU reads its factor there, and changes nothing if that is NaN
    marks_changes: bool = False  # `update` marks changed elements in `unit.shard.changes`; else its caller compares

    def check(self, group: Group) -> None:
        """Raise ValueError for hyperparameters that no step can use, if that is known before; by default never."""

    def prepare(self, updates: Sequence[Update], world: World) -> None:
        """Prepare a step for its `updates`, those of all units in order, on all ranks of the `world`.

        It runs on the training loop's thread, on all ranks alike, so it may use collectives.
        """

    def update(
        self, unit: Unit, grad: torch.Tensor, group: Group, factor: float | torch.Tensor, threads: int | None = None
    ) -> None:
        """Apply one step with gradient = `factor` x `grad` [n]; writes master and its shard.

        The state must be acquired. `factor`: a tensor, fp64 [], only with `factor_on_device`. `threads`: how many
        compute it on a CPU; default torch's.
        """

    def take_back(self, units: Iterable[Unit]) -> None:
        """Discount the last update of these units, because its factor was NaN; with `factor_on_device`."""


class Rows(NamedTuple):
    """The numbers fp32 [k] of rows from `first` on, of a parameter with `of` rows."""

    name: str
    first: int
    of: int
    values: torch.Tensor


class Kept(NamedTuple):
    """One state of some elements, and whether it can be negative."""

    moment: Moment
    signed: bool
