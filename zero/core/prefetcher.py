"""When parameters are gathered and released: before a use, ahead of the next ones, after the last."""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from zero.core.owner import owner_of
from zero.core.param_buffer import State
from zero.core.released import Released
from zero.core.torch_private import backward_task, storage_id
from zero.core.unit import Unit
from zero.plan.order import START, Limits, Position, advance, fetched_ahead, read_ahead, to_come, used_again


def in_backward() -> bool:
    """Whether autograd is running a backward on this thread: a forward in it is a recomputation."""
    return backward_task() != -1


class Call:
    """One forward of a hooked module, with the units that it reads: its own, and others that it reads on the way.

    tell_frozen: to call when a gradient of its output has come, if frozen units follow it.
    """

    __slots__ = ("tell_frozen", "units")

    def __init__(self, units: Iterable[Unit]) -> None:
        self.units = list(units)
        self.tell_frozen: Callable[[], None] | None = None


class Phase(enum.Enum):
    """IDLE: not used since it was last released; PREFETCHED: gathered for a use to come; LIVE: used."""

    IDLE = enum.auto()
    PREFETCHED = enum.auto()
    LIVE = enum.auto()


@dataclass
class Use:
    """How one unit is used at this moment.

    depth:   how many calls hold it open, nested ones included, and readers of what the root returned;
    reached: the backward (its task's number) that first came to a module that reads the unit, or None;
    left:    the backward that has finished reading it, or None.
    """

    unit: Unit
    phase: Phase = Phase.IDLE
    depth: int = 0
    reached: int | None = None
    left: int | None = None

    @property
    def live(self) -> bool:
        """Whether it was used since it was last released."""
        return self.phase is Phase.LIVE

    def over(self) -> None:
        """It is released next."""
        self.phase, self.reached = Phase.IDLE, None


class Forecast:
    """The uses of the last step, which predict those of this one.

    uses: the units that this step has used, in order; order: those of the last step.
    """

    def __init__(self) -> None:
        self.uses: list[int] = []
        self.order: tuple[int, ...] = ()
        self._position: Position = START  # how far this step is in them
        self._resume: Position = START  # where a forward without gradients interrupted the step

    @property
    def coming(self) -> Sequence[int]:
        """The uses that are expected next."""
        return to_come(self.order, self._position)

    def used(self, index: int) -> None:
        """A unit was used; a use in an evaluation is not part of a step."""
        self._position = advance(self.order, self._position, index)
        if torch.is_grad_enabled() or in_backward():
            self.uses.append(index)

    def interrupt(self) -> None:
        """A forward without gradients begins."""
        self._resume = self._position if self.uses else START
        self._position = START

    def resume(self) -> None:
        """It has ended."""
        self._position = self._resume

    def learn(self, order: Iterable[int]) -> None:
        """Take the uses of another rank's last step as those of this rank's."""
        self.order = tuple(order)

    def end_step(self, learn: bool) -> None:
        """A backward has ended; one that raised is nothing to `learn` from."""
        if learn and self.uses:
            self.order = tuple(self.uses)
        self.uses = []
        self._position = self._resume = START


class DiskPrefetcher:
    """Reads shards that rest in files further ahead than parameters are gathered, into host memory.

    What was asked for depends only on the order of uses, and so is the same on all ranks; whether a buffer was free,
    or an update in the way, is not. A unit that was not asked for is not gathered ahead: its gather would wait for
    the whole read from the drive.
    """

    def __init__(self, units: Sequence[Unit], limits: Limits) -> None:
        self._units = units
        self._limits = limits
        read = [unit for unit in units if unit.resharded and unit.gathering.reads_shard]
        self._in_files = {unit.index for unit in read if not unit.shard.placement.shard_store.resident}
        self._asked: dict[int, bool] = {}  # units that were asked for, and whether their read has begun

    def was_asked(self, unit: Unit) -> bool:
        """Whether the shard rests in memory, or was asked for when another unit was used."""
        return unit.index not in self._in_files or unit.index in self._asked

    def ask(self, coming: Sequence[int], there: Collection[int]) -> None:
        """Begin to read what comes next; units that are `there` are not read."""
        wanted = read_ahead(coming, self._limits, self._in_files, there)
        self._asked = dict.fromkeys(wanted, False) | self._asked
        for index in wanted:
            if not self._units[index].shard.fetch():
                return  # no buffer: those behind it would be taken from it
            self._asked[index] = True

    def gathered(self, unit: Unit) -> None:
        """The unit is gathered now."""
        self._asked.pop(unit.index, None)

    def cancel(self) -> None:
        """Drop what was read and not used."""
        asked, self._asked = self._asked, {}
        for index in sorted(index for index, begun in asked.items() if begun):
            self._units[index].shard.placement.shard_store.cancel_fetch()


class ParamPrefetcher:
    """Follows the uses of units through a step and moves parameters ahead of them.

    A use lasts from its gather to its release. The uses of the last step are the forecast of this one: after each
    use the units expected next are gathered, so that they are sent while this one computes.

    backwards: how many backwards have ended: the number of the one that runs;
    forecast:  what is expected to be used next;
    stream:    the one that the loop computes on (set by the engine), None without a GPU;
    on_forward: called when a forward begins that builds a graph, before anything is gathered.
    """

    def __init__(self, units: Sequence[Unit], limits: Limits) -> None:
        self.units = units
        self.backwards = 0
        self.stream: Any | None = None
        self._uses = [Use(unit) for unit in units]
        self._sizes = [sum(spec.numel for spec in unit.plan.params) for unit in units]
        self._limits = limits
        self.forecast = Forecast()
        self._disk = DiskPrefetcher(units, limits)
        self._calls: list[Call] = []  # hooked modules that are in their forward, the innermost last
        self._methods: list[Call] = []  # methods that run as a forward does, outside of any; likewise
        self._returned: list[tuple[Use, bool]] = []  # units inside what the root returned; whether for a backward
        self.on_forward: Callable[[], object] | None = None
        self._builds_graph = False  # the backward that runs builds a graph of itself, which reads the same parameters
        for unit in units:
            unit.on_read = self.ensure_gathered

    def enter(self, units: Sequence[Unit]) -> Call:
        """A module that reads these units starts its forward."""
        if not self._calls and not in_backward():  # a forward begins
            self._end_returned(lambda for_backward: not for_backward)
            if not torch.is_grad_enabled():
                self.forecast.interrupt()
            elif self.on_forward is not None:
                self.on_forward()
        call = Call(units)
        self._calls.append(call)
        for unit in units:
            self._uses[unit.index].depth += 1
        try:
            self.use(units)
        except BaseException:
            self._close(call)
            raise
        return call

    def enter_method(self) -> Call:
        """A method starts that finds what it reads. Forwards that it calls run as they would without it."""
        call = Call(())
        (self._calls or self._methods).append(call)
        return call

    @property
    def inside(self) -> bool:
        """Whether a hooked module is in its forward, or a backward runs."""
        return bool(self._calls) or in_backward()

    def leave(self, call: Call, output: Iterable[torch.Tensor] = ()) -> None:
        """The module has finished its forward, or raised. Parameters that it returned are read by its caller."""
        returned = self._units_in(output)
        self._close(call)
        if readers := self._calls or self._methods:  # for the module that has called this one
            for use in returned:
                self._read(readers[-1], use.unit)
        elif not in_backward():  # for the caller of the root
            self._lend(returned, torch.is_grad_enabled())
        if in_backward():
            return  # it reads what it recomputes again soon; its parameters are released when their gradients have come
        for unit in call.units:
            use = self._uses[unit.index]
            if use.depth == 0:
                self._leave(use)
        if not torch.is_grad_enabled() and not self._calls:
            # Release what was gathered ahead for a backward that will not come.
            self.release_all()
            self.forecast.resume()

    def ensure_gathered(self, unit: Unit) -> bool:
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
        fresh = [unit for unit in units if not self._uses[unit.index].live or unit.state is State.SHARDED]
        for unit in fresh:
            use = self._uses[unit.index]
            unit.gather()  # may raise, and then the unit was not used
            use.phase, use.left = Phase.LIVE, None
            self._disk.gathered(unit)
            self.forecast.used(unit.index)
        for unit in units:  # only now that all have begun, so that they travel together
            unit.wait()
        if fresh:
            self._prefetch(fresh)

    def reach(self, units: Sequence[Unit]) -> None:
        """The backward has come to a module that reads these units."""
        task = backward_task()
        self._builds_graph = self._builds_graph or torch.is_grad_enabled()
        # A gradient that bypasses the module may come after the unit's own gradients. Ranks that lack some of those
        # still have the unit, and would not take part in another gather.
        units = [unit for unit in units if self._uses[unit.index].left != task]
        for unit in units:
            use = self._uses[unit.index]
            use.reached = task if use.reached is None else use.reached
        self.use(units)

    def done(self, unit: Unit) -> None:
        """Backward will not read the unit's parameters any more."""
        task, use = backward_task(), self._uses[unit.index]
        if unit.gradients is not None:  # a frozen unit may be read by another call of the same module
            use.left = task
        # A backward inside another does not know what the outer one still reads.
        if use.reached in (None, task):
            self._drop(use)

    def end_of_inner_backward(self, task: int) -> list[Unit]:
        """A backward that ran inside another has ended: release what only it has read. Returns those units."""
        over = [use for use in self._uses if task in (use.left, use.reached)]
        for use in over:
            use.left = None
            self._drop(use)
        return [use.unit for use in over]

    def end_of_backward(self) -> None:
        """Release what is still full, and make this step's order the forecast of the next."""
        self.backwards += 1
        again, self._builds_graph = self._builds_graph, False
        self._end_returned(lambda for_backward: True)
        if again:  # the next one goes through this one
            self._lend([use for use in self._uses if use.unit.state in (State.FULL, State.CONCEALED)], True)
        self.release_all(keep_if_referenced=False)
        for use in self._uses:
            use.left = use.reached = None
            if use.unit.gradients is None:  # others when their values change
                use.unit.buffer.forget_graph()
        self.forecast.end_step(learn=True)

    def release_all(self, keep_if_referenced: bool = True) -> None:
        """Release every unit that no module holds open; the argument as in `Unit.release`."""
        self._disk.cancel()
        for use in self._uses:
            if use.depth == 0:
                use.over()
                use.unit.release(keep_if_referenced)

    def abandon(self) -> None:
        """After an exception: no module is open any more, and the step's order is worth nothing."""
        self._calls, self._methods, self._returned = [], [], []
        self._builds_graph = False
        self.backwards += 1
        for use in self._uses:
            use.depth, use.left = 0, None
        self.forecast.end_step(learn=False)
        self.release_all(keep_if_referenced=False)

    def _close(self, call: Call) -> None:
        readers = self._calls if call in self._calls else self._methods
        if call in readers:
            readers.remove(call)
            for unit in call.units:
                self._uses[unit.index].depth -= 1

    def _leave(self, use: Use) -> None:
        graph = torch.is_grad_enabled()
        use.over()
        # The last unit of the forward is often the first of the backward: it is kept then, with others that are near.
        if graph and used_again(self.forecast.coming, self._sizes, self._limits, use.unit.index):
            use.unit.conceal()
        else:
            use.unit.release(keep_if_referenced=not graph)

    def _prefetch(self, used: Sequence[Unit]) -> None:
        ahead = {index for index, use in enumerate(self._uses) if use.phase is Phase.PREFETCHED}
        for index in sorted(ahead):
            self.units[index].gather(deferred=True)  # of those whose update has ended since
        in_use = {unit.index for unit in used} | {index for index, use in enumerate(self._uses) if use.depth}
        # What stays full is so on all ranks alike, also where some have not yet waited for what the step has sent.
        full = {u.index for u in self.units if u.persistent or u.state in (State.FULL, State.CONCEALED)} - in_use
        coming = self.forecast.coming
        chosen = fetched_ahead(coming, self._sizes, self._limits, used=in_use, kept=full, travelling=ahead)
        for unit in (self.units[index] for index in chosen):
            # A shard that is still being read is left for later. A running update is no reason to skip a unit: which
            # updates run differs between ranks, and what one rank starts to gather all must.
            if self._disk.was_asked(unit):
                self._uses[unit.index].phase = Phase.PREFETCHED
                ahead.add(unit.index)
                self._disk.gathered(unit)
                unit.gather(deferred=not unit.mesh.shard.ordered)
        self._disk.ask(coming, in_use | full | ahead)

    def _units_in(self, tensors: Iterable[torch.Tensor]) -> list[Use]:
        """The units whose memory one of the tensors shares, such as a parameter or a view of one."""
        found: dict[int, Unit] = {}
        by_memory: dict[int | None, Unit] | None = None
        for tensor in tensors:
            if isinstance(tensor, Released):
                unit = owner_of(tensor).unit
                if unit.ensure_gathered():  # returned without having been read
                    found[unit.index] = unit
                continue
            if by_memory is None:
                by_memory = {storage_id(use.unit.buffer.full): use.unit for use in self._uses if use.live}
            unit = by_memory.get(storage_id(tensor))
            if unit is not None:
                found[unit.index] = unit
        return [self._uses[index] for index, unit in found.items() if unit.resharded and self.units[index] is unit]

    def _read(self, call: Call, unit: Unit) -> None:
        if unit not in call.units:
            call.units.append(unit)
            self._uses[unit.index].depth += 1

    def _lend(self, uses: Sequence[Use], for_backward: bool) -> None:
        for use in uses:
            use.depth += 1
            self._returned.append((use, for_backward))

    def _end_returned(self, which: Callable[[bool], bool]) -> None:
        """Release what the root returned; memory of which the caller has a view stays with that view."""
        over = [use for use, for_backward in self._returned if which(for_backward)]
        self._returned = [(use, for_backward) for use, for_backward in self._returned if not which(for_backward)]
        for use in over:
            use.depth -= 1
            self._drop(use, keep_if_referenced=True)

    def _drop(self, use: Use, keep_if_referenced: bool = False) -> None:
        if use.depth == 0 and not self._builds_graph:
            use.over()
            use.unit.release(keep_if_referenced)


# Reading order, 4 of 9; next: zero/core/hooks.py, what follows a forward and a backward through the module.
