"""A pipeline's schedule as values: what each rank does to which micro-batch of which stage, in order."""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Kind(enum.Enum):
    """The kinds of action; the values are those of torch's schedules."""

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    UNSHARD = "UNSHARD"
    RESHARD = "RESHARD"
    SEND_FORWARD = "SEND_F"
    RECEIVE_FORWARD = "RECV_F"
    SEND_BACKWARD = "SEND_B"
    RECEIVE_BACKWARD = "RECV_B"
    REDUCE = "REDUCE_GRAD"


# How long each takes, a forward being one; what is not here takes no time.
TIMES = {Kind.FORWARD: 1.0, Kind.BACKWARD: 2.0, Kind.BACKWARD_INPUT: 1.0, Kind.BACKWARD_WEIGHT: 1.0}


class Action(NamedTuple):
    """One entry of a schedule; `micro_batch` is -1 where it is of the whole stage."""

    kind: Kind
    stage: int
    micro_batch: int = -1

    def __str__(self) -> str:
        """As torch writes it: `0F3` is the forward of micro-batch 3 on stage 0."""
        return f"{self.stage}{self.kind.value}{'' if self.micro_batch < 0 else self.micro_batch}"


@dataclass(frozen=True)
class Schedule:
    """The actions of each rank along pp in one step.

    style: its name; micro_batches: of the step; places: of each stage, the rank along pp that has it;
    orders: of each rank along pp, its actions.
    """

    style: str
    micro_batches: int
    places: tuple[int, ...]
    orders: tuple[tuple[Action, ...], ...]

    def stages(self, place: int) -> tuple[int, ...]:
        """The stages of one rank along pp."""
        return tuple(stage for stage, at in enumerate(self.places) if at == place)

    def text(self) -> str:
        """A line for each rank along pp: what it computes, sends and receives, in order."""
        lines = (" ".join(map(str, order)) for order in self.orders)
        return "\n".join(f"pp {place}: {line}" for place, line in enumerate(lines))

    def alive(self, place: int) -> int:
        """The most micro-batches of which a rank keeps activations at one moment, each stage's counted by itself."""
        now = most = 0
        for kind, _, _ in self.orders[place]:
            now += (kind is Kind.FORWARD) - (kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT))
            most = max(most, now)
        return most

    def bubble(self, times: Mapping[Kind, float] = TIMES) -> float:
        """The share of a step's time in which a rank waits, on average, where sending takes no time."""
        clocks, at = [0.0] * len(self.orders), [0] * len(self.orders)
        done: dict[tuple[bool, int, int], float] = {}  # by direction, stage and micro-batch
        moved = True
        while moved:
            moved = False
            for place, order in enumerate(self.orders):
                while at[place] < len(order):
                    kind, stage, number = order[at[place]]
                    forward, last = kind is Kind.FORWARD, len(self.places) - 1
                    if forward or kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
                        # Receives wait for nothing; what is computed from them does.
                        source = (forward, stage - 1 if forward else stage + 1, number)
                        if stage != (0 if forward else last) and source not in done:
                            break
                        clocks[place] = max(clocks[place], done.get(source, 0.0))
                        done[forward, stage, number] = clocks[place] + times[kind]
                    clocks[place] += times.get(kind, 0.0)
                    at[place], moved = at[place] + 1, True
        worked = sum(times.get(action.kind, 0.0) for order in self.orders for action in order)
        return 1.0 - worked / (len(self.orders) * max(clocks)) if worked else 0.0


def single_order(style: str, places: int, micro_batches: int) -> list[list[Action]]:
    """The actions of ranks under `gpipe` or `1f1b`, one stage each (Huang et al., 2019; Narayanan et al., 2019)."""
    orders = []
    for stage in range(places):
        ahead = micro_batches if style == "gpipe" else min(micro_batches, places - 1 - stage)
        order = [Action(Kind.FORWARD, stage, number) for number in range(ahead)]
        for number in range(micro_batches):
            if ahead + number < micro_batches:
                order.append(Action(Kind.FORWARD, stage, ahead + number))
            order.append(Action(Kind.BACKWARD, stage, number))
        orders.append(order)
    return orders


def forward_orders(schedule: Schedule) -> Schedule:
    """The schedule of an evaluation: forwards, in the order of micro-batches, and what they send."""
    orders = []
    for place, trained in enumerate(schedule.orders):
        kept = {*trained}
        actions = (  # one micro-batch after the other, so that ranks with several stages post messages in one order
            Action(kind, stage, number)
            for number in range(schedule.micro_batches)
            for stage in schedule.stages(place)
            for kind in (Kind.RECEIVE_FORWARD, Kind.FORWARD, Kind.SEND_FORWARD)
        )
        orders.append(tuple(action for action in actions if action in kept))
    return Schedule(schedule.style, schedule.micro_batches, schedule.places, tuple(orders))


def balanced(weights: Sequence[float], parts: int) -> list[int]:
    """Where each of `parts` runs of neighbours begins, so that the heaviest is as light as can be; none is empty.

    Of several such, the earlier parts take more: 10 equal layers on 4 stages are 3, 3, 2, 2.
    """
    if len(weights) < parts:
        raise ValueError(f"{len(weights)} layers are fewer than the {parts} stages; each stage wants one")
    sums = [0.0, *itertools.accumulate(weights)]
    heaviest = _starts(sums, parts, lambda one, other: max(one, other))[0]
    return _starts(sums, parts, lambda one, other: one + other * other, heaviest)[1]


def _starts(
    sums: Sequence[float], parts: int, join: Callable[[float, float], float], limit: float = math.inf
) -> tuple[float, list[int]]:
    """The least cost of dividing into `parts`, none above `limit`, and where each begins; `join` adds a part's."""
    best: list[tuple[float, list[int]]] = [(0.0, [])] + [(math.inf, [])] * (len(sums) - 1)  # by how many are divided
    for part in range(parts):
        longer = [(math.inf, [])] * len(sums)
        for end in range(part + 1, len(sums)):
            for start in range(part, end):
                cost, starts = best[start]
                weight = sums[end] - sums[start]
                if weight <= limit and (total := join(cost, weight)) <= longer[end][0] and cost < math.inf:
                    longer[end] = total, [*starts, start]
        best = longer
    return best[-1]
