"""Parameter groups of a model without DeepSpeed's experts, which are not here."""

from typing import Any

import torch

from deepspeed._names import finder

__getattr__ = finder(__name__, {})


def is_moe_param(param: torch.Tensor) -> bool:
    """Whether DeepSpeed's expert parallelism has marked the parameter as one of an expert."""
    return not getattr(param, "allreduce", True)


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: dict[str, Any] | tuple[dict[str, Any], ...] | list[dict[str, Any]],
    max_group_size: float = 178956971,
) -> list[dict[str, Any]]:
    """The groups as they are, in a list; ValueError where one has a parameter of such an expert."""
    groups = [param_groups] if isinstance(param_groups, dict) else list(param_groups)
    if marked := [tuple(param.shape) for group in groups for param in group["params"] if is_moe_param(param)]:
        raise ValueError(
            f"parameters of shapes {marked} are of experts (allreduce is False), and expert parallelism is not in zero "
            "yet; leave the mark away, and every rank trains every expert"
        )
    return groups
