"""An optimizer object that a script makes and our kernels run."""

from __future__ import annotations

from typing import Any

import torch

from zero.config.check import optimizer_problems
from zero.config.optimizers import ARGUMENTS, torch_reason
from zero.optim.fused import FusedShardOptimizer


class FusedOptimizer(torch.optim.Optimizer):
    """Parameter groups and hyperparameters for `zero.initialize(optimizer=...)`, which updates shards by our kernels.

        optimizer = zero.FusedOptimizer(model.parameters(), "AdamW", lr=1e-3, zero={"moments": "8bit"})

    It equals the section `optimizer` of the JSON, for programs that must pass an object, on every placement
    (a drive too). It updates nothing by itself. `kind` is Adam, AdamW, Lamb, Lion, SGD or Adagrad; the arguments are
    those of `optimizer.params`, and groups may have their own. Raises ValueError with all errors, by argument.
    """

    def __init__(self, params: Any, kind: str, **arguments: Any) -> None:
        reason = torch_reason(kind, arguments)
        if reason is not None:
            raise ValueError(f"FusedOptimizer(kind={kind!r}): {reason}; give initialize() the class of torch.optim")
        if kind.lower() == "muon":
            raise ValueError(
                f"FusedOptimizer(kind={kind!r}): name it in the section 'optimizer' of the JSON, which chooses the "
                "matrices, or give initialize() a torch.optim.Muon"
            )
        if lines := optimizer_problems(kind, arguments, True, ("FusedOptimizer",)):
            raise ValueError("\n".join(lines))
        self.kind, self.arguments = kind, arguments
        checked = ARGUMENTS[kind.lower()].model_validate(arguments)
        super().__init__(params, FusedShardOptimizer(kind.lower(), checked, "bf16").defaults)

    def step(self, closure: Any = None) -> None:
        """Raise RuntimeError: only the engine's step updates."""
        name = type(self).__name__
        raise RuntimeError(
            f"{name}.step(): it updates nothing itself; give it to zero.initialize(), call engine.step()"
        )
