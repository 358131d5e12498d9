"""The optimizers of `deepspeed.ops`: one fused pass over each shard, where the JSON places the state."""

from typing import Any

from zero.optim.fused import FusedOptimizer


class DeepSpeedCPUAdam(FusedOptimizer):
    """Adam, or with `adamw_mode` AdamW."""

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        how = {"bias_correction": bias_correction, "amsgrad": amsgrad, "fp32_optimizer_states": fp32_optimizer_states}
        numbers = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(model_params, "Adam", adam_w_mode=adamw_mode, **numbers, **how)


class FusedAdam(FusedOptimizer):
    """The same with DeepSpeed's arguments for GPUs."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        how = {"bias_correction": bias_correction, "amsgrad": amsgrad, "adam_w_mode": adam_w_mode}
        super().__init__(params, "Adam", lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, **how)


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


class FusedLamb(FusedOptimizer):
    """LAMB; `more`: betas, eps, weight_decay, max_coeff, min_coeff."""

    def __init__(self, params: Any, lr: float = 1e-3, bias_correction: bool = True, **more: Any) -> None:
        if more.pop("max_grad_norm", 0.0):
            raise ValueError("FusedLamb(max_grad_norm=...): set gradient_clipping in the JSON instead")
        super().__init__(params, "Lamb", lr=lr, bias_correction=bias_correction, **more)


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
