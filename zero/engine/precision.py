"""Forward and loss in 16 bits: inputs that are cast, torch.autocast on or off, the loss scale."""

from __future__ import annotations

import contextlib
import logging
import re
from typing import Any

import torch
from torch import nn

from zero.config import Config
from zero.core.micro_batches import Weight, weighted
from zero.core.mixed_precision import DTYPES
from zero.core.reducer import Reducer
from zero.core.tensors import map_leaves
from zero.log import log_once
from zero.optim.scaler import LossScaler

_MIXED = re.compile(r"dtype|scalar type|should be the same|[Pp]romot")  # of torch's messages about two dtypes


class Precision:
    """The context of the module's forward: `fp16.auto_cast` and `torch_autocast` of the JSON.

    Without `torch_autocast` the dtypes are those of the module, so an autocast of the caller is switched off inside.
    """

    def __init__(self, config: Config, device: torch.device) -> None:
        self._autocast = None if config.autocast_dtype is None else DTYPES[config.autocast_dtype]
        self._inputs = torch.float16 if config.fp16.enabled and config.fp16.auto_cast else None
        self._device = device.type
        self._computes = config.compute_dtype

    def mixed(self, error: BaseException, module: nn.Module) -> str | None:
        """Advice for an error of torch that two dtypes met, where the module has buffers of another; or None."""
        if self._computes == "fp32" or type(error) is not RuntimeError or not _MIXED.search(str(error)):
            return None
        others = {name: buffer.dtype for name, buffer in module.named_buffers() if buffer.is_floating_point()}
        others = {name: dtype for name, dtype in others.items() if dtype != DTYPES[self._computes]}
        if not others:
            return None
        some = ", ".join(f"'{name}' ({dtype})" for name, dtype in list(others.items())[:8])
        return (
            f"{error}. Parameters are {self._computes} here, and these buffers of the module are not: {some}"
            f"{', ...' if len(others) > 8 else ''}. If one of them met a parameter, set data_types.buffer_dtype to "
            f'"{self._computes}" in the JSON; else look at the dtypes of the inputs'
        )

    def forward(self) -> contextlib.AbstractContextManager[Any]:
        """Around one forward."""
        if self._autocast is not None:
            # No cache: it would keep a cast copy of every weight, also of those that are released after their use.
            return torch.autocast(self._device, self._autocast, cache_enabled=False)
        if not torch.is_autocast_enabled(self._device):
            return contextlib.nullcontext()
        log_once(
            logging.WARNING,
            "torch.autocast around the engine is switched off inside it; "
            "set torch_autocast.enabled to true in the JSON to have it",
        )
        return torch.autocast(self._device, enabled=False)

    def cast(self, inputs: Any) -> Any:
        """The inputs of a forward as the module wants them."""

        def cast(leaf: Any) -> Any:
            return leaf.to(self._inputs) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf

        return inputs if self._inputs is None else map_leaves(inputs, cast)


def make_loss_scaler(config: Config) -> LossScaler:
    """The loss scale that the section `fp16` describes; 1 for ever where nothing runs in fp16."""
    if not config.scales_loss:
        return LossScaler()
    fixed, weighs = config.fp16.loss_scale, config.zero.mean == "tokens"
    return LossScaler(fixed, weighs=weighs) if fixed > 0 else LossScaler(rule=config.fp16, weighs=weighs)


def check_loss(caller: str, loss: Any) -> None:
    """Raise ValueError unless `loss` is a scalar tensor with a graph, and not one that is scaled already."""
    if isinstance(loss, torch.Tensor) and loss.numel() == 1 and loss.requires_grad:
        if getattr(loss, "_zero_scaled", False):
            raise ValueError(
                f"{caller} got a loss that engine.scale() has multiplied by the loss scale already; "
                "call backward() of that tensor, or engine.backward() with the loss itself"
            )
        return
    what = type(loss).__name__
    if isinstance(loss, torch.Tensor):
        what = f"shape {tuple(loss.shape)}, requires_grad={loss.requires_grad}"
    raise ValueError(f"{caller} wants the loss, a scalar tensor with a graph; got {what}")


def scaled(loss: torch.Tensor, factor: float, reducer: Reducer, weight: Weight | None = None) -> torch.Tensor:
    """The loss times `factor`, its `weight` and the loss scale; its backward tells the reducer of scale and count.

    An engine knows only of the scale that it gave itself: for a loss through several engines in fp16 call
    `loss.backward()`, so that each scales its own gradients.
    """
    scale = reducer.scale
    product = loss
    if scale != 1.0 or weight is not None:
        product = weighted(loss, scale * factor * (1.0 if weight is None else weight.factor))
    elif factor != 1:
        product = loss * factor
    if weight is not None:
        product.register_hook(lambda grad: reducer.counted(weight.count))
    if scale == 1.0:
        return product
    product._zero_scaled = True
    product.register_hook(lambda grad: reducer.scaled(scale))
    return product
