"""Local SGD: replicas train by themselves for some steps, and then take the mean of their parameters and moments.

Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019 (arXiv:1805.09767); Lin et al., "Don't Use Large
Mini-Batches, Use Local SGD", ICLR 2020 (arXiv:1808.07217). Between means gradients are summed over `Mesh.summed`, which
is of one replica then. Of each step only the numbers that come with the norm go to all ranks, by which all skip a step
in which a gradient of any is not finite.
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


class ReplicaMeans:
    """Takes the means; without local SGD it does nothing.

    apart: steps since the replicas were the same; alike on all ranks.
    """

    def __init__(self, config: Config, sharded: ShardedModule, optimizer: ZeroOptimizer | None) -> None:
        self._sharded, self._optimizer = sharded, optimizer
        self._every = config.local_sgd.sync_every if sharded.meshes.local and optimizer is not None else 0
        self.apart = 0

    def step_ended(self, number: int) -> None:
        """Optimizer step `number` was taken, or skipped; at each `sync_every`-th the mean is due."""
        self.apart += self._every > 0
        if self.apart and number % self._every == 0:
            self.average_replicas()

    def bring_together(self, caller: str) -> None:
        """As `average_replicas`, for a `caller` that tells of one model; logged, as plain training sends nothing then.

        A mean that comes early does not move the next one.
        """
        if self.apart:
            text = "%s: local SGD has replicas that are %s apart; it takes their mean first"
            rank_zero(logging.INFO, text, caller, counted(self.apart, "step"))
            self.average_replicas()

    @torch.no_grad()
    def average_replicas(self) -> None:
        """With `local_sgd`, take the mean of the replicas now, as before an evaluation; collective.

        Saves and all that gives weights away begin with it. Nothing happens where the replicas are the same.
        """
        if not self.apart:
            return
        self.apart, units = 0, self._sharded.trained
        for unit in units:
            unit.invalidate()
            unit.write_exact(0, self._mean(unit, unit.shard.master.values()))
            with unit.shard.acquired(changed=True):
                self._average_states(unit)
        for unit in units:
            unit.gather()
        for unit in units:
            unit.wait()
        for rows in getattr(self._optimizer.states, "by_matrix", {}).values():  # NorMuon's, by the ranks that use them
            rows.copy_(comm.gather_scalars(rows, units[0].mesh.replica, "means of replicas").mean(0))

    def _average_states(self, unit: Unit) -> None:
        """The means of what has an element per parameter, and of single numbers; those that count stay."""
        states, group = self._optimizer.states, self._optimizer.param_groups[unit.plan.group]
        parts = unit.plan.layout.fragments(unit.shard.window)
        kept = states.kept(unit, group, parts[0]) if parts else {}
        for key, (moment, _) in kept.items():
            if moment.scales is None and not moment.values.is_floating_point():
                continue
            whole = torch.zeros_like(unit.shard.master.values())
            for part in parts:
                whole.narrow(0, part.at, part.numel).copy_(states.read(unit, group, key, part))
            whole = self._mean(unit, whole)
            for part in parts:
                states.write(unit, group, key, part, whole.narrow(0, part.at, part.numel))
        keys = [key for key in (states.keys(unit, group)[1] if kept else ()) if key != "step"]
        numbers = {key: states.number(unit, group, key) for key in keys}
        if floats := {key: value for key, value in numbers.items() if isinstance(value, float)}:
            row = torch.tensor([*floats.values()], dtype=torch.float64, device=unit.buffer.full.device)
            means = comm.gather_scalars(row, unit.mesh.replica, "means of replicas").mean(0).tolist()
            for key, value in zip(floats, means, strict=True):
                states.set_number(unit, group, key, value)

    def _mean(self, unit: Unit, values: torch.Tensor) -> torch.Tensor:
        """Of the replicas' fp32 [n], added in the order of ranks."""
        axis, tag = unit.mesh.replica, TAGS * unit.number + 1
        inbox, total = comm.scatter(values, axis, tag), torch.empty_like(values)
        own = total.chunk(axis.size)[axis.rank]
        inbox.sum(own, False)
        own /= axis.size
        comm.gather(total, axis, tag + 1).wait()
        return total
