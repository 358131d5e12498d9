"""How far ahead units are gathered when it is known how long a gather takes, and how long each use computes."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple


class LearntUse(NamedTuple):
    """One use of the last step: of which unit, whether in its backward, and whether it was gathered for it."""

    unit: int
    backward: bool
    gathered: bool


class UnitSeconds(NamedTuple):
    """Seconds that one unit takes: its gather when nothing else travels, and what is computed at a use of it."""

    gather: float
    forward: float
    backward: float


def asked_until(uses: Sequence[LearntUse], seconds: Sequence[UnitSeconds]) -> list[int]:
    """For each use of a step, the index behind the last one whose gather must be asked for while it computes.

    `seconds` by unit. Gathers go one after the other, and none begins before the use of the same unit that comes before
    it has ended. So each has a latest begin, at which it and those behind it still end before their uses, or as early
    as they can. What cannot wait for the next use to ask for it is asked for now, and one gather at least: no use
    begins later than if everything were asked for as early as possible.
    """
    begins, earliest, last = [0.0], [], dict[int, int]()
    for index, use in enumerate(uses):
        earliest.append(max(*earliest[-1:], 0.0, begins[last[use.unit] + 1] if use.unit in last else 0.0))
        begins.append(begins[-1] + (seconds[use.unit].backward if use.backward else seconds[use.unit].forward))
        last[use.unit] = index
    latest, least = [math.inf] * len(uses), [len(uses)] * len(uses)
    bound, nearest = math.inf, len(uses)
    for index in reversed(range(len(uses))):
        least[index] = nearest
        gather = seconds[uses[index].unit].gather if uses[index].gathered else 0.0
        bound = latest[index] = max(min(begins[index], bound) - gather, earliest[index])
        nearest = index + 1 if gather else nearest
    return [max(least[index], bisect_right(latest, begins[index + 1])) for index in range(len(uses))]
