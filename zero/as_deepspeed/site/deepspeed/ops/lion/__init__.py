"""Lion: one fused pass over each shard."""

from typing import Any

from deepspeed._names import finder
from zero.optim.client import FusedOptimizer

__getattr__ = finder(__name__, {})


class DeepSpeedCPULion(FusedOptimizer):
    """Lion."""

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        fp32_optimizer_states: bool = True,
    ) -> None:
        super().__init__(model_params, "Lion", lr=lr, betas=betas, weight_decay=weight_decay)


FusedLion = DeepSpeedCPULion
