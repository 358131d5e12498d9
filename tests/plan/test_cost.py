"""The promise: bytes and FLOPs of a model add up from its units, by policy, and their peak is that of a played step."""

from __future__ import annotations

from zero.sizes.cost import POLICIES, ModelCost, UnitCost

UNITS = tuple(
    UnitCost(
        name,
        "Block",
        True,
        10.0,
        20.0,
        dict(zip(POLICIES, (none, none - 3.0, full, 0.0), strict=True)),
        dict(zip(POLICIES, (0.0, 2.0, 9.0, 9.0), strict=True)),
        work,
    )
    for name, none, full, work in (("a", 10.0, 2.0, 3.0), ("b", 20.0, 4.0, 1.0), ("c", 8.0, 1.0, 9.0))
)


def played(policy: str, logits: float) -> float:
    """The most bytes alive through a forward and a backward, one unit after the other."""
    kept = [unit.saved[policy] for unit in UNITS]
    moments = [sum(kept) + logits]
    for place, unit in enumerate(UNITS):
        before = UNITS[place - 1].saved["full"] if place and policy == "host" else 0.0
        moments.append(sum(kept[:place]) + before + max(kept[place], unit.saved["none"]) + unit.working)
    return max(moments)


def test_the_peak_is_that_of_a_played_step():
    for logits in (0.0, 30.0):
        cost = ModelCost(UNITS, logits, 1.0, 5)
        for policy in POLICIES:
            assert cost.peak(policy) == played(policy, logits)
            assert cost.peak(policy, 3) == 3 * played(policy, logits)
    assert cost.activations("full", 2) == 14 and cost.on_host("host") == 7 and cost.on_host("full") == 0
    assert cost.flops == 90
