"""The promise: pretrained weights come into a model that is cut without a copy of it on any rank.

What grows is private memory (RssAnon, sampled), by a shard, one unit, and what a reader has on its way; pages of mapped
files are the system's.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import Pool
from safetensors.torch import save_file
from sampled_memory import MIB, SLACK, Sampled
from torch import nn

import zero


class Layer(nn.Linear):
    """A square matrix that is cheap to make."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)


def build(width: int, layers: int) -> nn.Module:
    return nn.Sequential(*(Layer(width, width, bias=False) for _ in range(layers)))


def value(layer: int) -> float:
    return 1.0 + layer / 64  # exact in bf16, too


def write(folder: Path, kind: str, width: int, layers: int) -> None:
    """Each layer in a file of its own, and their index."""
    end = "bin" if kind == "torch" else "safetensors"
    names = {f"{layer}.weight": f"pytorch_model-{layer}.{end}" for layer in range(layers)}
    for layer, (name, file) in enumerate(names.items()):
        weight = torch.full((width, width), value(layer), dtype=torch.bfloat16 if kind == "bf16" else torch.float32)
        torch.save({name: weight}, folder / file) if kind == "torch" else save_file({name: weight}, folder / file)
    (folder / f"pytorch_model.{end}.index.json").write_text(json.dumps({"weight_map": names}))


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
            model = build(width, layers)
        zero.load_weights(model, folder)
    assert is_loaded(model)
    settings = {
        "train_batch_size": dist.get_world_size(),
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 3},
    }
    engine, *_ = zero.initialize(model=model, config=settings)
    with zero.GatheredParameters(model[0].weight, modifier_rank=0), torch.no_grad():
        model[0].weight.zero_()
    with Sampled() as again:
        zero.load_weights(engine, folder)
    assert is_loaded(model)
    engine.destroy()
    return {"build and load": built.growth, "load": again.growth}


@pytest.mark.parametrize(
    ("kind", "world", "width", "layers"),
    [("fp32", 2, 2048, 20), *((kind, 4, 4096, 16) for kind in ("fp32", "bf16", "torch"))],
)
@pytest.mark.long
def test_growth_is_a_shard_and_a_unit(tmp_path: Path, kind: str, world: int, width: int, layers: int) -> None:
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
