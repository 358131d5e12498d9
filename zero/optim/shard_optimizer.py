"""What the update of a unit's shard has to offer, whoever computes it."""

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
    """One unit's part of a step. It keeps the gradient alive, and the hyperparameters as they were at the step."""

    unit: Unit
    grad: torch.Tensor
    group: Group
    factor: float | torch.Tensor
    publish: bool = False  # to send the new parameters to the other ranks as soon as they are there


class ShardOptimizer(Protocol):
    """Updates the shard of one unit with one parameter group's hyperparameters."""

    defaults: dict[str, Any]
    formats: Formats
    factor_on_device: bool  # `update` on a GPU takes its factor from there, and leaves all as it is where that is NaN
    marks_changes: bool = False  # `update` marks what it changes in `unit.shard.changes`; else its caller compares
    foreseen: bool  # how large the state is, and where it lies, is known before the first step, as files need it

    def check(self, group: Group) -> None:
        """Raise ValueError for hyperparameters that no step can be taken with, where that shows before; default: no."""

    def begin(self, unit: Unit, group: Group) -> None:
        """Make the state of the unit, where that is `foreseen`, so that it is where it rests before the first step."""

    def prepare(self, updates: Sequence[Update], world: World) -> None:
        """Do what a step needs before its `updates`, those of all units in order, on all ranks of the `world`.

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
        """The factor of the last update of these units was NaN: it is none; with `factor_on_device`."""

    def nbytes(self, unit: Unit, group: Group) -> int:
        """Bytes of the optimizer state that is kept for the unit, master not counted."""

    def tensors(self, unit: Unit) -> Iterator[tuple[str, Span, torch.Tensor]]:
        """All tensors of the unit's state that exist, as they are kept: name, elements of the shard, and the tensor."""

    def keys(self, unit: Unit, group: Group) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Torch's names of the states: those with an element per parameter, and single numbers of the unit."""

    def number(self, unit: Unit, group: Group, key: str) -> float:
        """The number `key`; "step" is an int."""

    def set_number(self, unit: Unit, group: Group, key: str, value: float) -> None:
        """Replace it."""

    def read(self, unit: Unit, group: Group, key: str, part: Fragment) -> torch.Tensor:
        """State `key` of a fragment of the shard, fp32 [n], a copy; before the first step, where that begins."""

    def write(self, unit: Unit, group: Group, key: str, part: Fragment, values: torch.Tensor) -> None:
        """Replace it by `values`, fp32 [n], rounded to nearest where the state is kept in fewer bits."""

    def kept(self, unit: Unit, group: Group, part: Fragment, make: Collection[str] = ()) -> dict[str, Kept]:
        """All states of a fragment of the shard as they are kept, views to read and write while the state is acquired.

        The last block of one in 8 bit is whole, so it may have elements behind the fragment, which are padding.
        Empty where the state does not exist yet; those called `make` exist afterwards.
        """

    def restart(self, unit: Unit, group: Group, part: Fragment | None = None) -> None:
        """Make the states of a fragment what the first step begins with; of the whole unit, numbers too, without one.

        The state must be acquired.
        """

    def rows(self, unit: Unit, group: Group, load: bool = False) -> Iterator[Rows]:
        """The state that has one number for each row of a matrix: what this rank has to save; default: none.

        With `load` all of the unit's, made anew, to be filled on every rank.
        """
        return iter(())

    def forget(self) -> None:
        """Give all state back."""


class Rows(NamedTuple):
    """The numbers fp32 [k] of rows `first` and following of a parameter that has `of` rows."""

    name: str
    first: int
    of: int
    values: torch.Tensor


class Kept(NamedTuple):
    """One state of some elements, and whether it can be negative."""

    moment: Moment
    signed: bool
