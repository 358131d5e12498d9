"""LAMB on the shards of units: Adam with a learning rate per parameter, from norms of the whole parameter.

You et al., "Large Batch Optimization for Deep Learning", 2019 (arXiv:1904.00962), algorithm 2, as DeepSpeed's FusedLamb
computes it: the correction for the start of the means is a factor of the learning rate, and the ratio of the norms of
parameter and update is limited by two coefficients, and 1 if either norm is 0.

Once per step each rank squares its span of all parameters and updates, and one message carries all sums. Then Adam
without correction runs in the fused step, parameter by parameter.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain

import torch

from zero.core.agree import if_different
from zero.core.comm import gather_scalars, local_device
from zero.core.unit import Unit
from zero.core.world import World
from zero.kernels.formulas import Adam
from zero.kernels.moments import Moment
from zero.optim.fused import FusedShardOptimizer
from zero.optim.fused_states import States
from zero.optim.shard_optimizer import Group, Update
from zero.plan.formats import Run

CHUNK = 1 << 17  # elements whose update is computed at a time, in fp64, to stay in a cache


class LambShardOptimizer(FusedShardOptimizer):
    """LAMB; its arguments are those of `FusedShardOptimizer`. A step waits for the device, to read the norms."""

    factor_on_device = False

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self._ratios: dict[int, dict[str, float]] = {}  # by name, of the units not yet updated in this step
        self._places: dict[str, int] = {}  # of the parameters of all ranks, some of which this one may not have

    @torch.no_grad()
    def prepare(self, updates: Sequence[Update], world: World) -> None:
        """See `ShardOptimizer.prepare`; computes the ratios of norms, and changes no state."""
        names = [[spec.name for spec in update.unit.plan.params] for update in updates]
        if not self._places:
            own = list(chain(*names))
            everywhere = dict.fromkeys(chain(*(if_different(own, world) or [own])))
            self._places = {name: place for place, name in enumerate(everywhere)}
        device = updates[0].unit.buffer.full.device if updates else local_device()
        squares = torch.zeros(len(self._places), 2, dtype=torch.float64, device=device)
        places = [[self._places[name] for name in each] for each in names]
        for update, at in zip(updates, places, strict=True):
            squares[at] = self._squares(update).to(device)
        rows = gather_scalars(squares.flatten(), world, "norms of parameters").view(world.size, -1, 2)
        # Added in the order of spans and rounded: the bits do not depend on the stage, and only by chance on the ranks.
        meshes = [update.unit.mesh.summed for update in updates]
        sums = [mesh.by_span(rows[:, at]).cumsum(0)[-1] for mesh, at in zip(meshes, places, strict=True)]
        norms = iter(torch.cat(sums).sqrt().float().tolist() if sums else ())
        for update in updates:
            least, most = update.group["min_coeff"], update.group["max_coeff"]
            self._ratios[update.unit.index] = {
                spec.name: min(max(weight / change, least), most) if weight and change else 1.0
                for spec, (weight, change) in zip(update.unit.plan.params, norms, strict=False)
            }

    def _parts(self, unit: Unit, group: Group, states: States) -> Iterator[tuple[Adam, Run, tuple[Moment, ...]]]:
        formula, ratios = self._formula(group), self._ratios.pop(unit.index)
        lr = formula.lr
        if group["bias_correction"]:
            lr *= math.sqrt(1 - formula.beta2**states.steps) / (1 - formula.beta1**states.steps)
        for part in unit.plan.layout.fragments(unit.shard.window):
            moments = tuple(kept.moment for kept in self.states.kept(unit, group, part).values())
            run = Run(part.at, moments[0].numel, moments[0].format)
            yield replace(formula, lr=lr * ratios[part.name]), run, moments

    def _squares(self, update: Update) -> torch.Tensor:
        """The squares of each parameter of a unit and of its update, summed over our span; fp64 [k, 2]."""
        unit, group = update.unit, update.group
        formula, device = self._formula(group), unit.shard.placement.update_device
        span = unit.mesh.summed.counted_span(unit.plan.layout)
        first = span.start - unit.shard.window.start
        sums = {spec.name: torch.zeros(2, dtype=torch.float64, device=device) for spec in unit.plan.params}
        with unit.shard.acquired():
            for part in unit.plan.layout.fragments(span):
                for start in range(0, part.numel, CHUNK):
                    at, numel = first + part.at + start, min(CHUNK, part.numel - start)
                    kept = self.states.kept(unit, group, part._replace(at=at, numel=numel)).values()
                    mean, square = (each.moment.decode(each.signed)[:numel].double() for each in kept)
                    grad = update.grad[at : at + numel].to(device, torch.float64) * update.factor
                    weight = unit.shard.master.values(at, numel).double()
                    square.mul_(formula.beta2).addcmul_(grad, grad, value=1 - formula.beta2)
                    change = mean.lerp_(grad, 1 - formula.beta1).div_(square.sqrt_().add_(formula.eps))
                    change.add_(weight, alpha=formula.weight_decay)
                    sums[part.name] += torch.stack([weight.dot(weight), change.dot(change)])
        return torch.stack([*sums.values()])
