"""The promise: a model is built in the memory of a shard and a module, and an engine takes it over in a few units.

And pretrained weights come into it without a copy of the model on any rank.
"""

from __future__ import annotations

import gc
import weakref
from json import dumps
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # which a dispatch mode imports on first use: a census would go through all its objects each time
import torch.distributed as dist
from ranks import Pool
from safetensors.torch import save_file
from sampled_memory import MIB, SLACK, Sampled
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

import zero

WIDTH = 2048
FEW = 10  # layers of the small model that an engine takes over


def json(world: int, stage: int, optimizer: str, **more: Any) -> dict[str, Any]:
    sizes = {"train_batch_size": world, "zero_optimization": {"stage": stage}}
    return {**sizes, "optimizer": {"type": optimizer, "params": {"lr": 0.1}}, **more}


def largest_unit(engine: Any) -> int:
    """Elements of the largest unit."""
    return max(unit.numel for unit in engine.describe().units)


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


@pytest.mark.ranks(4)
def test_memory_while_an_engine_takes_the_model_over():
    with zero.Init():
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(FEW)))
    with Peak() as peak:
        engine, *_ = zero.initialize(model=model, config=json(4, 3, "SGD"))
    gc.unfreeze()
    largest = largest_unit(engine) * 4
    assert largest < peak.growth <= 2.1 * largest  # the unit's buffer, and one parameter of it whole
    engine.destroy()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [0, 3])
def test_memory_while_a_model_becomes_16_bit(stage):
    """Elements of the largest unit of a model that was built plainly, and the growth of the peak by `initialize`."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False)))
    with Peak(least=1 << 20) as peak:
        engine, *_ = zero.initialize(model=model, config=json(2, stage, "AdamW", bf16={"enabled": True}))
    largest = largest_unit(engine)
    gc.unfreeze()
    engine.destroy()
    chunk = 6 << 20  # bytes of 2^20 elements on their way between ranks, and of what rounding works on
    kept = 4 if stage == 0 else 3  # bytes of an element: bf16 and remainder; of the latter a half where it is cut
    assert largest > 4e6
    assert kept * largest <= peak.growth <= kept * largest + chunk + largest // 100


class Square(nn.Linear):
    """A matrix that is cheap to make."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)


def squares(width: int, layers: int) -> nn.Module:
    return nn.Sequential(*(Square(width, width, bias=False) for _ in range(layers)))


def value(layer: int) -> float:
    return 1.0 + layer / 64  # exact in bf16, too


def write(folder: Path, kind: str, width: int, layers: int) -> None:
    """Each layer in a file of its own, and their index."""
    end = "bin" if kind == "torch" else "safetensors"
    names = {f"{layer}.weight": f"pytorch_model-{layer}.{end}" for layer in range(layers)}
    for layer, (name, file) in enumerate(names.items()):
        weight = torch.full((width, width), value(layer), dtype=torch.bfloat16 if kind == "bf16" else torch.float32)
        torch.save({name: weight}, folder / file) if kind == "torch" else save_file({name: weight}, folder / file)
    (folder / f"pytorch_model.{end}.index.json").write_text(dumps({"weight_map": names}))


def is_loaded(model: nn.Module) -> bool:
    good = []
    for layer, child in enumerate(model):
        with zero.GatheredParameters(child.weight):
            good.append(bool((child.weight == value(layer)).all()))
    return all(good)


def loaded(folder: Path, width: int, layers: int) -> dict[str, int]:
    """Growth by building and loading, and by loading once more into an engine that has taken the module over."""
    with Sampled() as built:
        with zero.Init():
            model = squares(width, layers)
        zero.load_weights(model, folder)
    assert is_loaded(model)
    engine, *_ = zero.initialize(model=model, config=json(dist.get_world_size(), 3, "SGD"))
    with zero.GatheredParameters(model[0].weight, modifier_rank=0), torch.no_grad():
        model[0].weight.zero_()
    with Sampled() as again:
        zero.load_weights(engine, folder)
    assert is_loaded(model)
    engine.destroy()
    return {"build and load": built.growth, "load": again.growth}


@pytest.mark.parametrize(
    ("kind", "world", "width", "layers"),
    [("fp32", 2, 2048, 20), ("torch", 4, 2048, 20)],
)
@pytest.mark.long
def test_building_and_loading_takes_a_shard_and_a_unit(
    tmp_path: Path, kind: str, world: int, width: int, layers: int
) -> None:
    """Of private memory (RssAnon, sampled): pages of mapped files are the system's."""
    unit = width * width * 4
    model, shard = layers * unit, layers * unit // world
    limit = shard + unit + SLACK
    assert limit < 0.8 * model, "a whole copy would pass"
    write(tmp_path, kind, width, layers)
    ranks = Pool(world)  # of new processes: what others have given back to themselves would not be seen to grow
    found = ranks.run(world, loaded, tmp_path, width, layers)
    ranks.close()
    for growth in found:
        print(kind, world, {name: nbytes // MIB for name, nbytes in growth.items()}, "limit", limit // MIB)
        assert shard < growth["build and load"] <= limit, growth
        assert growth["load"] <= limit, growth
