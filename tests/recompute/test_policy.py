"""The promise: a choice of what is recomputed fits into its budget wherever one does, and recomputes little."""

from __future__ import annotations

from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from zero.plan.patterns import outermost
from zero.recompute.policy import Cost, Policy, choose, peak

costs = st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9)).map(
    lambda parts: Cost(sum(parts), parts[0] + parts[1], parts[0])
)
cases = st.lists(costs, min_size=1, max_size=4).flatmap(
    lambda found: st.tuples(st.just(dict(enumerate(found))), st.lists(st.integers(0, len(found) - 1), max_size=6))
)


def peak_by_hand(calls: list[int], found: dict[int, Cost], policies: dict[int, Policy]) -> int:
    """Play a forward and a backward, one call after the other."""
    kept = [found[module].of(policies[module]) for module in calls]
    highest = sum(kept)
    for place in reversed(range(len(calls))):
        running = max(kept[place], found[calls[place]].none)  # what its backward works on
        highest = max(highest, sum(kept[:place]) + running)
    return highest


@settings(deadline=None, max_examples=200)
@given(cases, st.integers(0, 60))
def test_a_choice_fits_where_one_does_and_cannot_be_improved(case: tuple, budget: int) -> None:
    found, calls = case
    choice = choose(calls, found, budget)
    assert set(choice.policies) == set(calls)
    assert choice.nbytes == peak_by_hand(calls, found, choice.policies) == peak(calls, found, choice.policies)
    called = sorted(set(calls))
    every = [dict(zip(called, each, strict=True)) for each in product(Policy, repeat=len(called))]
    if any(peak(calls, found, each) <= budget for each in every):
        assert choice.nbytes <= budget
        for module in called:  # no single module could be recomputed less
            for better in list(Policy)[: list(Policy).index(choice.policies[module])]:
                assert peak(calls, found, {**choice.policies, module: better}) > budget
    else:
        assert set(choice.policies.values()) <= {Policy.FULL}


def test_the_last_modules_are_spared_first() -> None:
    """Whole, the last one takes no more than its recomputation would, and that is before any other begins."""
    found = dict.fromkeys(range(4), Cost(10, 6, 1))
    none, some, full = Policy.NONE, Policy.SELECTIVE, Policy.FULL
    for budget, policies in (
        (12, [full] * 4),
        (13, [full, full, full, none]),
        (18, [full, full, some, none]),
        (28, [some, some, some, none]),
        (36, [some, none, none, none]),
        (40, [none] * 4),
    ):
        choice = choose(range(4), found, budget)
        assert [choice.policies[number] for number in range(4)] == policies, budget


MODULES = [
    ("", "Net"),
    ("a", "List"),
    ("a.0", "Block"),
    ("a.0.b", "Block"),
    ("a.1", "Block"),
    ("a.10", "Other"),
    ("z", "Linear"),
]


def test_the_outermost_of_nested_modules_are_taken() -> None:
    assert outermost("x", MODULES, ["Block"]) == ["a.0", "a.1"]
    assert outermost("x", MODULES, ["a.*", "Block"]) == ["a.0", "a.1", "a.10"]
    assert outermost("x", MODULES, ["a", "Linear", "Block"]) == ["a", "z"]
    assert outermost("x", MODULES, ["Net", "Block"]) == [""]
