"""Where a gradient first was not finite: which parameter, and after which backward of the accumulation window.

The optimizer finds an overflow by the norm, at the step, when several backwards have added up. To tell which one
brought it, what each has left is looked at when the next one begins: one sum of squares, so one pass over the
gradients, and nothing where every step has one backward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from zero.core.agree import agree
from zero.core.unit import Unit
from zero.core.world import World
from zero.kernels.norm import sum_squares_into

ALL_FINITE = "the norm of the gradients is not finite, though each of them is"


class FirstNotFinite:
    """Watches the trained units of one engine through an accumulation window.

    enabled:   whether to look between backwards at all: only for an optimizer that asks for it, and waits;
    backwards: how many have begun since the window did;
    world:     all ranks, over which the first is looked for.
    """

    def __init__(self, units: Sequence[Unit], world: World) -> None:
        self.enabled = False
        self.backwards = 0
        self._units = units
        self.world = world
        self._names = [spec.name for unit in units for spec in unit.plan.params]
        self._found: tuple[int, int] | None = None  # (backward, index of the name)

    def begin(self) -> None:
        """Another backward starts: look at what those before it left."""
        if self.backwards and self.enabled and self._found is None and not self._all_finite():
            self._found = self._scan()
        self.backwards += 1

    def clear(self) -> None:
        """The gradients are gone."""
        self.backwards, self._found = 0, None

    def first(self) -> str:
        """The earliest backward, and in it the first parameter in order of registration, on any rank, in words.

        A collective; called when the norm said that there is one, with the reduced gradients still there.
        """
        position = self._found or self._scan()
        said = agree(position and [*position, self._names[position[1]]], self.world)
        if not any(said):
            return ALL_FINITE
        backward, _, name = min(filter(None, said))
        found = f" (micro-step {backward} of {max(backward, self.backwards)})" if self.enabled else ""
        return f"the gradient of parameter '{name}' is not finite{found}"

    def _all_finite(self) -> bool:
        totals: dict[torch.device, torch.Tensor] = {}  # gradients may lie in host memory, too
        for unit in self._units:
            for tensor in unit.gradients.tensors():
                total = totals.get(tensor.device)
                if total is None:
                    total = totals[tensor.device] = torch.zeros((), dtype=torch.float64, device=tensor.device)
                sum_squares_into(tensor, total, accumulate=True)
        return all(math.isfinite(total.item()) for total in totals.values())

    def _scan(self) -> tuple[int, int] | None:
        at = 0
        for unit in self._units:
            bad = {name for name, part in unit.gradients.parts() if not torch.isfinite(part).all()}
            for index, spec in enumerate(unit.plan.params):
                if spec.name in bad:
                    return max(1, self.backwards), at + index
            at += len(unit.plan.params)
        return None
