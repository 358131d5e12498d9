"""A device in the place of a GPU: tensors on it lie in main memory, but say that they do not, and work in a stream.

As on a GPU, what lies on the device and what lies on the host do not mix, the host waits where it looks at device
memory, and a message that was waited for is there for work that the device does later, not for the host. Which tensors
are on the device is known by their storages, so that views, backward and `torch.empty(device=...)` need no help.

It needs no compiler, and sees who waits for what; the "cuda:0" of cuda_emulation/ is one for torch's C++, too.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch
from cuda_emulation.site.torch_cuda import Event, Stream, functions
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

import zero
from zero.kernels import cuda, native

PRODUCT = f"{Path(zero.__file__).parent}/"  # a clone may be called zero, too
DEVICE = torch.device("cuda", 0)
_COPIES = ("aten::copy_", "aten::_to_copy", "aten::index.Tensor", "aten::index_put_", "aten::lift_fresh")
_READS = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select")  # their results lie on the host


class Message(Protocol):
    """Something on its way that reads `sources` and writes `targets`, tensors on the device.

    `ordered`: the device's stream waits for it; `done`: it has ended.
    """

    sources: list[torch.Tensor]
    targets: list[torch.Tensor]
    ordered: bool
    done: threading.Event

    def land(self) -> None:
        """Wait until it is there and write the targets; AssertionError where no stream waits for it."""


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage:
    """Also of a released parameter."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.untyped_storage()


class StandInEvent(Event):
    """Passed when all is there that the stream of the device waited for when it was recorded."""

    of: StandIn

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.of.events += 1

    def record(self, stream: Any = None) -> None:
        super().record(stream)
        self._messages = [message for message in self.of.on_way if message.ordered]

    def query(self) -> bool:
        return all(message.done.is_set() for message in self._messages)

    def synchronize(self) -> None:
        self.of.waits("synchronize")
        for message in self._messages:
            message.done.wait()


class _OnHost:
    """What of `zero._cuda` an engine calls, by the host's kernels."""

    def __init__(self) -> None:
        self._host = native.load()

    def step(self, formula, count, grad_scale, scale_address, shard, device, stream) -> None:
        scale = ctypes.c_double.from_address(scale_address).value if scale_address else grad_scale
        if not math.isnan(scale):
            self._host.step(formula, count, scale, shard, 1)

    def sum_squares(self, x, dtype, numel, scratch, out, accumulate, device, stream) -> None:
        there = ctypes.c_double.from_address(out)
        there.value = (there.value if accumulate else 0.0) + self._host.sum_squares(x, dtype, numel, 1)

    def sum_rows(self, first, stride, rows, *arguments) -> None:
        self._host.sum_rows([first + row * stride for row in range(rows)], *arguments[:-2], 1)

    def encode(self, *arguments) -> None:
        self._host.encode(*arguments[:-2], 1)

    def pack(self, *arguments) -> None:
        self._host.pack(*arguments[:-2], 1)


class StandIn:
    """Inside, torch.cuda has it, on this thread, and the kernels of zero run on it.

    on_way: messages that have not landed; waited: where in the product the host waited for the device; launches: of
    our kernels; events: that were made. A class that derives from it learns of what is done there: `taken`,
    `computed`, `read`, `keep`, `begun`, `ordered`.
    """

    stream_class, event_class = Stream, StandInEvent
    kernels: type | None = _OnHost  # None: zero has none for this device

    def __init__(self) -> None:
        self._marks: dict[int, StorageWeakRef] = {}  # while one is there, no other storage has its place
        self.on_way: list[Message] = []
        self.waited: list[str] = []
        self.launches = self.events = 0
        self.here = threading.local()  # `made_on`: whether what this thread makes now is on the device, if it was said
        self._modes = _Names(self), _Kernels(self)
        self._patch = pytest.MonkeyPatch()

    def __enter__(self) -> StandIn:
        event = type("Event", (self.event_class,), {"of": self})
        for name, value in functions(type("Stream", (self.stream_class,), {"of": self, "event": event})).items():
            self._patch.setattr(torch.cuda, name, value)
        compiled = self.kernels and self.kernels()
        self._patch.setattr(cuda, "kernels", lambda device: compiled if device.type == "cuda" else None)
        self._patch.setattr(cuda, "launch", self._launch)
        self._patch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: self.keep(tensor, stream))

        def in_names(call: Callable[..., Any]) -> Callable[..., Any]:  # what torch calls outside of the mode
            def named(*args: Any, **kwargs: Any) -> Any:
                with self._modes[0]:
                    return call(*args, **kwargs)

            return named

        def hooks(this: Any, pack: Any, unpack: Any, made: Any = saved_tensors_hooks.__init__) -> None:
            made(this, in_names(pack), in_names(unpack))

        self._patch.setattr(torch.autograd, "_engine_run_backward", in_names(torch.autograd._engine_run_backward))
        self._patch.setattr(saved_tensors_hooks, "__init__", hooks)
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*error)
        self._patch.undo()

    @contextlib.contextmanager
    def on_this_thread(self) -> Iterator[None]:
        """Inside, another thread than the one that entered has the device, too."""
        with _Names(self), _Kernels(self):
            yield

    def taken(self, tensor: torch.Tensor) -> None:
        """Memory was taken for a tensor on the device."""

    def computed(self, func: Any, args: Any, kwargs: Any, out: Any, writes: list[torch.Tensor], blocks: bool) -> None:
        """An operator of torch was called; `blocks`: it copies between host and device, and returns when it is done."""

    def keep(self, tensor: torch.Tensor, stream: Any) -> None:
        """In place of `Tensor.record_stream`."""

    def begun(self, message: Message) -> None:
        """Something was sent, or is to be received."""

    def ordered(self, message: Message) -> None:
        """The current stream waits for it from now on."""

    def read(self, tensor: torch.Tensor) -> None:
        """Before the host has a list of a tensor's numbers, wherever it lies."""
        if self.holds(tensor):
            self.waits("tolist")
            self.touch(tensor, False)

    def _launch(self, call: Callable[..., None], device: torch.device, *arguments: Any) -> None:
        self.launches += 1
        for message in [*self.on_way]:  # of all that the stream waits for, since addresses say nothing
            if message.ordered:
                self.land(message)
        call(*arguments, 0, 0)

    def waits(self, what: str) -> None:
        """The host waits for the device, here."""
        frames = [each for each in traceback.extract_stack() if each.filename.startswith(PRODUCT)]
        frames = [each for each in frames if not each.filename.endswith("memory/streams.py")]
        if frames:  # else it is the test that looks
            self.waited.append(f"{what} in {frames[-1].filename.removeprefix(PRODUCT)}, {frames[-1].name}")

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is on the device."""
        return storage_of(tensor)._cdata in self._marks

    def mark(self, tensor: torch.Tensor, there: bool = True) -> None:
        """The tensor is on the device, or is not."""
        storage = storage_of(tensor)
        if not there:
            self._marks.pop(storage._cdata, None)
        elif storage._cdata not in self._marks:
            self._marks[storage._cdata] = StorageWeakRef(storage)
            self.taken(tensor)

    def touch(self, tensor: torch.Tensor, writes: bool) -> None:
        """The device works on this memory now: what was sent there lands first."""
        place = storage_of(tensor)._cdata
        for message in [*self.on_way]:
            used = [*message.targets, *(message.sources if writes else ())]
            if any(storage_of(each)._cdata == place for each in used):
                self.land(message)

    def land(self, message: Message) -> None:
        """What was sent is there."""
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
        if func in (torch.Tensor.is_cpu.__get__, torch.Tensor.is_cuda.__get__):
            return device.holds(args[0]) == (func == torch.Tensor.is_cuda.__get__)
        if func in (torch.Tensor.to, torch.Tensor.cpu):
            return self._to(*args, **kwargs) if func is torch.Tensor.to else self._to(args[0], "cpu")
        if func is torch.Tensor.numpy and device.holds(args[0]):
            raise TypeError("can't convert a tensor on the device to numpy; use .cpu() first")
        if func is torch.Tensor.tolist:
            device.read(args[0])
        kwargs.pop("pin_memory", None)
        place = kwargs.get("device")
        if place is None:
            return func(*args, **kwargs)
        return self._made(torch.device(place).type == DEVICE.type, func, *args, **kwargs | {"device": "cpu"})

    def _made(self, there: bool, func: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        self._device.here.made_on = there
        try:
            out = func(*args, **kwargs)
        finally:
            self._device.here.made_on = None
        self._device.mark(out, there)
        return out

    def _to(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        copy, beside = kwargs.pop("copy", False), kwargs.get("non_blocking", False)
        if args and isinstance(args[0], torch.Tensor):
            there, dtype, shape = self._device.holds(args[0]), args[0].dtype, None
        else:
            place, dtype, beside, shape = torch._C._nn._parse_to(*args, **kwargs)
            there = self._device.holds(tensor) if place is None else place.type == DEVICE.type
        more = {"copy": copy, "non_blocking": beside} | ({} if shape is None else {"memory_format": shape})
        dtype = dtype or tensor.dtype
        if there == self._device.holds(tensor):
            return tensor.to(dtype, **more)
        return self._made(there, tensor.to, dtype, **more | {"copy": True})


class _Kernels(TorchDispatchMode):
    """What is computed: on one side only, after what was sent to it, with results on that side."""

    def __init__(self, device: StandIn) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        device, kwargs = self._device, kwargs or {}
        tensors = [each for each in tree_leaves((args, kwargs)) if torch.is_tensor(each)]
        there = [device.holds(each) for each in tensors]
        name, said = func.name(), getattr(device.here, "made_on", None)
        made_on = any(there) if said is None else said
        if any(there) and not name.startswith(_COPIES):
            host = [each for each, on in zip(tensors, there, strict=True) if not on and each.dim()]
            if host:
                raise RuntimeError(f"{name}: expected all tensors to be on the same device, but some are on cpu")
        written = [each for each in self._written(func, args, kwargs) if torch.is_tensor(each)]
        if not func.is_view and name != "aten::detach":
            for each in tensors:
                device.touch(each, any(each is one for one in written))
        blocks = self._blocks(name, there, made_on, args, kwargs)
        if (blocks and there[-1]) or (any(there) and name.split("::")[1].split(".")[0] in _READS):
            device.waits(name)
        out = func(*args, **kwargs)
        if made_on and not written:
            for each in tree_leaves(out):
                if torch.is_tensor(each):
                    device.mark(each)
        device.computed(func, args, kwargs, out, written, blocks)
        return out

    @staticmethod
    def _blocks(name: str, there: list[bool], made_on: bool, args: Any, kwargs: Any) -> bool:
        """Whether it is a copy between the two memories for which the host waits."""
        beside = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
        crosses = there in ([True, False], [False, True]) if name == "aten::copy_" else there == [not made_on]
        return crosses and not beside and name.startswith(("aten::copy_", "aten::_to_copy"))

    @staticmethod
    def _written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
        values = zip(func._schema.arguments, args, strict=False)
        pairs = [*values, *((each, kwargs[each.name]) for each in func._schema.arguments if each.name in kwargs)]
        return tree_leaves([value for each, value in pairs if each.alias_info and each.alias_info.is_write])
