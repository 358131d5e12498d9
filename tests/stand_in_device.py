"""A device in the place of a GPU: tensors on it lie in main memory, but say that they do not, and work in a stream.

As on a GPU, what lies on the device and what lies on the host do not mix, the host cannot look at device memory but by
a copy, and a message that was waited for is there for work that the device does later, not for the host. Which tensors
are on the device is known by their storages, so that views, backward and `torch.empty(device=...)` need no help.
"""

from __future__ import annotations

import sys
from typing import Any, Protocol

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from zero.core import mesh

DEVICE = torch.device("xpu", 0)
_COPIES = ("aten::copy_", "aten::_to_copy", "aten::index.Tensor", "aten::index_put_", "aten::lift_fresh")


class Message(Protocol):
    """Something on its way that reads `sources` and writes `targets`, tensors on the device."""

    sources: list[torch.Tensor]
    targets: list[torch.Tensor]

    def land(self) -> None:
        """Wait until it is there and write the targets; AssertionError where no stream waits for it."""


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    with torch._C.DisableTorchFunctionSubclass():  # of a released parameter, too
        return tensor.untyped_storage()


class StandIn:
    """Inside, `local_device()` is the stand-in on this thread; `on_way` are messages that have not landed."""

    def __init__(self) -> None:
        self._marks: dict[int, StorageWeakRef] = {}  # while one is there, no other storage has its place
        self.on_way: list[Message] = []
        self._modes = _Names(self), _Kernels(self)
        self._patch = pytest.MonkeyPatch()

    def __enter__(self) -> StandIn:
        for module in [*sys.modules.values()]:
            if getattr(module, "local_device", None) is mesh.local_device and module is not mesh:
                self._patch.setattr(module, "local_device", lambda: DEVICE)
        self._patch.setattr(mesh, "local_device", lambda: DEVICE)
        run_backward = torch.autograd._engine_run_backward  # hooks run in it, outside of the mode

        def in_names(*args: Any, **kwargs: Any) -> Any:
            with self._modes[0]:
                return run_backward(*args, **kwargs)

        self._patch.setattr(torch.autograd, "_engine_run_backward", in_names)
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*error)
        self._patch.undo()

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is on the device."""
        return _storage(tensor)._cdata in self._marks

    def mark(self, tensor: torch.Tensor, there: bool = True) -> None:
        """The tensor is on the device, or is not."""
        storage = _storage(tensor)
        if there:
            self._marks[storage._cdata] = StorageWeakRef(storage)
        else:
            self._marks.pop(storage._cdata, None)

    def touch(self, tensor: torch.Tensor, writes: bool) -> None:
        """The device works on this memory now: what was sent there lands first."""
        place = _storage(tensor)._cdata
        for message in [*self.on_way]:
            used = [*message.targets, *(message.sources if writes else ())]
            if any(_storage(each)._cdata == place for each in used):
                self.on_way.remove(message)
                with _disable_current_modes():
                    message.land()


class _Names(TorchFunctionMode):
    """What scripts call and ask: tensors are made on the device, moved, and say where they are."""

    def __init__(self, device: StandIn) -> None:
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, device = dict(kwargs or {}), self._device
        if func == torch.Tensor.device.__get__:
            return DEVICE if device.holds(args[0]) else func(*args)
        if func == torch.Tensor.is_cpu.__get__:
            return not device.holds(args[0])
        if func in (torch.Tensor.to, torch.Tensor.cpu):
            return self._to(*args, **kwargs) if func is torch.Tensor.to else self._to(args[0], "cpu")
        if func in (torch.Tensor.tolist, torch.Tensor.numpy) and device.holds(args[0]):
            if func is torch.Tensor.numpy:
                raise TypeError("can't convert a tensor on the device to numpy; use .cpu() first")
            device.touch(args[0], False)
        place = kwargs.get("device")
        if place is None:
            return func(*args, **kwargs)
        out = func(*args, **kwargs | {"device": "cpu"})
        device.mark(out, torch.device(place).type == DEVICE.type)
        return out

    def _to(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        copy = kwargs.pop("copy", False)
        if args and isinstance(args[0], torch.Tensor):
            there, dtype, shape = self._device.holds(args[0]), args[0].dtype, None
        else:
            place, dtype, _, shape = torch._C._nn._parse_to(*args, **kwargs)
            there = self._device.holds(tensor) if place is None else place.type == DEVICE.type
        moves = there != self._device.holds(tensor)
        more = {} if shape is None else {"memory_format": shape}
        out = tensor.to(dtype or tensor.dtype, copy=copy or moves, **more)
        if moves:
            self._device.mark(out, there)
        return out


class _Kernels(TorchDispatchMode):
    """What is computed: on one side only, after what was sent to it, with results on that side."""

    def __init__(self, device: StandIn) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        device, tensors = self._device, [each for each in tree_leaves((args, kwargs)) if torch.is_tensor(each)]
        there = [device.holds(each) for each in tensors]
        name = func.name()
        if any(there) and not name.startswith(_COPIES):
            host = [each for each, on in zip(tensors, there, strict=True) if not on and each.dim()]
            if host:
                raise RuntimeError(f"{name}: expected all tensors to be on the same device, but some are on cpu")
        written = self._written(func, args, kwargs or {})
        if not func.is_view and name != "aten::detach":
            for each in tensors:
                device.touch(each, any(each is one for one in written))
        out = func(*args, **kwargs or {})
        if any(there) and not written:
            for each in tree_leaves(out):
                if torch.is_tensor(each):
                    device.mark(each)
        return out

    @staticmethod
    def _written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
        values = zip(func._schema.arguments, args, strict=False)
        pairs = [*values, *((each, kwargs[each.name]) for each in func._schema.arguments if each.name in kwargs)]
        return tree_leaves([value for each, value in pairs if each.alias_info and each.alias_info.is_write])
