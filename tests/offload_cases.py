"""Places off the device, and engines that use them, for several tests."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import zero.core.offload

CPU = {"device": "cpu"}
GPU = {"device": "cpu", "zero": {"update": "gpu"}}
OPTIMIZER = {"offload_optimizer": CPU}
HALF = {"offload_optimizer": {**CPU, "ratio": 0.5}}
PARAMS = {"offload_param": CPU}
BOTH = {**OPTIMIZER, **PARAMS}


@contextlib.contextmanager
def as_on_a_gpu(wanted: bool = True) -> Iterator[None]:
    """Engines made inside copy between two memories, as with a GPU, though both are the host's."""
    with pytest.MonkeyPatch.context() as patch:
        if wanted:
            patch.setattr(zero.core.offload, "has_own_memory", lambda device: True)
        yield


def slow_down(engine: Any) -> None:
    """Have each update of the host take its time, so that what does not wait for it is too early."""
    if engine.optimizer.host_threads:
        update = engine.optimizer.shard_optimizer.update

        def slow(*args: Any, **kwargs: Any) -> None:
            time.sleep(0.004)
            update(*args, **kwargs)

        engine.optimizer.shard_optimizer.update = slow


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    """Whether all are equal, bit by bit but for NaN."""
    pairs = zip(one, other, strict=True)
    return all(torch.equal(torch.nan_to_num(a, 7.0), torch.nan_to_num(b, 7.0)) for a, b in pairs)
