"""The units of all ranks: ranks may hold different ones, of which some hold none.

What is said of units between ranks goes by the places in this table, never by those in a rank's own list.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from zero.core.agree import if_different
from zero.core.world import World
from zero.plan.units import UnitPlan


class UnitTable(NamedTuple):
    """The units of all ranks, each once and in one order on all of them, and the places of this rank's there.

    units: names of all; numbers: places of this rank's among them, in its order; names, places: so of the trained ones.
    """

    units: tuple[str, ...] = ()
    numbers: tuple[int, ...] = ()
    names: tuple[str, ...] = ()
    places: tuple[int, ...] = ()


def agree_on_units(plans: Sequence[UnitPlan], world: World) -> UnitTable:
    """The table of each rank's plans; collective.

    A unit is known by its first parameter: names of parameters are those of the whole model, and stages of a pipeline
    have a root each.
    """
    own = [[plan.params[0].name, plan.name, plan.requires_grad] for plan in plans]
    known = {first: more for each in if_different(own, world) or [own] for first, *more in each}
    names = [name for name, _ in known.values()]
    labels = {first: name if names.count(name) == 1 else f"{name} ({first})" for first, (name, _) in known.items()}
    at = {first: place for place, first in enumerate(known)}
    trained = {first: place for place, first in enumerate(first for first, (_, trains) in known.items() if trains)}
    return UnitTable(
        tuple(labels.values()),
        tuple(at[first] for first, *_ in own),
        tuple(labels[first] for first in trained),
        tuple(trained[first] for first, *_ in own if first in trained),
    )
