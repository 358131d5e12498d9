"""When parameters come and go: gather before a use, foresee the next ones, release after."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from zero.core.disk_prefetcher import DiskPrefetcher
from zero.core.owner import owner_of
from zero.core.released import Released
from zero.core.tensors import memory_of, tensors_in
from zero.core.unit import State, Unit
from zero.plan.order import START, Limits, advance, fetched_ahead, used_again


def in_backward() -> bool:
    """Whether autograd is running a backward on this thread: a forward in it is a recomputation."""
    return backward_task() != -1


def backward_task() -> int:
    """The number of the innermost backward that runs on this thread (one may run inside another), or -1."""
    return torch._C._current_graph_task_id()


class Call:
    """One forward of a hooked module, with the units that it reads: its own, and others that it came upon."""

    __slots__ = ("units",)

    def __init__(self, units: Iterable[Unit]) -> None:
        self.units = list(units)


class ParamPrefetcher:
    """Follows the uses of units through a step and moves parameters ahead of them.

    A use counts once from its gather to its release. The uses of the last step are the forecast for this
    one: after each, units expected next are gathered too, so that they travel while one computes.
    """

    def __init__(self, units: Sequence[Unit], limits: Limits) -> None:
        self.units = units
        self.backwards = 0  # how many have ended: the number of the one that runs
        self._limits = limits
        self._readings = DiskPrefetcher(units, limits)
        self._sizes = [sum(spec.numel for spec in unit.plan.params) for unit in units]
        self._depth = [0] * len(units)  # calls that hold the unit open, nested ones counted
        self._calls: list[Call] = []  # hooked modules that are in their forward, the innermost last
        self._methods: list[Call] = []  # methods that run as a forward does, outside of any; likewise
        self._live: set[int] = set()  # units used since they were last released
        self._ahead: set[int] = set()  # units fetched ahead and not used yet
        self._reached: dict[int, int] = {}  # unit -> the backward that reached it
        self._done: dict[int, int] = {}  # unit -> the backward that has left it
        self._lent: list[tuple[Unit, bool]] = []  # units inside what the root returned; whether for a backward
        self._again = False  # the backward that runs builds a graph of itself, which reads the same parameters
        self._uses: list[int] = []  # of this step, by index
        self._order: tuple[int, ...] = ()  # of the last step
        self._position = START
        self._resume = START  # where a forward without gradients has interrupted a step
        for unit in units:
            unit.bring = self.bring

    def enter(self, units: Sequence[Unit]) -> Call:
        """A module that reads these units starts its forward."""
        if not self._calls and not in_backward():
            self._begin_forward()
        call = Call(units)
        self._calls.append(call)
        for unit in units:
            self._depth[unit.index] += 1
        try:
            self.use(units)
        except BaseException:
            self._close(call)
            raise
        return call

    def enter_method(self) -> Call:
        """A method that is to find what it reads starts. Forwards that it calls are as they would be without it."""
        call = Call(())
        (self._calls or self._methods).append(call)
        return call

    @property
    def inside(self) -> bool:
        """Whether a hooked module is in its forward, or a backward runs."""
        return bool(self._calls) or in_backward()

    def leave(self, call: Call, output: Any = None) -> None:
        """The module has finished its forward, or raised. What of its parameters it returned, its caller reads."""
        held = self._inside(output)
        self._close(call)
        self._hand_on(held)
        if in_backward():
            return  # what it recomputes it is about to read again; it is released when its gradient is there
        for unit in call.units:
            if self._depth[unit.index] == 0:
                self._leave(unit)
        if not torch.is_grad_enabled() and not self._calls:
            # What was gathered ahead for a backward that will not come goes.
            self.release_all()
            self._position = self._resume

    def bring(self, unit: Unit) -> bool:
        """Make a unit readable for the innermost module or method that runs; False if there is none."""
        readers = self._calls or self._methods
        if not readers and not in_backward():
            return False
        if readers:
            self._read(readers[-1], unit)
        self.use([unit])
        return True

    def use(self, units: Sequence[Unit]) -> None:
        """Make these units readable now."""
        # The end of a reader's block may have released one that is used.
        fresh = [unit for unit in units if unit.index not in self._live or unit.state is State.SHARDED]
        for unit in fresh:
            unit.gather()  # may refuse, and has not been used then
            self._live.add(unit.index)
            self._ahead.discard(unit.index)
            self._readings.over(unit)
            self._done.pop(unit.index, None)
            self._position = advance(self._order, self._position, unit.index)
            if torch.is_grad_enabled() or in_backward():
                self._uses.append(unit.index)
        for unit in units:
            unit.wait()
        if fresh:
            self._fetch_ahead(fresh)

    def reach(self, units: Sequence[Unit]) -> None:
        """The backward has come to a module that reads these units."""
        task = backward_task()
        self._again = self._again or torch.is_grad_enabled()
        # A gradient that goes round the module may come when the unit's own are there. Ranks on which some of those
        # are missing still have the unit, and would not take part in another gather.
        units = [unit for unit in units if self._done.get(unit.index) != task]
        for unit in units:
            self._reached.setdefault(unit.index, task)
        self.use(units)

    def done(self, unit: Unit) -> None:
        """Backward will not read the unit's parameters any more."""
        task = backward_task()
        if unit.gradients is not None:  # the frozen ones may be read by another call of the same module
            self._done[unit.index] = task
        # One inside another backward says nothing of what the outer one still reads.
        if self._reached.get(unit.index, task) == task:
            self._drop(unit)

    def end_of_inner_backward(self, task: int) -> list[Unit]:
        """A backward that ran inside another has ended: release what only it has read. Returns those units."""
        over = [unit for unit in self.units if task in (self._done.get(unit.index), self._reached.get(unit.index))]
        for unit in over:
            self._done.pop(unit.index, None)
            self._drop(unit)
        return over

    def end_of_backward(self) -> None:
        """Release what is still full, and make this step's order the forecast of the next."""
        self.backwards += 1
        again, self._again = self._again, False
        self._take_back(lambda for_backward: True)
        if again:  # the next one goes through this one
            self._lend([unit for unit in self.units if unit.state is State.FULL], True)
        self.release_all(spare=False)
        for unit in self.units:
            if unit.gradients is None:  # others when their values change
                unit.forget_graph()
        self._done.clear()
        self._reached.clear()
        if self._uses:
            self._order = tuple(self._uses)
        self._uses = []
        self._position = self._resume = START

    def release_all(self, spare: bool = True) -> None:
        """Release every unit that no module holds open; `spare` as in `Unit.release`."""
        self._readings.forget()
        for unit in self.units:
            if self._depth[unit.index] == 0:
                self._forget(unit)
                unit.release(spare)

    def abandon(self) -> None:
        """After an exception: no module is open any more, and the step's order is worth nothing."""
        self._depth = [0] * len(self.units)
        self._calls, self._methods = [], []
        self._lent = []
        self._uses = []
        self._again = False
        self._done.clear()
        self.backwards += 1
        self._position = self._resume = START
        self.release_all(spare=False)

    def _begin_forward(self) -> None:
        self._take_back(lambda for_backward: not for_backward)
        if not torch.is_grad_enabled():
            self._resume = self._position if self._uses else START
            self._position = START

    def _close(self, call: Call) -> None:
        readers = self._calls if call in self._calls else self._methods
        if call in readers:
            readers.remove(call)
            for unit in call.units:
                self._depth[unit.index] -= 1

    def _leave(self, unit: Unit) -> None:
        graph = torch.is_grad_enabled()
        self._forget(unit)
        # The last unit of the forward is often the first of the backward: it is kept then, with others that are near.
        if graph and used_again(self._order, self._position, self._sizes, self._limits, unit.index):
            unit.cover()
        else:
            unit.release(spare=not graph)

    def _fetch_ahead(self, used: Sequence[Unit]) -> None:
        for index in sorted(self._ahead):
            self.units[index].gather(patient=True)  # of those whose update has ended since
        in_use = {unit.index for unit in used} | {index for index, depth in enumerate(self._depth) if depth}
        kept = {unit.index for unit in self.units if unit.state is State.FULL and unit.index not in in_use}
        chosen = fetched_ahead(
            self._order,
            self._position,
            self._sizes,
            self._limits,
            used=in_use,
            kept=kept,
            travelling=self._ahead,
        )
        for unit in (self.units[index] for index in chosen):
            # What is not read yet is left to a later moment. An update that runs is no reason to leave a unit: which
            # one still does is not alike on all ranks, and what one rank begins to gather the others must, too.
            if self._readings.asked(unit):
                self._ahead.add(unit.index)
                self._readings.over(unit)
                unit.gather(patient=not unit.mesh.shard.ordered)
        self._readings.ask(self._order, self._position, {*in_use, *kept, *self._ahead})

    def _inside(self, output: Any) -> list[Unit]:
        """The units whose memory tensors of `output` share, as a parameter or a view of one does."""
        found: dict[int, Unit] = {}
        full: dict[int, Unit] | None = None
        for tensor in tensors_in(output):
            if isinstance(tensor, Released):
                unit = owner_of(tensor).unit
                if unit.summon():  # returned without having been read
                    found[unit.index] = unit
                continue
            if full is None:
                full = {self.units[index].memory: self.units[index] for index in self._live}
            unit = full.get(memory_of(tensor))
            if unit is not None:
                found[unit.index] = unit
        return [unit for unit in found.values() if unit.cut and self.units[unit.index] is unit]

    def _hand_on(self, units: Sequence[Unit]) -> None:
        """Keep these for the module that has called the one that returned them, or for the caller of the root."""
        if readers := self._calls or self._methods:
            for unit in units:
                self._read(readers[-1], unit)
        elif not in_backward():
            self._lend(units, torch.is_grad_enabled())

    def _read(self, call: Call, unit: Unit) -> None:
        if unit not in call.units:
            call.units.append(unit)
            self._depth[unit.index] += 1

    def _lend(self, units: Sequence[Unit], for_backward: bool) -> None:
        for unit in units:
            self._depth[unit.index] += 1
            self._lent.append((unit, for_backward))

    def _take_back(self, which: Callable[[bool], bool]) -> None:
        """Give up what was lent; what the borrower still has a view of stays his."""
        kept, over = [], []
        for unit, for_backward in self._lent:
            (over if which(for_backward) else kept).append((unit, for_backward))
        self._lent = kept
        for unit, _ in over:
            self._depth[unit.index] -= 1
            self._drop(unit, spare=True)

    def _drop(self, unit: Unit, spare: bool = False) -> None:
        if self._depth[unit.index] == 0 and not self._again:
            self._forget(unit)
            unit.release(spare)

    def _forget(self, unit: Unit) -> None:
        self._live.discard(unit.index)
        self._ahead.discard(unit.index)
        self._reached.pop(unit.index, None)
