"""Layers that are cut by hand, in whatever way a test says, and their training, for several tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from device import moved
from scenario import settings
from torch import nn

import zero
from zero.plan.cut import Cut
from zero.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

WAYS = {1: (1, 1), 2: (2, 2), 4: (4, 4), "2 x 2": (4, 2)}  # ranks, and how many of them have parts of one layer
Shapes = Mapping[str, tuple[int, ...]]
Cutting = Callable[[str, tuple[int, ...], int, int], Cut | None]  # (name, shape, part, of), None: it has all of it


def taken(full: torch.Tensor, of: Cut | None) -> torch.Tensor:
    """The local tensor: boxes put together along the first dim."""
    return full.clone() if of is None else torch.cat([full[box.slices] for box in of.boxes]).contiguous()


def values(shapes: Shapes, name: str, seed: int = 0) -> torch.Tensor:
    """Whole values of a layer; those of seed 0 are its first ones."""
    return torch.randn(shapes[name], generator=torch.Generator().manual_seed(seed + sorted(shapes).index(name)))


def factors(shapes: Shapes, name: str, number: int) -> torch.Tensor:
    """What a layer is multiplied by in a micro-batch."""
    return values(shapes, name, 100 + 100 * number)


class Layers(nn.Module):
    """Parameters of which each element has a loss of its own, so that no sum depends on how they are cut.

    Products and differences only: a CPU may compute other functions otherwise at the end of a tensor.
    """

    def __init__(self, shapes: Shapes, cut: Cutting, part: int = 0, of: int = 1) -> None:
        super().__init__()
        self.shapes = shapes
        self.cuts = {name: cut(name, shape, part, of) for name, shape in shapes.items()}
        for name, each in self.cuts.items():
            param = nn.Parameter(taken(values(shapes, name), each))
            if name == "filter":
                param.use_muon = True
            if each is not None:
                zero.set_cut(param, each)
            self.register_parameter(name, param)

    def forward(self, number: int) -> torch.Tensor:
        found = []
        for name, each in self.cuts.items():
            param, factor = getattr(self, name), taken(factors(self.shapes, name, number), each)
            found.append((param * factor.to(param.device) - 1).square().sum().float())
        return torch.stack(found).sum()


def engine_of(way: Any, json: dict[str, Any], shapes: Shapes, cut: Cutting) -> Any:
    world, of = WAYS[way]
    mesh = {"mesh_param": {"dp_shard" if json["stage"] else "dp_replicate": world // of, "tp": of}} if of > 1 else {}
    model = Layers(shapes, cut, dist.get_rank() % of, of)
    return zero.initialize(model=model, config=settings(json, world // of), **mesh)[0]


def trained(engine: Any, numbers: range, load: str = "", save: str = "") -> tuple[list[float], dict[str, torch.Tensor]]:
    """Norms of some steps, and whole values and states behind them; ends the engine."""
    norms, found = [], {}
    if load:
        engine.load_checkpoint(load)
    for number in numbers:
        engine.backward(engine(number))
        engine.step()
        norms.append(engine.get_global_grad_norm())
    if save:
        engine.save_checkpoint(save)
    names = {param: name for name, param in engine.module.named_parameters()}
    for group in engine.optimizer.param_groups:
        for param in group["params"]:
            found[names[param]] = safe_get_full_fp32_param(param)
            for key in ("momentum_buffer",) if group.get("use_muon") else ("exp_avg", "exp_avg_sq"):
                found[f"{key} of {names[param]}"] = safe_get_full_optimizer_state(param, key)
    engine.destroy()
    return norms, moved(found, torch.device("cpu"))
