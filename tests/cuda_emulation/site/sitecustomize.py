"""Gives every process of Python that starts with this folder on its PYTHONPATH the CUDA device of ../device.cpp.

ZERO_STAND_IN is the folder of what `../build.py` compiled. torch.cuda gets what zero and its tests call, no more: one
device, streams on which all is done when it is asked for, and the random numbers of the CPU. The kernels of zero are
the emulated ones.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

NAME = "stand-in for CUDA"


class Event:
    def __init__(self, **options: Any) -> None:
        self.at = 0.0

    def record(self, stream: Stream | None = None) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, end: Event) -> float:
        return 1e3 * (end.at - self.at)

    def query(self) -> bool:
        return True

    def wait(self, stream: Stream | None = None) -> None: ...

    def synchronize(self) -> None: ...


class Stream:
    cuda_stream = 0

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        import torch

        self.device, self.priority = torch.device("cuda", 0), priority

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        return True

    def wait_event(self, event: Event) -> None: ...

    def wait_stream(self, stream: Stream) -> None: ...

    def synchronize(self) -> None: ...


class Device(contextlib.nullcontext):
    """A class, since torch asks whether something is one of these."""


def load_device(folder: Path) -> None:
    """Before torch is imported: it asks once which devices there are."""
    spec = importlib.util.find_spec("torch")
    libraries = Path(spec.origin).parent / "lib"  # type: ignore[union-attr, arg-type]
    for path in (*(libraries / f"lib{name}.so" for name in ("c10", "torch_cpu", "torch")), folder / "device.so"):
        ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)


def emulated_kernels(folder: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("_cuda", folder / "_cuda.so")
    module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    return module


def patch_torch() -> None:
    """Give torch.cuda one device."""
    import torch

    total, streams = 1 << 34, [Stream()]

    @contextlib.contextmanager
    def current(stream: Stream | None) -> Iterator[None]:
        streams.append(stream or streams[-1])
        try:
            yield
        finally:
            streams.pop()

    def always(value: Any) -> Callable[..., Any]:  # each a function of its own, as torch._dynamo wants
        return lambda *args, **kwargs: value

    yes = ("is_available", "is_initialized", "is_bf16_supported")
    done = ("_lazy_init", "init", "synchronize", "empty_cache", "set_device", "reset_peak_memory_stats")
    done += ("manual_seed", "manual_seed_all", "set_per_process_memory_fraction")
    none = ("current_device", "memory_allocated", "max_memory_allocated", "memory_reserved")
    here = {
        **{name: always(True) for name in yes},
        **{name: always(None) for name in done},
        **{name: always(0) for name in none},
        "device_count": always(1),
        "current_stream": lambda device=None: streams[-1],
        "default_stream": always(streams[0]),
        "stream": current,
        "device": Device,
        "Stream": Stream,
        "Event": Event,
        "get_device_name": always(NAME),
        "get_device_capability": always((0, 0)),
        "get_device_properties": always(SimpleNamespace(name=NAME, total_memory=total)),
        "mem_get_info": always((total, total)),
        "default_generators": (torch.default_generator,),
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
    }
    for name, value in here.items():
        setattr(torch.cuda, name, value)

    plain = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, nbytes: int) -> torch.UntypedStorage:
        if not storage.is_cuda:
            return plain(storage, nbytes)
        torch.ops.stand_in.resize_storage(torch.empty(0, dtype=torch.uint8, device="cuda").set_(storage), nbytes)
        return storage

    torch.UntypedStorage.resize_ = resize_
    torch.Tensor.record_stream = always(None)  # the C++ takes none but its own streams


def main() -> None:
    folder = Path(os.environ["ZERO_STAND_IN"])
    load_device(folder)
    patch_torch()
    sys.modules["zero._cuda"] = emulated_kernels(folder)


main()
