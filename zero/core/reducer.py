"""When gradients are sent: each unit once per backward, in one order on all ranks, none left out."""

from __future__ import annotations

import contextlib
import enum
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from zero.core.finite import FirstNotFinite
from zero.core.micro_batches import NO_TOKENS, Weights
from zero.core.prefetcher import ParamPrefetcher
from zero.core.torch_private import (
    after_backward,
    backward_node,
    backward_task,
    hook_last,
    run_post_accumulate_hooks,
    take_off,
    untransformed,
)
from zero.core.tree import Leaf
from zero.core.unit import Unit
from zero.log import logger, rank
from zero.memory.streams import joined
from zero.plan.sharding import Sharding
from zero.watchdog.rank_status import RankStatus


@dataclass
class Backward:
    """The backward that runs, from its first gradient to the end of its round.

    tasks:      numbers of the backwards, inner ones too, whose end autograd will report;
    landed:     by unit, the parameters whose gradients came since it was last complete;
    reduced:    how many units of the order have begun their reduction, those in flight included;
    loss_scale: what its loss was multiplied by, if that is known;
    count:      of its micro-batch in the mean, where its losses brought one.
    """

    tasks: set[int] = field(default_factory=set)
    landed: dict[int, set[int]] = field(default_factory=dict)
    reduced: int = 0
    loss_scale: float | None = None
    count: float | None = None


class When(enum.Enum):
    """After which backwards gradients are reduced. BY_HAND: as `finish` says."""

    EACH = "each"
    AT_BOUNDARY = "that of the last micro-batch of a step"
    BY_HAND = "by hand"


class Reducer:
    """Takes gradients from autograd as they land and reduces units in the reverse order of registration.

    A unit fires when its last gradient is there and all before it in the order have fired; what is open at
    the end of a backward is flushed, with zeros where no gradient came. So every rank sends the same
    sequence, whatever its own graph used.

    boundary: whether the backward that runs is the last of its accumulation window (set by the engine);
    leaf:     where the backward that runs, or comes next, stands in its optimizer step;
    loss_scale: gives the loss scale, which may have to be waited for (the optimizer's);
    divisor:  what gradients are divided by, besides, before they are sent;
    rounds:   backward passes flushed so far;
    pending:  a backward was flushed without a reduction. The same on all ranks, even if their gradients are not, except
              where a step is one reduction over ranks that ran different numbers of backwards;
    weights:  of the backwards of this step on this rank;
    on_begin, on_finish: called before anything else of a backward, and once all of its reductions have begun;
    on_last: called when the last backward of a step begins, before any gradient lands;
    on_flush: called at the end of every backward, after the gradients.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        sharding: Sharding,
        prefetcher: ParamPrefetcher,
        finite: FirstNotFinite,
    ) -> None:
        self.boundary = True
        self.leaf = Leaf()
        self.loss_scale: Callable[[], float] = lambda: 1.0
        self.divisor = 1.0
        self.finite = finite
        self.rounds = 0
        self.pending = False
        self.weights = Weights()
        self.on_begin: Callable[[], object] | None = None
        self.on_finish: Callable[[], object] | None = None
        self._order = [unit for unit in reversed(units) if unit.gradients is not None]
        self._when = When.EACH if sharding.grads else When.AT_BOUNDARY
        self._prefetcher = prefetcher
        self.on_last: Callable[[], object] | None = None
        self.on_flush: list[Callable[[], None]] = []
        self._backward: Backward | None = None  # that has begun and was not flushed yet
        self._warned = False
        self._handles = [
            hook_last(param, self._hook(position, index))
            for position, unit in enumerate(self._order)
            for index, param in enumerate(unit.params)
        ]

    @property
    def scale(self) -> float:
        """The loss scale: what all gradients that are held are multiplied by."""
        return self.loss_scale()

    @property
    def open(self) -> bool:
        """Whether a backward has begun and was not flushed yet."""
        return self._backward is not None

    @untransformed
    def begin(self, count: float | None = None) -> Backward:
        """Note that a backward runs, and ask autograd to tell when it has ended.

        `count`: of its micro-batch in the mean, which one of its losses brings; those of several add up. RuntimeError
        where the first to begin it must have one, and has none.
        """
        if self._when is When.BY_HAND:
            self._backward = self._backward or Backward(loss_scale=self.scale)
            return self._backward
        if self._backward is None:
            if count is None and self.weights.needed:
                raise RuntimeError(NO_TOKENS)
            self._begin()
            if self.boundary and self.on_last is not None:
                self.on_last()
        if count is not None:
            self._backward.count = (self._backward.count or 0.0) + count
        task = backward_task()
        if task not in self._backward.tasks:
            self._backward.tasks.add(task)
            after_backward(lambda: self._ended(task))
        return self._backward

    def scaled(self, scale: float) -> None:
        """The loss of the backward that runs was multiplied by `scale`; call it before any gradient lands."""
        self.begin().loss_scale = scale

    def counted(self, count: float) -> None:
        """A loss of the backward that runs brings its `count` to the mean; call it before any gradient lands."""
        self.begin(count)

    def flush(self) -> None:
        """End a backward: fire what has not fired, in order, and wait until all sums are there."""
        if self._backward is None:
            self._begin()  # it reached none of our parameters, and counts all the same
        self.weights.counts.append(1.0 if self._backward.count is None else self._backward.count)
        self.end()

    def follow(self) -> None:
        """Another rank has begun the next reduction of a micro-batch that this rank does not have: add zeros."""
        if self._backward is None:
            self._backward = Backward()
            self.finite.begin()
        self._fire(self._backward)

    def end(self, force: bool = False, followed: bool = False) -> None:
        """Reduce the gradients; collective. Before the boundary they stay local if the stage allows, unless `force`d.

        `followed`: of a backward that other ranks have run.
        """
        backward = self._backward or Backward()
        fires = force or self._fires
        if fires:
            # All begin before one is waited for: another rank may have fired them during its backward.
            while backward.reduced < len(self._order):
                self._fire(backward)
            if not followed and self.on_finish is not None:
                self.on_finish()
            for unit in self._order:
                unit.gradients.finish()
        self.pending = not fires
        for unit in self._order:
            unit.gradients.begin_round()
            if self.pending:
                unit.gradients.widen()
        self._backward = None
        self._status.forwards = 0
        self.rounds += 1
        self.leaf = self.leaf._replace(backward=self.leaf.backward + 1)
        self._prefetcher.end_of_backward()
        for call in [*self.on_flush] if not followed else ():  # one may end itself
            call()

    def end_micro_batch(self, last: bool) -> None:
        """The next backward is of the next micro-batch; after the `last`, of the first of the next optimizer step."""
        self.leaf = Leaf(0 if last else self.leaf.micro_batch + 1)

    def before_step(self) -> None:
        """Reduce what no backward has: local sums whose boundary came without one, and zeros where nothing is left."""
        if self.pending or not all(unit.gradients.reduced for unit in self._order):
            self.end(force=True)

    @property
    def late(self) -> bool:
        """Whether this rank, perhaps alone, has gradients that came after their unit was reduced.

        A backward inside another causes that, on the ranks that used the unit in it.
        """
        return any(unit.gradients.flat is not None for unit in self._order)

    def defer(self) -> contextlib.AbstractContextManager[None]:
        """Inside, backwards that are not at a boundary leave their gradients on their rank, also where these are cut.

        They are reduced at `settle`.
        """
        return self._reducing(When.AT_BOUNDARY)

    @contextlib.contextmanager
    def by_hand(self) -> Iterator[None]:
        """Inside, `finish` says where backwards end, and of which units they are; not autograd, nor the order of all.

        For schedules whose backwards run in parts, and beside those of other stages.
        """
        try:
            with self._reducing(When.BY_HAND):
                yield
        finally:
            self._backward = None

    @contextlib.contextmanager
    def _reducing(self, when: When) -> Iterator[None]:
        before, self._when = self._when, when
        try:
            yield
        finally:
            self._when = before

    def land(self, micro_batch: int) -> None:
        """By hand: a backward of this micro-batch of the step begins, whose gradients are to be taken."""
        self.leaf, self._backward = Leaf(micro_batch), Backward(loss_scale=self.scale)
        if micro_batch >= self.finite.backwards:
            self.finite.begin()

    def sweep(self, units: Sequence[Unit]) -> None:
        """By hand: run the hooks, ours and others', that gradients of these units came past."""
        for unit in units:
            for param in unit.params if unit.gradients is not None else ():
                if param.grad is not None:
                    run_post_accumulate_hooks(param)

    def finish(self, units: Sequence[Unit], fires: bool) -> None:
        """By hand: a backward of these units has ended, and begins to be reduced if it `fires`; collective then."""
        trained = (unit for unit in units if unit.gradients is not None)
        order = sorted(trained, key=lambda unit: unit.number, reverse=True)  # one order on all ranks
        for position, unit in enumerate(order):
            if fires:
                unit.gradients.finish()  # of an earlier backward
                self._send(order, position)
            unit.gradients.begin_round()
            if not fires:
                unit.gradients.widen()
        self._backward = None
        self._prefetcher.end_of_backward()

    def end_schedule(self, counts: Sequence[float]) -> None:
        """By hand: all backwards of a schedule have ended; wait for the sums. `counts`: of its micro-batches."""
        for unit in self._order:
            unit.gradients.finish()
        self.weights.counts += counts
        self._status.forwards = 0
        self.pending, self.rounds = False, self.rounds + 1
        for call in [*self.on_flush]:
            call()

    def settle(self) -> None:
        """Reduce what earlier backwards left on their ranks, if anything; collective."""
        if self.pending:
            self.end(force=True)

    @property
    def holds_gradients(self) -> bool:
        """Whether gradients wait for a step, reduced or not; the same on all ranks."""
        return self.pending or any(unit.gradients.reduced for unit in self._order)

    def drop(self) -> None:
        """Forget the gradients of this accumulation window."""
        for unit in self._order:
            unit.gradients.drop()
        self.finite.clear()
        self.pending = False
        self.weights.counts = []

    def abandon(self) -> None:
        """After an exception: forget the gradients, with what was rounded away, and the backward that brought them."""
        self.drop()
        for unit in self._order:
            unit.gradients.forget_error()
        self._backward = None
        self._status.abandon()
        self.leaf = Leaf()  # the window begins anew

    def detach(self) -> None:
        """Take the hooks off the parameters."""
        handles = iter(self._handles)
        for unit in self._order:
            for param, handle in zip(unit.params, handles, strict=False):
                take_off(param, [handle])

    @untransformed
    def _ended(self, task: int) -> None:
        """A backward has ended; only the outermost one ends the round."""
        node = backward_node()
        if node is None:
            self.flush()
            return
        # It ran inside this node of another one, as checkpointing that is reentrant does. That one goes on with
        # what follows the node, and nothing else of it may concern us.
        released = self._prefetcher.end_of_inner_backward(task)
        for unit in released if self._backward is not None else ():
            self._backward.landed.pop(unit.index, None)
        handles: list[RemovableHandle] = []

        def outer_goes_on(grads: tuple[torch.Tensor | None, ...]) -> None:
            for handle in handles:
                handle.remove()
            self.begin()

        handles += [after.register_prehook(outer_goes_on) for after, _ in node.next_functions if after is not None]

    @property
    def _status(self) -> RankStatus:
        return self.finite.world.watchdog.status

    def _begin(self) -> None:
        if self.on_begin is not None:
            self.on_begin()
        self._status.forwards = max(0, self._status.forwards - 1)
        self._backward = Backward()
        self.finite.begin()

    @property
    def _fires(self) -> bool:
        return self._when is When.EACH or (self._when is When.AT_BOUNDARY and self.boundary)

    def _hook(self, position: int, index: int) -> Callable[[nn.Parameter], None]:
        # Weak, because the parameter outlives the engine when `destroy` was not called. Nor may it hold the unit, which
        # holds the parameter: the garbage collector does not see into these hooks, and would never collect the circle.
        this = weakref.ref(self)

        def arrived(param: nn.Parameter) -> None:
            reducer = this()
            if reducer is not None:
                reducer._arrived(reducer._order[position], index, param)

        return arrived

    def _arrived(self, unit: Unit, index: int, param: nn.Parameter) -> None:
        grad, param.grad = param.grad, None
        if grad is None:
            return  # an autograd function that took the parameter gave none
        if grad.requires_grad:
            grad = grad.detach()  # of a backward that builds a graph of itself; what is reduced has none
        if grad.layout is not torch.strided:
            raise RuntimeError(
                f"parameter '{unit.plan.params[index].name}' has a {grad.layout} gradient; "
                "gradients must be dense (nn.Embedding: sparse=False)"
            )
        with joined(self._prefetcher.stream, grad):
            self._land(unit, index, grad)

    def _land(self, unit: Unit, index: int, grad: torch.Tensor) -> None:
        backward = self.begin()
        unit.gradients.take(index, grad, self._landing_factor(backward))
        landed = backward.landed.setdefault(unit.index, set())
        landed.add(index)
        if len(landed) == len(unit.params):
            landed.clear()
            self._prefetcher.done(unit)
        while self._fires and backward.reduced < len(self._order) and self._order[backward.reduced].gradients.complete:
            self._fire(backward)

    def _landing_factor(self, backward: Backward) -> float:
        """The factor of a gradient that lands, by which all that add up have one scale."""
        scale = self.scale
        if backward.loss_scale is None and scale != 1.0 and not self._warned:
            self._warned = True
            if rank() == 0:
                logger.warning(
                    "a backward ran on a loss that this engine did not multiply by its loss scale %g: the gradients "
                    "are multiplied as they land, but small ones may have become zero before; "
                    "use engine.backward(loss) or engine.scale(loss).backward()",
                    scale,
                )
        return scale / ((backward.loss_scale or 1.0) * self.divisor)

    def _fire(self, backward: Backward) -> None:
        """Send the next unit's gradient, then go on with those before it, which have had a unit's time to arrive."""
        position, backward.reduced = backward.reduced, backward.reduced + 1
        self._send(self._order, position)

    def _send(self, order: Sequence[Unit], position: int) -> None:
        order[position].reduce(self.leaf)
        for later, unit in enumerate(order[max(0, position - 2) : position][::-1], 1):
            unit.gradients.advance(later)


# Reading order, 7 of 9; next: zero/optim/optimizer.py, the norm, the decision, the step on shards.
