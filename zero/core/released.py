"""A parameter whose memory is away: true shape and metadata, and a clear error for everything else.

Reading a tensor whose storage was freed crashes the process, so a released parameter shows a NaN scalar
expanded to its shape, and its class is swapped for one that answers questions about metadata only. Autograd
may still hold views of the freed buffer; their version counter, which they share with the parameter, is
moved on at release and set back when the memory is, so that a backward that reaches them too early raises
instead of crashing.

`detach()` and `.data`, and so `state_dict()`, give a placeholder of it, which answers the same questions and has no
values: much code takes a state_dict for its names, shapes and dtypes alone, or splits and joins its tensors before only
one rank saves them, or pads `.data` by nothing and assigns it back.
"""

from __future__ import annotations

import copy
import functools
import logging
import sys
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zero.core.torch_private import without_torch_function
from zero.log import log_once

# Questions about metadata, and new tensors like one.
_QUERIES = frozenset(
    {
        Tensor.__len__,
        Tensor.dim,
        Tensor.element_size,
        Tensor.get_device,
        Tensor.is_complex,
        Tensor.is_floating_point,
        Tensor.ndimension,
        Tensor.nelement,
        Tensor.numel,
        Tensor.size,
        torch.is_complex,
        torch.is_floating_point,
        torch.numel,
        *(torch.empty_like, torch.zeros_like, torch.ones_like, torch.full_like, torch.rand_like, torch.randn_like),
        *(Tensor.new_empty, Tensor.new_zeros, Tensor.new_ones, Tensor.new_full),
        *(
            getattr(Tensor, name).__get__
            for name in (
                *("shape", "dtype", "device", "ndim", "nbytes", "itemsize", "layout", "requires_grad", "is_leaf"),
                *("grad", "grad_fn", "is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized", "names"),
                *("_version", "_backward_hooks", "_post_accumulate_grad_hooks", "output_nr", "retains_grad"),
            )
            if hasattr(Tensor, name)
        ),
    }
)
# What needs no value of a parameter, besides.
_METADATA = _QUERIES | frozenset(
    {
        Tensor.__hash__,
        Tensor.register_hook,
        Tensor.register_post_accumulate_grad_hook,
        Tensor.requires_grad_,
        Tensor.grad.__set__,
        Tensor.grad.__delete__,
        Tensor.requires_grad.__set__,
        Tensor._backward_hooks.__set__,
        Tensor._post_accumulate_grad_hooks.__set__,
    }
)
_DETACH = frozenset({Tensor.detach, torch.detach, Tensor.data.__get__})
_ASSIGN = Tensor.data.__set__
# What puts values elsewhere and reads none: of placeholders, it gives placeholders.
_ARRANGE = frozenset(
    {
        torch.cat,
        torch.stack,
        *(
            getattr(kind, name)
            for name in ("chunk", "permute", "reshape", "split", "squeeze", "transpose", "unbind", "unsqueeze")
            for kind in (torch, Tensor)
        ),
        Tensor.contiguous,
        Tensor.view,
    }
)
_GRAD = Tensor.grad.__get__
UNCLIPPED = (
    "torch.nn.utils.clip_grad_norm_ and the like find no gradients in param.grad and clip nothing, at any stage; set "
    "gradient_clipping in the JSON; engine.get_global_grad_norm() has the norm after step()"
)
"""The advice about torch's functions that clip gradients."""


class Released:
    """Mixed into the class of a released parameter."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer for metadata; raise RuntimeError, naming the parameter, for everything that reads or writes values."""
        if func in _METADATA:
            if func == _GRAD and sys._getframe(1).f_globals.get("__name__") == "torch.nn.utils.clip_grad":
                log_once(logging.WARNING, UNCLIPPED)
            with without_torch_function():
                return func(*args, **(kwargs or {}))
        if func is torch.autograd.grad and not _among((args[0], kwargs), Released):
            return _gradients(*args, **kwargs)
        if func is torch.autograd.backward and not _among((args, {**kwargs, "inputs": None}), Released):
            return func(*args, **{**kwargs, "inputs": _edges(kwargs["inputs"])})
        if func == _ASSIGN and isinstance(args[1], Placeholder) and args[1].has_values_of(args[0]):
            return None
        # At this moment of the step they may be gathered; each parameter that was is a plain one.
        wanted = _among((args, kwargs), Released)
        gathered = bool(wanted) and wanted[0]._zero_owner.ensure_all_gathered(wanted)
        if gathered and not any(isinstance(param, Released) for param in wanted):
            return func(*args, **(kwargs or {}))
        name = wanted[0]._zero_owner.name if wanted else "?"
        away = wanted[0]._zero_owner.unit.absence() if wanted else None
        if away is not None:
            raise RuntimeError(f"parameter '{name}': {away}")
        if func in _DETACH:
            made = Placeholder.of(wanted[0], name, wanted[0].device)
            made.source = weakref.ref(wanted[0]), _version(wanted[0])
            return made
        raise RuntimeError(
            f"parameter '{name}' is released; read it inside zero.GatheredParameters(...), or in a method given to "
            "zero.register_forward_method(module, name); engine.module_state_dict() has the weights whole"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be saved or copied: the values are elsewhere."""
        return self.__torch_function__(Tensor.__reduce_ex__, (type(self),), (self, protocol))

    def __deepcopy__(self, memo: Any) -> Any:
        """Refuse to be copied: the values are elsewhere."""
        return self.__torch_function__(copy.deepcopy, (type(self),), (self, memo))


class NoStorage:
    """A placeholder's storage: an address that is no other one's, for programs that look for tied weights.

    Its methods are those of `torch.UntypedStorage` that read nothing.
    """

    def __init__(self, address: int, nbytes: int) -> None:
        self._address, self._nbytes = address, nbytes

    def data_ptr(self) -> int:
        """A number that tells it from others; there is no memory at it."""
        return self._address

    def nbytes(self) -> int:
        """Bytes of the parameter."""
        return self._nbytes

    size = nbytes


class Placeholder(Tensor):
    """A released parameter, detached: shape [as the parameter], dtype and device, and no values.

    For torch's C++ code it is on the meta device, so there is no memory to read.

    parameter: its name; shown: what questions are answered of;
    source: the parameter, and the version of its values, whose whole this is; None: it is a part, or arranged.
    """

    parameter: str
    shown: Tensor
    source: tuple[weakref.ref[Tensor], int] | None = None

    @classmethod
    def of(cls, like: Tensor, name: str, device: torch.device) -> Placeholder:
        """A placeholder of `like`'s shape and dtype, for the parameter that is called `name`."""
        made = torch.empty(like.shape, dtype=like.dtype, device="meta").as_subclass(cls)
        made.parameter, made.shown = name, absent(like.shape, like.dtype, device)
        return made

    def has_values_of(self, param: Tensor) -> bool:
        """Whether assigning this to the data of `param`, which is released, changes nothing."""
        return self.source is not None and self.source[0]() is param and self.source[1] == _version(param)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer for metadata; raise RuntimeError, naming the parameter, for everything that reads or writes values."""
        first = args[0] if args else None
        if isinstance(first, Placeholder):
            by_nothing = func is torch.nn.functional.pad and not any(args[1])
            if func in _DETACH or by_nothing or (func is Tensor.contiguous and len(args) == 1 and not kwargs):
                return first
            if func is Tensor.untyped_storage:
                return NoStorage(id(first), first.shown.nbytes)
            if func in _QUERIES:
                return func(first.shown, *args[1:], **(kwargs or {}))
        found = _among((args, kwargs), Tensor)
        ours = [each for each in found if isinstance(each, Placeholder)]
        if func in _ARRANGE and len(ours) == len(found):
            with without_torch_function():
                made = func(*args, **(kwargs or {}))
            name, device = ours[0].parameter, ours[0].shown.device
            return cls.of(made, name, device) if isinstance(made, Tensor) else [cls.of(x, name, device) for x in made]
        parameter = ours[0].parameter if ours else "?"
        raise RuntimeError(
            f"parameter '{parameter}' was released when detach(), .data or state_dict() gave this, which has "
            "its shape and dtype and no values; call that inside zero.GatheredParameters(...); "
            "engine.module_state_dict() has the weights whole"
        )

    def __repr__(self) -> str:
        """For debuggers; it reads no values."""
        said = f"shape={tuple(self.shape)}, dtype={self.dtype}, device='{self.device}'"
        return f"<released parameter '{self.parameter}': {said}, no values>"

    def __format__(self, how: str) -> str:
        """As `repr`."""
        return format(repr(self), how)

    def __hash__(self) -> int:
        """As every tensor's."""
        return id(self)


def unsaved(parameter: str) -> None:
    """The constructor that a file names for a parameter that was released when it was saved: it raises RuntimeError."""
    raise RuntimeError(
        f"this file has no values of parameter '{parameter}', which was released when state_dict() was saved; "
        "engine.save_16bit_model() or module_state_dict(), called by all ranks, have the weights whole"
    )


@functools.cache
def released_class(kind: type, mixin: type[Released]) -> type:
    """The class that a parameter of class `kind` has while it is released."""
    name = f"Released{kind.__name__}" if kind is torch.nn.Parameter else kind.__name__  # by which libraries tell theirs
    return type(name, (mixin, kind), {"__module__": __name__, "__doc__": mixin.__doc__})


def read_now(param: Any) -> None:
    """Have a released parameter be gathered, if it can be, for what reads its memory without asking; else raise."""
    param.__torch_function__(Tensor.data_ptr, (type(param),), (param,))


def _version(param: Any) -> int:
    """The version of the values that are away."""
    return param._zero_owner.unit.buffer.versions[param._zero_owner.index]


def _among(values: Any, kind: type) -> list[Any]:
    """The tensors of class `kind` among nested arguments, in order."""
    found, stack = [], [values]
    while stack:
        value = stack.pop()
        if isinstance(value, kind):
            found.append(value)
        elif isinstance(value, dict):
            stack += reversed(list(value.values()))
        elif isinstance(value, (tuple, list)):
            stack += reversed(value)
    return found


def _edges(inputs: Any) -> list[Any]:
    """The inputs of a gradient, with each released parameter as the place where its gradient arrives.

    torch 2.11 hands a single tensor on as it came: taken for a sequence, it would be that of its rows.
    """
    with without_torch_function():
        if isinstance(inputs, (Tensor, torch.autograd.graph.GradientEdge)):
            inputs = [inputs]
        return [torch.autograd.graph.get_gradient_edge(each) if isinstance(each, Released) else each for each in inputs]


def _gradients(
    outputs: Sequence[Any], inputs: Sequence[Any], *, materialize_grads: bool, create_graph: bool, **more: Any
) -> tuple[Any, ...]:
    """`torch.autograd.grad`, where parameters are named only as what to differentiate by; that reads none of them."""
    found = torch.autograd.grad(outputs, _edges(inputs), create_graph=create_graph, **more)
    if not materialize_grads:
        return found
    pairs = zip(found, inputs, strict=True)
    return tuple(torch.zeros_like(by, requires_grad=create_graph) if grad is None else grad for grad, by in pairs)


def absent(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The stand-in for values that are away: of the true shape, with one element of memory."""
    nothing = torch.full((), float("nan") if dtype.is_floating_point else 0, dtype=dtype, device=device)
    return nothing.expand(shape)
