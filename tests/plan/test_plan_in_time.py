"""Gathers in time: no use begins later than if all were asked for at once, and nothing much before it has to be."""

from __future__ import annotations

import math

from hypothesis import example, given, settings
from hypothesis import strategies as st

from zero.plan.in_time import LearntUse, UnitSeconds, asked_until

times = st.integers(0, 1000).map(float)
units = st.lists(st.builds(UnitSeconds, times, times, times), min_size=1, max_size=6)


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[LearntUse], list[UnitSeconds]]:
    seconds = draw(units)
    use = st.builds(LearntUse, st.integers(0, len(seconds) - 1), st.just(False), st.booleans())
    forth, back = draw(st.lists(use, max_size=10)), draw(st.lists(use, max_size=10))
    return [*forth, *(each._replace(backward=True) for each in back)], seconds


def begins(uses: list[LearntUse], seconds: list[UnitSeconds], until: list[int]) -> list[float]:
    """When each use begins, where gathers go one after the other and are asked for as `until` says.

    What comes behind another use of the same unit is not asked for before that has ended.
    """
    link = device = 0.0
    there: list[float] = []
    found = []
    for index, (unit, back, _) in enumerate(uses):
        for stop in (index + 1, until[index]):  # first what nothing has asked for
            while len(there) < stop and uses[len(there)].unit not in [use.unit for use in uses[index : len(there)]]:
                link = max(link, device) + gather(uses, seconds, len(there))
                there.append(link)
            device = max(device, there[index])
        found.append(device)
        device += seconds[unit].backward if back else seconds[unit].forward
    return found


def gather(uses: list[LearntUse], seconds: list[UnitSeconds], index: int) -> float:
    return seconds[uses[index].unit].gather if uses[index].gathered else 0.0


@settings(deadline=None, max_examples=150)
@given(steps())
@example(([], [UnitSeconds(1.0, 1.0, 1.0)]))
@example(([LearntUse(0, False, True), LearntUse(1, False, True)], [UnitSeconds(math.inf, 0.0, 0.0)] * 2))
def test_no_use_begins_later_than_if_all_were_asked_for_as_early_as_can_be(given_as) -> None:
    uses, seconds = given_as
    asked = asked_until(uses, seconds)
    assert begins(uses, seconds, asked) == begins(uses, seconds, [len(uses)] * len(uses))
    assert asked == sorted(asked)
    assert all(index < stop <= len(uses) for index, stop in enumerate(asked))


def both_ways(count: int) -> list[LearntUse]:
    """Each unit forth and back, but that the last one of the forward is kept."""
    forth = [LearntUse(unit, False, True) for unit in range(count)]
    return [*forth, *(LearntUse(unit, True, unit < count - 1) for unit in reversed(range(count)))]


def test_while_computing_covers_it_one_gather_is_on_its_way() -> None:
    quick = [UnitSeconds(1.0, 100.0, 100.0)] * 3
    assert asked_until(both_ways(3), quick) == [2, 3, 5, 5, 6, 6]  # the last block's backward has it still
    stays = [use._replace(gathered=use.gathered and use.unit != 1) for use in both_ways(3)]
    assert asked_until(stays, quick) == [3, 3, 6, 6, 6, 6]


def test_a_late_gather_does_not_hurry_those_that_could_not_help_it() -> None:
    """The last unit's own second gather is late, as its first use has to end before; the others have time."""
    uses = [use._replace(gathered=True) for use in both_ways(4)]
    seconds = [UnitSeconds(1.0, 10.0, 20.0)] * 3 + [UnitSeconds(15.0, 10.0, 20.0)]
    assert asked_until(uses, seconds)[:3] == [2, 4, 4]
