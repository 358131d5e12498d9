"""LAMB: a pass for the norms, and a fused one for each parameter of a shard."""

from typing import Any

from deepspeed._names import finder
from zero.optim.client import FusedOptimizer

__getattr__ = finder(__name__, {})


class FusedLamb(FusedOptimizer):
    """LAMB; `more`: betas, eps, weight_decay, max_coeff, min_coeff."""

    def __init__(self, params: Any, lr: float = 1e-3, bias_correction: bool = True, **more: Any) -> None:
        if more.pop("max_grad_norm", 0.0):
            raise ValueError("FusedLamb(max_grad_norm=...): set gradient_clipping in the JSON instead")
        super().__init__(params, "Lamb", lr=lr, bias_correction=bias_correction, **more)
