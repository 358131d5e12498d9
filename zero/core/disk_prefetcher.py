"""Shards that rest in files, on their way to host memory before they are gathered."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from zero.core.unit import Unit
from zero.plan.order import Limits, Position, read_ahead


class DiskPrefetcher:
    """Reads further ahead than parameters are gathered: it takes buffers in host memory and none of the device's.

    What has been asked for depends on the order of uses only, and so is alike on all ranks; whether there was a buffer
    for it, or an update in its way, is not. A unit that was not asked for before is not gathered ahead: its gather
    would wait for the whole of the drive.
    """

    def __init__(self, units: Sequence[Unit], limits: Limits) -> None:
        self._units = units
        self._limits = limits
        self._in_files = {unit.index for unit in units if unit.cut and not unit.placement.shard_store.resident}
        self._asked: dict[int, bool] = {}  # units that were asked for, and whether their read has begun

    def was_asked(self, unit: Unit) -> bool:
        """Whether the shard is in memory anyway, or was asked for when another unit was used."""
        return unit.index not in self._in_files or unit.index in self._asked

    def ask(self, order: Sequence[int], position: Position, there: Collection[int]) -> None:
        """Begin to read what comes next; units that are `there` need not be read."""
        wanted = read_ahead(order, position, self._limits, self._in_files, there)
        self._asked = dict.fromkeys(wanted, False) | self._asked
        for index in wanted:
            if not self._units[index].fetch():
                return  # no buffer: those behind it would be taken from it
            self._asked[index] = True

    def gathered(self, unit: Unit) -> None:
        """The unit is gathered now."""
        self._asked.pop(unit.index, None)

    def cancel(self) -> None:
        """Give back what nobody has come for."""
        asked, self._asked = self._asked, {}
        for index in sorted(index for index, begun in asked.items() if begun):
            self._units[index].cancel_fetch()
