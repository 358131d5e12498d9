"""The tokens that each expert gets, of all ranks, which a small message brings to rank 0 every so many steps."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from zero.config import Config
from zero.core import comm
from zero.core.sharded_module import ShardedModule
from zero.monitor.sinks import SINKS
from zero.parallel.experts.cutting import CutExperts

_EVERY = 10  # steps, for the monitors alone


class ExpertTokens:
    """Counts tokens until a step in which the log has a line; without one, until each tenth for the monitors.

    No step waits for the device: it is whoever shows the numbers that reads them.
    """

    def __init__(self, config: Config, sharded: ShardedModule, experts: CutExperts) -> None:
        self._sharded, self._experts = sharded, experts
        listens = config.zero.report is not None or any(getattr(config, key).enabled for key in SINKS)
        self._every = _EVERY if listens and math.isinf(config.steps_per_print) else config.steps_per_print
        self._found: Mapping[str, torch.Tensor] | None = None

    def gather(self, step: int) -> None:
        """Bring the counts of all ranks together if it is the turn of step `step`; collective then."""
        if math.isinf(self._every) or step % int(self._every):
            return
        world, ranks, found = self._sharded.world, self._experts.ranks.size, self._experts.found
        seen = {forward.module: forward.seen for forward in self._experts.forwards}
        own = [seen.get(each.module) for each in found]  # None: of another stage, or not called
        zeros = torch.zeros(max(each.count for each in found), dtype=torch.long, device=self._sharded.device)
        sizes = [each.count // ranks for each in found]
        row = torch.cat([zeros[:size] if one is None else one for one, size in zip(own, sizes, strict=True)])
        rows = comm.gather_scalars(row, world, "tokens of experts", read=False)
        # The ranks along ep follow each other: those of the same place have the same experts.
        parts = rows.unflatten(0, (-1, ranks)).sum(0).split(sizes, 1)
        self._found = {each.name: part.flatten() for each, part in zip(found, parts, strict=True)}

    def take(self) -> Mapping[str, torch.Tensor]:
        """What was gathered in this step, by the names of modules [experts]; from here on counts begin anew."""
        found, self._found = self._found, None
        for forward in self._experts.forwards if found is not None else ():
            forward.seen = None
        return found if found is not None and self._sharded.world.global_rank == 0 else {}
