"""The tokens that each expert gets, of all ranks, which a small message brings to rank 0 every so many steps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from zero.config import Config
from zero.core import comm
from zero.core.sharded_module import ShardedModule
from zero.monitor.sinks import SINKS
from zero.monitor.step_record import Line
from zero.parallel.experts.cutting import CutExperts

_EVERY = 10  # steps, for the monitors alone


class ExpertTokens:
    """Counts tokens until a step in which the log has a line; without one, until each tenth for the monitors.

    No step waits for the device: what is gathered goes to the host ahead of the norm, and is read after that.
    """

    def __init__(self, config: Config, sharded: ShardedModule, experts: CutExperts) -> None:
        self._sharded, self._experts = sharded, experts
        listens = config.zero.report is not None or any(getattr(config, key).enabled for key in SINKS)
        self._every = _EVERY if listens and math.isinf(config.steps_per_print) else config.steps_per_print
        self._found: torch.Tensor | None = None

    @property
    def _sizes(self) -> list[int]:
        """Experts of each module that a rank has."""
        return [each.count // self._experts.axis.size for each in self._experts.found]

    def gather(self, step: int) -> None:
        """Bring the counts of all ranks together if it is the turn of step `step`; collective then."""
        if math.isinf(self._every) or step % int(self._every):
            return
        device, seen = self._sharded.device, {each.module: each.seen for each in self._experts.forwards}
        own = [seen.get(each.module) for each in self._experts.found]  # None: of another stage, or not called
        zeros = torch.zeros(max(self._sizes), dtype=torch.long, device=device)
        row = torch.cat([zeros[:size] if one is None else one for one, size in zip(own, self._sizes, strict=True)])
        rows = comm.gather_scalars(row, self._sharded.world, "tokens of experts", read=False)
        # The ranks along ep follow each other: those of the same place have the same experts.
        found = rows.unflatten(0, (-1, self._experts.axis.size)).sum(0)
        self._found = torch.empty_like(found, device="cpu", pin_memory=True) if found.is_cuda else found
        if found.is_cuda:
            self._found.copy_(found, non_blocking=True)

    def step_ended(self) -> None:
        """From here on counts begin anew, if they were gathered in this step."""
        for forward in self._experts.forwards if self._found is not None else ():
            forward.seen = None

    def take(self) -> dict[str, list[int]]:
        """The tokens of each expert, by the names of modules; nothing where they were not gathered.

        The norm of the step must have been read.
        """
        found, self._found = self._found, None
        if found is None:
            return {}
        parts = zip(self._experts.found, found.split(self._sizes, 1), strict=True)
        return {each.name: part.flatten().tolist() for each, part in parts}


def line_of(tokens: Mapping[str, Sequence[int]], step: int, samples: int) -> Line:
    """The tokens of experts until a step, after so many samples."""
    events = []
    for module, each in tokens.items():
        named = {"fullest": share_of_fullest(each)} | {f"tokens_{at}": count for at, count in enumerate(each)}
        events += [(f"Train/Experts/{module}/{name}", value, samples) for name, value in named.items()]
    return Line("experts", {"step": step, "tokens": tokens}, events)


def share_of_fullest(tokens: Sequence[int]) -> float:
    """The share of a module's tokens that one of its experts got; 0 without any."""
    return max(tokens) / max(1, sum(tokens))
