"""The other ranks' shards of parameters that every rank keeps whole, read where they would send them.

On one host a file that one rank reads is in the page cache for all, and a message would be copied more often.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from zero.checkpoint.reader import Reader
from zero.core.unit import Unit
from zero.engine.checkpoint.collective_read import LoadPlan
from zero.engine.checkpoint.units import straight
from zero.plan.layout import Span


def replaced(units: Iterable[Unit], plan: LoadPlan) -> list[Unit]:
    """The units whose other shards can be read as they will be; the same ones on all ranks."""
    if not plan.near or not plan.ask.weights:
        return []
    return [unit for unit in units if _replaced(unit, plan)]


def _replaced(unit: Unit, plan: LoadPlan) -> bool:
    if unit.cut or unit.mesh.shard.size == 1 or unit.full.device.type != "cpu":
        return False
    names = [plan.match.names.get(spec.name) for spec in unit.plan.params]
    # What is not in the checkpoint, or is rounded on its way, its owner has to tell.
    return all(name is not None and straight(unit, plan.index.parameters[name], plan.ask.masters) for name in names)


def load_others(unit: Unit, reader: Reader, plan: LoadPlan) -> None:
    """Ask for the full buffer of a unit but for the own shard; the unit is borrowed, and the caller finishes."""
    own, layout = unit.window, unit.plan.layout
    for window in (Span(0, own.start), Span(own.stop, layout.numel - own.stop)):
        for part in layout.fragments(window):
            name = plan.match.names[part.name]
            place = unit.full.narrow(0, window.start + part.at, part.numel)
            reader.fill(place, plan.index.parameters[name].weight, part.start, f"weight of '{name}'")


def renew(units: Iterable[Unit], there: Collection[Unit]) -> None:
    """Bring what was loaded to all who keep it whole, but for units that are `there` already; collective."""
    kept = [unit for unit in units if unit.stays_full]
    for unit in kept:
        if unit in there:
            unit.complete()
        else:
            unit.gather()
    for unit in kept:
        unit.wait()
