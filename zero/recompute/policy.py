"""How each module is recomputed, so that activations fit a budget with as little recomputation as possible."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Policy(enum.Enum):
    """The activations of a module that are kept between forward and backward."""

    NONE = "none"
    """Everything: nothing is recomputed."""
    SELECTIVE = "selective"
    """Its inputs, and the results of matrix products and attention."""
    FULL = "full"
    """Its inputs only."""


class Cost(NamedTuple):
    """Bytes that one call keeps under each policy."""

    none: int = 0
    selective: int = 0
    full: int = 0

    def of(self, policy: Policy) -> int:
        """The bytes under `policy`."""
        return getattr(self, policy.value)

    def most(self, other: Cost) -> Cost:
        """The larger number for each policy."""
        return Cost(*map(max, self, other))


class Choice(NamedTuple):
    """A policy for each module, and the peak bytes of activations under them."""

    policies: Mapping[int, Policy]
    nbytes: int


def peak(calls: Sequence[int], costs: Mapping[int, Cost], policies: Mapping[int, Policy]) -> int:
    """The peak bytes of activations: while one call is recomputed, all earlier ones are still kept.

    `calls` are the modules in the order of a forward. While the backward of a call runs, everything that it would keep
    without recomputation is in memory, whatever its policy.
    """
    kept = highest = 0
    for module in calls:
        own = costs[module].of(policies[module])
        highest = max(highest, kept + max(own, costs[module].none))
        kept += own
    return max(highest, kept)


def choose(calls: Sequence[int], costs: Mapping[int, Cost], budget: int) -> Choice:
    """The least recomputation that fits into `budget` bytes; full recomputation if nothing fits.

    First as many modules as possible keep their products, which saves the most time for a byte, then as many as
    possible keep all. The last modules come first: activations of a forward's end are freed before the peak, which is
    when the first recomputation begins.
    """
    policies = dict.fromkeys(calls, Policy.FULL)
    for policy in (Policy.SELECTIVE, Policy.NONE):
        for module in reversed(list(policies)):
            tried = policies | {module: policy}
            if peak(calls, costs, tried) <= budget:
                policies = tried
    return Choice(policies, peak(calls, costs, policies))
