"""The promise: 4 ranks build a model of 400M parameters in the memory of one shard and one module each, with the bits
of a plain construction; and an engine takes it over in one shard and a few units.
"""

from __future__ import annotations

import gc
import hashlib
import weakref
from typing import Any

import pytest
import torch
import torch._dynamo  # which a dispatch mode imports on first use: a census would go through all its objects each time
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

import zero
from zero.core.deferred_param import DeferredParam
from zero.core.owner import owner_of
from zero.core.unit import Unit

WIDTH, LAYERS, RANKS = 4096, 25, 4
LARGEST = WIDTH * WIDTH * 4  # bytes of the largest module, fp32
FEW = 10  # layers of the small model that an engine takes over
LIMIT = 1.1 * (LAYERS * LARGEST / RANKS + LARGEST)


class Layer(nn.Linear):
    """A linear layer whose weights are cheap to make: numbers of its own, some of them random."""

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__(WIDTH, WIDTH, bias=False)

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.weight.fill_(1.0 / (1 + self.number))
            self.weight[::64].normal_()


def build() -> nn.ModuleList:
    torch.manual_seed(3)
    return nn.ModuleList(Layer(number) for number in range(LAYERS))  # built and registered one by one


def digest(values: torch.Tensor) -> str:
    return hashlib.sha1(values.numpy().data).hexdigest()


class Census:
    """Counts the bytes of all storages that tensors of this process hold; fast, as only new objects are looked for."""

    def __init__(self) -> None:
        gc.collect()
        self._old = [weakref.ref(found) for found in self._tensors()]
        gc.freeze()

    def count(self) -> int:
        tensors = [found for reference in self._old if (found := reference()) is not None] + self._tensors()
        with torch._C.DisableTorchFunctionSubclass():
            held = {found.untyped_storage()._cdata: found.untyped_storage().nbytes() for found in tensors}
        return sum(held.values())

    @staticmethod
    def _tensors() -> list[torch.Tensor]:
        found = (found for found in gc.get_objects() if issubclass(type(found), torch.Tensor))
        return [tensor for tensor in found if type(tensor) is not FakeTensor]  # a compiler's, which have no memory


class Peak(TorchDispatchMode):
    """The most bytes that the storages of all tensors had after any operation inside the block, above the start's.

    Not what the system says: it may take pages of a process away that has not touched them for a while. Operations
    that return less than `least` bytes are not looked at.
    """

    def __init__(self, least: int = 0) -> None:
        super().__init__()
        self._least = least
        self._census = Census()
        self._before = self._census.count()
        self.growth = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if not self._least or (isinstance(found, torch.Tensor) and found.nbytes >= self._least):
            self.growth = max(self.growth, self._census.count() - self._before)
        return found


def build_cut() -> tuple[int, list[str]]:
    """The growth of the peak by the construction, and digests of this rank's shards."""
    with Peak() as peak, zero.Init():
        model = build()
    gc.unfreeze()
    return peak.growth, [digest(owner_of(layer.weight).unit.shard) for layer in model]


def build_plain() -> tuple[int, list[list[str]]]:
    """The growth of the peak, and digests of what would be the shards of each rank."""
    with Peak() as peak:
        model = build()
    gc.unfreeze()
    cut = [layer.weight.detach().flatten().chunk(RANKS) for layer in model]
    return peak.growth, [[digest(shards[rank]) for shards in cut] for rank in range(RANKS)]


def take_over() -> tuple[int, int]:
    """Bytes of the largest unit, and the most that `initialize` held at once above what the built model did."""
    with zero.Init():
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(FEW)))
    settings = {
        "train_batch_size": RANKS,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 3},
    }
    census = Census()
    seen, before = [], census.count()

    def noted(call: Any) -> Any:
        return lambda *args: (seen.append(census.count()), call(*args))[1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Unit, "release", noted(Unit.release))
        patch.setattr(DeferredParam, "let_go", noted(DeferredParam.let_go))
        engine, *_ = zero.initialize(model=model, config=settings)
    largest = max(unit.plan.layout.numel * 4 for unit in engine._sharded.units)
    gc.unfreeze()
    assert len(seen) >= 3 * FEW  # a unit and two parameters for each layer
    engine.destroy()
    return largest, max(seen) - before


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [0, 3])
def test_memory_while_a_model_becomes_16_bit(stage):
    """Elements of the largest unit of a model that was built plainly, and the growth of the peak by `initialize`."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Sequential(nn.Linear(WIDTH // 2, WIDTH // 2, bias=False)))
    settings = {
        "train_batch_size": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
    }
    with Peak(least=1 << 20) as peak:
        engine, *_ = zero.initialize(model=model, config=settings)
    largest = max(unit.plan.layout.numel for unit in engine._sharded.units)
    gc.unfreeze()
    engine.destroy()
    chunk = 6 << 20  # bytes of 2^20 elements on their way between ranks, and of what rounding works on
    kept = 4 if stage == 0 else 3  # bytes of an element: bf16 and remainder; of the latter a half where it is cut
    assert largest > 4e6
    assert kept * largest <= peak.growth <= kept * largest + chunk + largest // 100


def test_memory_while_an_engine_takes_the_model_over(pool):
    for largest, most in pool.run(RANKS, take_over):
        assert largest < most <= 2.1 * largest  # the unit's buffer, and one parameter of it whole


@pytest.mark.long
def test_memory_while_building(pool):
    built = pool.run(RANKS, build_cut)
    ((plain, wanted),) = pool.run(1, build_plain)
    assert LAYERS * WIDTH * WIDTH > 400e6
    assert plain > LIMIT, "plain construction would pass, too"
    for growth, digests in built:
        assert growth <= LIMIT, f"{growth / 2**20:.0f} MiB; allowed are {LIMIT / 2**20:.0f}"
        assert growth > LAYERS * LARGEST / RANKS, "less than the shards: the measurement sees too little"
        assert digests == wanted.pop(0)
