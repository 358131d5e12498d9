"""What is alive in this process, as the garbage collector knows it."""

from __future__ import annotations

import contextlib
import gc
import time
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import torch


class Alive(NamedTuple):
    """Tensors, the bytes of their storages (each counted once), our objects by class, and all tracked objects."""

    tensors: int
    nbytes: int
    ours: dict[str, int]
    objects: int


@contextlib.contextmanager
def only_new() -> Iterator[None]:
    """Inside, `alive` sees what was made inside, and is fast: torch alone keeps hundreds of thousands of objects."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def alive() -> Alive:
    """Collect garbage, then count, until nothing goes away any more."""
    # A thread of gloo lets go of the last message's buffer a moment after the message has arrived.
    found = _count()
    for _ in range(3):
        time.sleep(0.02)
        found = min(found, _count(), key=lambda count: (count.nbytes, count.tensors, count.objects))
    return found


def _count() -> Alive:
    gc.collect()
    objects = gc.get_objects()
    tensors = [item for item in objects if issubclass(type(item), torch.Tensor)]
    storages = {}
    for tensor in tensors:
        with torch._C.DisableTorchFunctionSubclass():
            storage = tensor.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    ours = Counter(
        f"{type(item).__module__}.{type(item).__qualname__}"
        for item in objects
        if str(getattr(type(item), "__module__", "")).startswith("zero.")
    )
    return Alive(len(tensors), sum(storages.values()), dict(ours), len(objects))
