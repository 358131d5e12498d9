"""Runs a schedule: what this rank computes, sends and receives of each micro-batch, in torch's order.

Torch's schedules are used, and its backward in two parts, but not its runtime. That has one shape for all micro-batches
of a stage, and knows of torch's own FSDP when it gathers and reduces; here units do both.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from zero.core.comm import Axis
from zero.core.p2p import Passage
from zero.core.sharded_module import ShardedModule
from zero.core.tensors import map_leaves
from zero.parallel.pipeline.messages import Form, Messages, decode, encode
from zero.parallel.pipeline.stage import Alias, Batch, Stage
from zero.plan.pipeline import Action, Kind, Schedule


class Calls(NamedTuple):
    """What the engine does around the parts of a schedule.

    forward: calls a stage as an engine calls its model, and returns what it returns; loss: of an output of the last
    stage, ready for a backward, or whatever an evaluation keeps; backward: around each one.
    """

    forward: Callable[[Stage, Any, Batch], Any]
    loss: Callable[[Any, int], Any]
    backward: Callable[[], contextlib.AbstractContextManager[Any]]


class Handed(NamedTuple):
    """Activations or gradients between two stages of this rank; `said`: their form."""

    said: Any
    tensors: Sequence[torch.Tensor]


class Runner:
    """The stages of one rank.

    gathers_once: units of a stage are whole from its first use in a step to its last one; else each use gathers them.
    reduces_each: gradients are reduced after each micro-batch; else once, as a stage's last one has ended.
    """

    def __init__(
        self, stages: Sequence[Stage], axis: Axis, sharded: ShardedModule, gathers_once: bool, reduces_each: bool
    ) -> None:
        self.stages = {stage.index: stage for stage in stages}
        self.axis, self.sharded = axis, sharded
        self.messages = Messages(axis, sharded.device)
        self.gathers_once, self.reduces_each = gathers_once, reduces_each
        self.going: list[Passage] = []  # here, not in a pass: what one that fails has sent is to arrive
        reads = [unit for stage in stages for unit in stage.units]
        # Reduced when all stages have ended: other ranks, or another stage here, add to their gradients.
        shared = [each for each in sharded.trained if reads.count(each) != 1 or "pp" in "".join(each.mesh.axes.replica)]
        self.shared = shared
        for stage in stages:
            stage.own = [unit for unit in stage.units if unit not in shared]

    def train(self, schedule: Schedule, batches: Sequence[Batch], calls: Calls, first: int, last: bool) -> None:
        """Run all micro-batches forward and backward.

        first: how many of the step there were before; last: it is the last schedule of the step, so that gradients are
        on the way to their sums at the end.
        """
        try:
            with self.sharded.reducer.by_hand():
                Run(self, schedule, batches, calls, first, last).all()
                self.sharded.reducer.finish(self.shared, last)
        finally:
            for stage in self.stages.values():
                stage.alive.clear()

    def evaluate(self, schedule: Schedule, batches: Sequence[Batch], calls: Calls) -> None:
        """Run all micro-batches forward."""
        Run(self, schedule, batches, calls, 0, False).all()


class Run:
    """One pass through a schedule on one rank."""

    def __init__(
        self, runner: Runner, schedule: Schedule, batches: Sequence[Batch], calls: Calls, first: int, last: bool
    ) -> None:
        self._runner, self._batches, self._calls = runner, batches, calls
        self._first, self._last = first, last
        self._places, self._actions = schedule.places, schedule.orders[runner.axis.rank]
        self._coming: dict[Action, Passage] = {}  # by the action that began to receive it
        self._handed: dict[Action, Handed] = {}  # by the action that would receive it from another rank
        self._sending: dict[Action, Sequence[torch.Tensor]] = {}  # by the action that sends it
        self._forms: dict[tuple[int, int], list[Form]] = {}  # of what a stage has given, by it and the micro-batch
        self._held: dict[int, contextlib.ExitStack] = {}
        self._reshards = Counter(action.stage for action in self._actions if action.kind is Kind.RESHARD)

    def all(self) -> None:
        """Do what the schedule says, to the end."""
        # Here, as methods that `self` had would keep it alive, and the batches, until Python looks for such circles.
        does = {
            Kind.FORWARD: self._forward,
            Kind.BACKWARD: self._backward,
            Kind.BACKWARD_INPUT: self._backward,
            Kind.BACKWARD_WEIGHT: self._backward_weight,
            Kind.UNSHARD: self._unshard,
            Kind.RESHARD: self._reshard,
            Kind.SEND_FORWARD: self._send,
            Kind.SEND_BACKWARD: self._send,
            Kind.RECEIVE_FORWARD: self._receive_forward,
            Kind.RECEIVE_BACKWARD: self._receive_backward,
            Kind.REDUCE: self._reduce,
        }
        try:
            for action in self._actions:
                with self._runner.axis.watchdog.events.span(action.kind.value, str(action)):
                    does[action.kind](action)
            while self._runner.going:
                self._runner.going.pop(0).wait()
            self._runner.messages.settle()
        finally:
            for held in self._held.values():
                held.close()

    def _forward(self, action: Action) -> None:
        _, at, number = action
        stage, batch = self._runner.stages[at], self._batches[number]
        inputs: list[torch.Tensor] = []
        value = None
        if at:
            said, tensors = self._arrived(Action(Kind.RECEIVE_FORWARD, at, number))
            left, grad = iter(tensors), torch.is_grad_enabled()
            value = decode(said, inputs, lambda form: next(left).requires_grad_(form.needs_grad and grad))
            # A layer may change it in place, which torch does not allow of a leaf.
            value = map_leaves(value, lambda leaf: Alias.apply(leaf) if isinstance(leaf, torch.Tensor) else leaf)
        output = self._calls.forward(stage, value, batch)
        if at == len(self._places) - 1:
            output = self._calls.loss(output, number)
        else:
            self._hand_on(action, output, batch)
        if torch.is_grad_enabled():
            stage.keep(number, inputs, output)

    def _hand_on(self, action: Action, output: Any, batch: Batch) -> None:
        _, at, number = action
        given: list[torch.Tensor] = []
        said, forms = encode(output, given), []
        decode(said, forms, lambda form: form)
        self._forms[at, number] = [form for form in forms if form.needs_grad]
        if self._is_here(at + 1):  # detached: each stage has a graph of its own, which its backward frees
            self._handed[Action(Kind.RECEIVE_FORWARD, at + 1, number)] = Handed(said, [each.detach() for each in given])
        else:
            self._runner.messages.form_to(self._places[at + 1], at + 1, (batch.key, torch.is_grad_enabled()), said)
            self._sending[Action(Kind.SEND_FORWARD, at, number)] = given

    def _backward(self, action: Action) -> None:
        kind, at, number = action
        stage, grads = self._runner.stages[at], []
        if at != len(self._places) - 1:
            grads = self._arrived(Action(Kind.RECEIVE_BACKWARD, at, number)).tensors
        whole = kind is Kind.BACKWARD
        with self._ready(stage, number, whole):
            found = (stage.backward if whole else stage.backward_input)(number, grads)
        if at and self._is_here(at - 1):
            self._handed[Action(Kind.RECEIVE_BACKWARD, at - 1, number)] = Handed(None, found)
        elif at:
            self._sending[Action(Kind.SEND_BACKWARD, at, number)] = found

    def _backward_weight(self, action: Action) -> None:
        _, at, number = action
        stage = self._runner.stages[at]
        with self._ready(stage, number, False, True):
            stage.backward_weight(number)

    @contextlib.contextmanager
    def _ready(self, stage: Stage, number: int, whole: bool, lands: bool = False) -> Iterator[None]:
        """Around a backward: parameters are there for one in parts, and gradients are taken behind it."""
        runner, units = self._runner, stage.units
        reducer = runner.sharded.reducer
        with self._calls.backward(), contextlib.ExitStack() as held:
            if not whole:  # torch looks for the nodes of all parameters in its graph
                held.enter_context(runner.sharded.held(units))
                for unit in units:
                    unit.wait()
            reducer.land(self._first + number)
            yield
            reducer.sweep(units)
        ended = whole or lands
        reducer.finish(stage.own, ended and runner.reduces_each)
        if ended:
            reducer.finish([unit for unit in units if unit not in stage.own], False)

    def _unshard(self, action: Action) -> None:
        if self._runner.gathers_once and action.stage not in self._held:
            held = self._held[action.stage] = contextlib.ExitStack()
            held.enter_context(self._runner.sharded.held(self._runner.stages[action.stage].units))

    def _reshard(self, action: Action) -> None:
        self._reshards[action.stage] -= 1
        if not self._reshards[action.stage] and action.stage in self._held:
            self._held[action.stage].close()

    def _reduce(self, action: Action) -> None:
        if self._last and not self._runner.reduces_each:
            self._runner.sharded.reducer.finish(self._runner.stages[action.stage].own, True)

    def _send(self, action: Action) -> None:
        kind, at, number = action
        forward = kind is Kind.SEND_FORWARD
        to = at + 1 if forward else at - 1
        going = self._runner.going
        going[:] = [passage for passage in going if not passage.done]
        sent = self._sending.pop(action), self._places[to], "activations" if forward else "gradients"
        going.append(self._runner.messages.send(*sent, f"of micro-batch {number} for stage {to}"))

    def _receive_forward(self, action: Action) -> None:
        _, at, number = action
        what, place = f"of micro-batch {number} for stage {at}", self._places[at - 1]
        forms: list[Form] = []
        decode(self._said(action, what), forms, lambda form: form)
        self._coming[action] = self._runner.messages.receive(forms, place, "activations", what)

    def _receive_backward(self, action: Action) -> None:
        _, at, number = action
        what, forms = f"of micro-batch {number} for stage {at}", self._forms[at, number]
        self._coming[action] = self._runner.messages.receive(forms, self._places[at + 1], "gradients", what)

    def _arrived(self, action: Action) -> Handed:
        """The input of a stage, or gradient of its output, from another rank or from a stage here."""
        if action in self._handed:
            return self._handed.pop(action)
        said = self._said(action, "") if action.kind is Kind.RECEIVE_FORWARD else None
        return Handed(said, self._coming.pop(action).wait())

    def _said(self, action: Action, what: str) -> Any:
        key = self._batches[action.micro_batch].key, torch.is_grad_enabled()
        return self._runner.messages.form_from(self._places[action.stage - 1], action.stage, key, what)

    def _is_here(self, stage: int) -> bool:
        return self._places[stage] == self._runner.axis.rank
