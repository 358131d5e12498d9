"""Helpers around `torch.save`."""

from typing import Any

import torch

from deepspeed._names import finder

__getattr__ = finder(__name__, {}, refused=("get_model_ckpt_name_for_rank",))


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """`item` with each tensor in nested lists, tuples and dicts copied to `device`.

    `torch.save` writes the whole storage that a tensor is a view of; a copy has one of its own.
    """
    if isinstance(item, torch.Tensor):
        return item.detach().clone().to(device)
    if isinstance(item, dict):
        return type(item)((key, clone_tensors_for_torch_save(value, device)) for key, value in item.items())
    if isinstance(item, (list, tuple)):
        return type(item)(clone_tensors_for_torch_save(value, device) for value in item)
    return item
