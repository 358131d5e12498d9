"""Random numbers of the forward that belong to a micro-batch of the global batch, not to the rank that runs it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from zero.core import comm
from zero.core.comm import Axis
from zero.core.world import World
from zero.data.seeds import mixed

_PARTS = 32  # bits for forwards of one micro-batch


class Randomness:
    """Seeds torch around each forward, so that dropout falls alike however many ranks share the batch.

    The seed is made of torch's seed on rank 0 at the start (`torch.manual_seed` before `initialize`), the optimizer
    step, the micro-batch's number in it over all ranks, and the number of the forward within that micro-batch. Covers
    torch's generators of the CPU and of this rank's device. What else is drawn (Python's `random`, NumPy, random
    numbers outside of the engine's forward, augmentation in the dataset) is the script's own.
    """

    def __init__(self, world: World, device: torch.device, own: Axis) -> None:
        """Collective: every rank takes rank 0's seed. `own`: the ranks that run something of their own."""
        self._own = own
        self._device = device
        seed = torch.initial_seed()
        words = torch.tensor([seed >> 32 & 0xFFFFFFFF, seed & 0xFFFFFFFF], device=device)
        comm.broadcast(words, 0, world, "random seed")
        self._base: list[int] = words.tolist()
        self.part = 0  # of the model that runs: stages of a pipeline have numbers of their own
        self._place = (-1, -1)  # optimizer step and micro-batch of this rank that the last forward belonged to
        self._forwards = 0  # of that micro-batch

    @contextlib.contextmanager
    def forward(self, step: int, micro_batch: int) -> Iterator[None]:
        """Inside, torch's generators are seeded for this rank's micro-batch of optimizer step `step`."""
        if self._place != (step, micro_batch):
            self._place, self._forwards = (step, micro_batch), 0
        shared = micro_batch * self._own.size + self._own.rank
        seed = mixed(*self._base, step, shared, self._forwards + (self.part << _PARTS))
        self._forwards += 1
        generators = [torch.default_generator]
        if self._device.type == "cuda":
            generators.append(torch.cuda.default_generators[self._device.index])
        with torch.random.fork_rng([each.device for each in generators[1:]]):
            for generator in generators:
                generator.manual_seed(seed)
            yield

    def state_dict(self) -> dict[str, Any]:
        """All that `load_state_dict` needs, the same on all ranks, as plain numbers."""
        return {"base": list(self._base), "place": list(self._place), "forwards": self._forwards}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another run was; on all ranks alike."""
        self._base, self._place, self._forwards = state["base"], tuple(state["place"]), state["forwards"]
