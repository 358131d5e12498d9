"""Local SGD: replicas train by themselves for some steps, and then take the mean of their parameters and moments.

Stich, "Local SGD Converges Fast and Communicates Little", 2019 (arXiv:1805.09767); Lin et al., "Don't Use Large
Mini-Batches, Use Local SGD", 2020 (arXiv:1808.07217). Until then gradients are summed over `Mesh.summed`, of one
replica; of a step only the numbers that come with the norm go to all ranks, by which all skip it together.
"""

from __future__ import annotations

import logging

import torch

from zero.config import Config
from zero.core import comm
from zero.core.sharded_module import ShardedModule
from zero.core.unit import TAGS, Unit
from zero.log import counted, rank_zero
from zero.optim.optimizer import ZeroOptimizer
from zero.plan.layout import Fragment


class ReplicaMeans:
    """Takes the means. apart: steps since the replicas were the same, alike on all ranks; 0 without local SGD."""

    def __init__(self, config: Config, sharded: ShardedModule, optimizer: ZeroOptimizer | None) -> None:
        self._sharded, self._optimizer, self.apart = sharded, optimizer, 0
        self._every = config.local_sgd.sync_every if sharded.meshes.local else 0

    def step_ended(self, number: int) -> None:
        """Optimizer step `number` was taken, or skipped; at each `sync_every`-th the mean is due."""
        self.apart += self._every > 0
        if self.apart and number % self._every == 0:
            self._average()

    def average_replicas(self) -> None:
        """With `local_sgd`, take the mean of the replicas now, as before an evaluation; collective.

        Saves and all that gives weights away begin with it; the next mean comes when it would have come.
        """
        if self.apart:
            text = "local SGD: replicas that are %s apart take their mean before its turn"
            rank_zero(logging.INFO, text, counted(self.apart, "step"))
            self._average()

    @torch.no_grad()
    def _average(self) -> None:
        self.apart, units = 0, self._sharded.trained
        for unit in units:
            unit.invalidate()
            unit.write_exact(0, _mean(unit, unit.shard.master.values()))
            self._average_states(unit)
            unit.gather()
        for unit in units:
            unit.wait()

    def _average_states(self, unit: Unit) -> None:
        """By as many messages on all ranks, whatever parameters their shards have."""
        states, group = self._optimizer.states, self._optimizer.param_groups[unit.plan.group]
        if not states.foreseen and not states.kept(unit, group, Fragment("", 0, 0, 0)):
            return  # its first step makes it, and all were skipped
        parts, (wide, numbers) = unit.plan.layout.fragments(unit.shard.window), states.keys(unit, group)
        for key in wide:
            whole = torch.zeros(unit.shard.window.numel, device=unit.shard.placement.update_device)
            for part in parts:
                whole[part.at : part.at + part.numel] = states.read(unit, group, key, part)
            whole = _mean(unit, whole)
            for part in parts:
                moment = states.kept(unit, group, part)[key].moment
                if moment.scales is not None or moment.values.is_floating_point():
                    states.write(unit, group, key, part, whole[part.at : part.at + part.numel])
        for key in numbers:
            if key != "step" and isinstance(value := states.number(unit, group, key), float):  # what counts stays
                own = torch.tensor([value], dtype=torch.float64, device=unit.buffer.full.device)
                values = comm.gather_scalars(own, unit.mesh.replica, "numbers of the optimizer")
                states.set_number(unit, group, key, values.mean().item())


def _mean(unit: Unit, values: torch.Tensor) -> torch.Tensor:
    """The mean over the replicas of a unit, fp32 [n], added in the order of ranks."""
    axis, tag = unit.mesh.replica, TAGS * unit.number + 1
    inbox = comm.scatter(values, axis, tag)
    total = torch.empty_like(values)
    own = total.chunk(axis.size)[axis.rank]
    inbox.sum(own, False)
    own /= axis.size
    comm.gather(total, axis, tag + 1).wait()
    return total
