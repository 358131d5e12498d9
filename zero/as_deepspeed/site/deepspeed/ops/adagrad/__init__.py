"""Adagrad: one fused pass over each shard."""

from typing import Any

from deepspeed._names import finder
from zero.optim.client import FusedOptimizer

__getattr__ = finder(__name__, {})


class DeepSpeedCPUAdagrad(FusedOptimizer):
    """Adagrad."""

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
    ) -> None:
        super().__init__(model_params, "Adagrad", lr=lr, eps=eps, weight_decay=weight_decay)
