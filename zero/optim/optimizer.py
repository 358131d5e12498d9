"""The optimizer that users hold: their parameter groups outside, units and shards inside."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import torch

from zero.core.wrap import Sharded
from zero.log import rank_zero
from zero.optim.clip import clip_factor, first_not_finite, global_norm
from zero.optim.rules import Rule


class ZeroOptimizer(torch.optim.Optimizer):
    """A `torch.optim.Optimizer` over the model's own parameters that updates shards.

    `param_groups` hold the module's parameters and the hyperparameters; change those at will, schedulers of
    torch do. `overflow` tells whether the last step was skipped because a gradient was not finite.
    """

    def __init__(self, groups: list[dict[str, Any]], rule: Rule, clipping: float, check_overflow: bool) -> None:
        self.rule = rule
        self.overflow = False
        self.loss_scale = 1.0
        self.grad_norm: float | None = None
        self._clipping = clipping
        self._check_overflow = check_overflow
        self._sharded: Sharded | None = None
        self._mean = 1.0
        super().__init__(groups, dict(rule.defaults))

    def bind(self, sharded: Sharded, mean: float) -> None:
        """Attach the units. `mean` turns the sum over ranks and micro-batches into their average."""
        self._sharded = sharded
        self._mean = mean

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Update every trained unit once and bring the new parameters to all who keep them; collective.

        Skipped, with `overflow` set and the parameter named, when a gradient is inf or NaN. The gradients are
        used up either way.
        """
        if closure is not None:
            raise ValueError("step() takes no closure: the gradients are reduced before it is called")
        sharded = self._sharded
        if sharded is None:
            raise RuntimeError("this optimizer is not attached to an engine")
        sharded.reducer.before_step()
        norm = global_norm(sharded.trained, sharded.mesh) * self._mean
        self.overflow = self._check_overflow and not math.isfinite(norm)
        self.grad_norm = norm
        if self.overflow:
            name = first_not_finite(sharded.trained, sharded.mesh)
            rank_zero(logging.WARNING, "step skipped: the gradient of parameter '%s' is not finite", name)
        else:
            self._update(sharded, self._mean * clip_factor(norm, self._clipping))
        sharded.drop_gradients()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, also what earlier micro-batches of this step accumulated."""
        if self._sharded is not None:
            self._sharded.drop_gradients()

    def nbytes(self) -> int:
        """Bytes of optimizer state on this rank, masters not counted."""
        return sum(self.rule.nbytes(unit, self.param_groups[unit.plan.group]) for unit in self._sharded.trained)

    def _update(self, sharded: Sharded, factor: float) -> None:
        for group in self.param_groups:
            self.rule.check(group)  # a wrong hyperparameter must not leave half of the units updated
        for unit in sharded.trained:
            unit.invalidate()  # before the values change: a full copy that is being read must be complete
            self.rule.update(unit, self.param_groups[unit.plan.group], factor)
            if not unit.cut or unit.whole:
                unit.gather()  # travels while the next unit is updated
        for unit in sharded.trained:
            if not unit.cut or unit.whole:
                unit.wait()
