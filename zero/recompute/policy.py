"""Which modules are recomputed how, so that activations fit into a budget and as little as possible is done twice."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Policy(enum.Enum):
    """What is kept of a module's activations between forward and backward."""

    NONE = "none"
    """Everything: nothing is recomputed."""
    SELECTIVE = "selective"
    """Its inputs, and what matrix products and attention gave."""
    FULL = "full"
    """Its inputs only."""


class Cost(NamedTuple):
    """Bytes that one call keeps under each policy."""

    none: int = 0
    selective: int = 0
    full: int = 0

    def of(self, policy: Policy) -> int:
        """Under `policy`."""
        return getattr(self, policy.value)

    def most(self, other: Cost) -> Cost:
        """Of each number the larger one."""
        return Cost(*map(max, self, other))


class Choice(NamedTuple):
    """A policy for each module, and the bytes that the activations take at most then."""

    policies: Mapping[int, Policy]
    nbytes: int


def peak(calls: Sequence[int], costs: Mapping[int, Cost], policies: Mapping[int, Policy]) -> int:
    """The most bytes that activations take: when some call is recomputed, all before it are still kept.

    `calls` are the modules in the order of a forward. While the backward of a call runs, all that it would have kept
    without recomputation is there, whatever its policy.
    """
    kept = highest = 0
    for module in calls:
        own = costs[module].of(policies[module])
        highest = max(highest, kept + max(own, costs[module].none))
        kept += own
    return max(highest, kept)


def choose(calls: Sequence[int], costs: Mapping[int, Cost], budget: int) -> Choice:
    """The least recomputation that fits into `budget` bytes; full everywhere where nothing fits.

    First as many modules as possible keep their products, which saves the most time for a byte, then as many as
    possible keep all. The last ones come first: what the end of a forward keeps is gone when the peak comes, which is
    when the first recomputation begins.
    """
    policies = dict.fromkeys(calls, Policy.FULL)
    for policy in (Policy.SELECTIVE, Policy.NONE):
        for module in reversed(list(policies)):
            tried = policies | {module: policy}
            if peak(calls, costs, tried) <= budget:
                policies = tried
    return Choice(policies, peak(calls, costs, policies))
