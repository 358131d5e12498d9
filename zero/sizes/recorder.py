"""Watches operators run on the meta device: their FLOPs, and when which storage lives."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop, sdpa_flop, shape_wrapper

from zero.core.torch_private import storage_id

aten = torch.ops.aten
_ATTENTION, _DROPOUT = F.scaled_dot_product_attention, F.dropout


FORMULAS: Mapping[Any, Callable[..., int]] = {
    # Tensors come in the order of the kernels for GPUs.
    aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *args, **kwargs: sdpa_flop(q, k, v),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        lambda grad, q, k, v, *args, **kwargs: sdpa_backward_flop(grad, q, k, v)
    ),
    # Rows, or what is summed over, is cut into groups, each with a matrix of its own.
    aten._grouped_mm: shape_wrapper(
        lambda one, other, *args, **kwargs: 2 * math.prod(one if len(other) == 3 else one[-2:]) * other[-1]
    ),
}
"""What torch's counter lacks: attention on the CPU, and products of experts; `custom_mapping` for FlopCounterMode."""


class OperatorRecorder(TorchDispatchMode):
    """Inside the block: the FLOPs of the operators that run, and every storage that they make.

    flops:  of all, as torch.utils.flop_counter counts them;
    made:   how many storages there were; each has its number, in order;
    paused: whether nothing is noted now.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0
        self.made = 0
        self.paused = False
        self._numbers: dict[int, int] = {}  # address of a storage that lives -> its number
        self._sizes: dict[int, int] = {}  # number -> bytes
        self._events: list[tuple[int, int]] = []  # number, and bytes that come or go
        self._ignored: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator and note it."""
        kwargs = kwargs or {}
        if self.paused:
            return func(*args, **kwargs)
        for tensor in _tensors((args, kwargs)):
            self._note(tensor, 0)  # made before the block
        out = func(*args, **kwargs)
        for tensor in _tensors(out):
            self._note(tensor, tensor.untyped_storage().nbytes())
        packet = func._overloadpacket
        if packet in FORMULAS:
            self.flops += FORMULAS[packet](*args, **kwargs)
        elif packet in flop_registry:
            self.flops += flop_registry[packet](*args, **kwargs, out_val=out)
        return out

    def _note(self, tensor: torch.Tensor, nbytes: int) -> None:
        address = storage_id(tensor)
        if address in self._numbers:
            return
        number = self._numbers[address] = self.made
        self.made += 1
        self._sizes[number] = nbytes
        self._events.append((number, nbytes))
        weakref.finalize(tensor.untyped_storage(), self._forget, address).atexit = False

    def _forget(self, address: int) -> None:
        number = self._numbers.pop(address)
        self._events.append((number, -self._sizes[number]))

    def number(self, tensor: torch.Tensor) -> int | None:
        """Of its storage; None where no operator has seen it."""
        return self._numbers.get(storage_id(tensor))

    def nbytes(self, number: int) -> int:
        """Of this storage, 0 where it was made before the block."""
        return self._sizes[number]

    def ignore(self, tensor: torch.Tensor) -> None:
        """Do not count its storage in `peak`, not even for the time before."""
        if (number := self.number(tensor)) is not None:
            self._ignored.add(number)

    def alive(self) -> set[int]:
        """The storages made inside that live now."""
        return {number for number in self._numbers.values() if self._sizes[number]}

    def peak(self, first: int = 0) -> int:
        """The most bytes alive at any time, of storages from this number on."""
        now = highest = 0
        for number, change in self._events:
            if number >= first and number not in self._ignored:
                now += change
                highest = max(highest, now)
        return highest


def _tensors(values: Any) -> Iterable[torch.Tensor]:
    return (leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided)


class DeviceKernels(TorchFunctionMode):
    """Has the meta device run what "cuda" or "cpu" would, where functions of torch choose a kernel by the device.

    That is scaled dot-product attention, whose plain form would keep scores, by the conditions of torch's sdp_utils;
    and on a GPU dropout, whose mask takes a byte an element, and RMS norm, which is one kernel there. A model that asks
    whether all values are so is told yes, and no where it asks whether any is: as with whole samples, of which nothing
    is padded.
    """

    def __init__(self, device: str) -> None:
        super().__init__()
        self._gpu = device == "cuda"

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func`, or what the device has in its place."""
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward:
            with self._patched():  # it calls the others where no mode sees them
                return func(*args, **kwargs)
        if func is _ATTENTION:
            return self._attention(*args, **kwargs)
        if func is _DROPOUT and self._gpu:
            return _dropout(*args, **kwargs)
        if func is F.rms_norm and self._gpu:
            return _rms_norm(*args, **kwargs)
        if func is torch.Tensor.__bool__ and hasattr(args[0], "zero_answer"):
            return args[0].zero_answer
        out = func(*args, **kwargs)
        if func in (torch.all, torch.Tensor.all, torch.any, torch.Tensor.any) and out.is_meta:
            out.zero_answer = func in (torch.all, torch.Tensor.all)
        return out

    def around(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """The forward with these, also in a recomputation, which does not see what surrounds the backward."""

        def run(*args: Any, **kwargs: Any) -> Any:
            with self:
                return forward(*args, **kwargs)

        return run

    @contextmanager
    def _patched(self) -> Iterator[None]:
        F.scaled_dot_product_attention, F.dropout = self._attention, _dropout if self._gpu else _DROPOUT
        try:
            yield
        finally:
            F.scaled_dot_product_attention, F.dropout = _ATTENTION, _DROPOUT

    def _attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        parts = query, key, value
        if attn_mask is not None and attn_mask.dtype is torch.bool:
            attn_mask = torch.where(attn_mask, 0.0, float("-inf")).to(query.dtype)
        fused = query.dim() == 4 and query.shape[-1] == value.shape[-1]
        half = query.dtype in (torch.bfloat16, torch.float16)
        grouped = query.shape[1] != key.shape[1]
        if fused and self._gpu and half and attn_mask is None and query.shape[-1] <= 256:
            return aten._scaled_dot_product_flash_attention(*parts, dropout_p, is_causal, False, scale=scale)[0]
        if fused and self._gpu and not grouped:
            if attn_mask is not None:
                attn_mask = attn_mask.expand(*query.shape[:3], key.shape[2])
            kernel = aten._scaled_dot_product_efficient_attention
            return kernel(*parts, attn_mask, True, dropout_p, is_causal, scale=scale)[0]
        if fused and not self._gpu and dropout_p == 0.0:
            kernel = aten._scaled_dot_product_flash_attention_for_cpu
            return kernel(*parts, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]
        return _ATTENTION(*parts, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)


def _dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    if training and 0 < p < 1 and not inplace:
        return torch.native_dropout(input, p, True)[0]
    return _DROPOUT(input, p, training, inplace)


def _rms_norm(input: torch.Tensor, shape: Sequence[int], weight: Any = None, eps: float | None = None) -> torch.Tensor:
    # The meta device takes the fused kernel apart; a layer norm keeps the same, and a mean for each token.
    return torch.native_layer_norm(input, shape, weight, None, eps or 1e-6)[0]
