"""The trained units of all ranks: ranks may hold different ones, of which some hold none.

What is said of units between ranks goes by the places in this table, never by those in a rank's own list.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from zero.core.agree import if_different
from zero.core.world import World
from zero.plan.units import UnitPlan


class UnitTable(NamedTuple):
    """Of the trained units of all ranks, and the places of this rank's there.

    names: each once, in one order on all ranks; places: of this rank's units, in its order.
    """

    names: tuple[str, ...] = ()
    places: tuple[int, ...] = ()


def agree_on_units(plans: Sequence[UnitPlan], world: World) -> UnitTable:
    """The table of the trained ones among each rank's plans; collective.

    A unit is known by its first parameter: names of parameters are those of the whole model, and stages of a pipeline
    have a root each.
    """
    own = [[plan.params[0].name, plan.name] for plan in plans if plan.requires_grad]
    known = {first: name for each in if_different(own, world) or [own] for first, name in each}
    names = list(known.values())
    labels = (name if names.count(name) == 1 else f"{name} ({first})" for first, name in known.items())
    at = {first: place for place, first in enumerate(known)}
    return UnitTable(tuple(labels), tuple(at[first] for first, _ in own))
