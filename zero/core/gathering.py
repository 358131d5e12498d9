"""When parameters come and go: gather before a use, foresee the next one, release after."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zero.core.unit import State, Unit
from zero.plan.order import START, advance, upcoming


def in_backward() -> bool:
    """Whether autograd is running a backward on this thread: a forward in it is a recomputation."""
    return torch._C._current_graph_task_id() != -1


class Gatherer:
    """Follows the uses of units through a step and moves parameters ahead of them.

    A use counts once from its gather to its release. The uses of the last step are the forecast for this
    one: after each, the unit expected next is gathered too, so that one unit travels while one computes.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self.units = units
        self.backwards = 0  # how many have ended: the number of the one that runs
        self._depth = [0] * len(units)  # modules that hold the unit open, nested ones counted
        self._modules = 0  # hooked modules that are in their forward
        self._live: set[int] = set()  # units used since they were last released
        self._uses: list[int] = []  # of this step, by index
        self._order: tuple[int, ...] = ()  # of the last step
        self._position = START

    def enter(self, units: Sequence[Unit]) -> None:
        """A module that reads these units starts its forward."""
        self._modules += 1
        for unit in units:
            self._depth[unit.index] += 1
        self.use(units)

    def leave(self, units: Sequence[Unit]) -> None:
        """The module has finished its forward, or raised."""
        self._modules = max(0, self._modules - 1)
        for unit in units:
            self._depth[unit.index] = max(0, self._depth[unit.index] - 1)
            # What backward recomputes it is about to read again; it is released when its gradient is there.
            if self._depth[unit.index] == 0 and not in_backward():
                self._leave(unit)
        if not torch.is_grad_enabled() and not in_backward() and not self._modules:
            # What was gathered ahead for a backward that will not come goes; the next forward begins at the front.
            self.release_all()
            self._position = START

    def use(self, units: Sequence[Unit]) -> None:
        """Make these units readable now."""
        fresh = [unit for unit in units if unit.index not in self._live]
        for unit in fresh:
            self._live.add(unit.index)
            self._position = advance(self._order, self._position, unit.index)
            if torch.is_grad_enabled() or in_backward():
                self._uses.append(unit.index)
            unit.gather()
        for unit in units:
            if unit.state is not State.FULL:
                unit.wait()
        if fresh:
            ahead = upcoming(self._order, self._position)
            if ahead is not None:
                self.units[ahead].gather()

    def done(self, unit: Unit) -> None:
        """Backward will not read the unit's parameters any more."""
        if self._depth[unit.index] == 0:
            self._live.discard(unit.index)
            unit.release()

    def end_of_backward(self) -> None:
        """Release what is still full, and make this step's order the forecast of the next."""
        self.backwards += 1
        self.release_all()
        if self._uses:
            self._order = tuple(self._uses)
        self._uses = []
        self._position = START

    def release_all(self) -> None:
        """Release every unit that no module holds open."""
        for unit in self.units:
            if self._depth[unit.index] == 0:
                self._live.discard(unit.index)
                unit.release()

    def abandon(self) -> None:
        """After an exception: no module is open any more, and the step's order is worth nothing."""
        self._depth = [0] * len(self.units)
        self._modules = 0
        self._uses = []
        self.backwards += 1
        self.release_all()
        self._position = START

    def _leave(self, unit: Unit) -> None:
        self._live.discard(unit.index)
        # The last unit of the forward is often the first of the backward: keep it then.
        if not (torch.is_grad_enabled() and upcoming(self._order, self._position) == unit.index):
            unit.release()
