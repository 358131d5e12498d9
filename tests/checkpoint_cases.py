"""Configurations that save and load checkpoints, and what an engine holds, for several tests."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from models import WIDE, batch, config, make_net
from offload_cases import as_on_a_gpu
from torch import nn

import zero
from zero.kernels.moments import Moment
from zero.plan.formats import is_compact
from zero.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

MOMENTS = ("exp_avg", "exp_avg_sq")
LEAVES = 4  # micro-batches of a step, however many ranks share them; 3 ranks have a batch of their own

# Precision, form of the masters, format of the moments.
FORMATS = (
    ("fp32", None, "fp32"),
    ("bf16", "remainder", "fp32"),
    ("bf16", "fp32", "bf16"),
    ("bf16", "remainder", "8bit"),
    ("fp16", None, "fp32"),
    ("fp32", None, "8bit"),
)
# What may rest where on each stage; "gpu": as if the device had a memory of its own.
PLACES = (
    (0, ""),
    (1, ""),
    (1, "cpu"),
    (1, "nvme gpu"),
    (2, ""),
    (2, "nvme"),
    (2, "half gpu"),
    (3, ""),
    (3, "cpu gpu"),
    (3, "both"),
    (3, "nvme"),
    (3, "files gpu"),
)


class Case(NamedTuple):
    """One configuration."""

    world: int
    stage: int
    place: str = ""
    format: tuple[str, str | None, str] = FORMATS[0]

    def __str__(self) -> str:
        return f"world {self.world}, stage {self.stage} {self.place}, {self.format}"


def settings(case: Case, folder: Path) -> dict[str, Any]:
    """Its JSON; files rest in `folder`."""
    kind, master, moments = case.format
    cpu, nvme = {"device": "cpu"}, {"device": "nvme", "nvme_path": str(folder)}
    section = {
        "": {},
        "cpu": {"offload_optimizer": cpu},
        "half": {"offload_optimizer": {**cpu, "ratio": 0.5}},
        "both": {"offload_optimizer": cpu, "offload_param": cpu},
        "nvme": {"offload_optimizer": nvme},
        "files": {"offload_optimizer": nvme, "offload_param": {**nvme, "max_in_cpu": 0}},
    }[case.place.removesuffix("gpu").strip()]
    tree = case.world != 3
    found = config(case.stage, case.world, accumulation=LEAVES // case.world if tree else 1)
    found["zero_optimization"] |= section
    found["optimizer"]["params"]["zero"] = {"moments": moments, **({"master": master} if master else {})}
    if tree:
        found["zero"] = {"reduce": "tree"}
    if kind != "fp32":
        found[kind] = {"enabled": True, **({"loss_scale": 64} if kind == "fp16" else {})}
    return found


@contextlib.contextmanager
def engine_of(case: Case, folder: Path, model: nn.Module | None = None) -> Any:
    """An engine of this configuration; destroyed at the end."""
    with as_on_a_gpu(case.place.endswith("gpu")):
        model = model or make_net(width=WIDE, blocks=1)
        engine, *_ = zero.initialize(model=model, config=settings(case, folder))
        try:
            yield engine
        finally:
            engine.destroy()


def step(engine: Any, number: int) -> list[float]:
    """Optimizer step `number`; the losses of all micro-batches in one order whatever the number of ranks."""
    world, rank, count = dist.get_world_size(), dist.get_rank(), engine.gradient_accumulation_steps()
    found = []
    tokens, targets = batch(number, 2 * world * count)
    for micro in range(count):
        at = 2 * (micro * world + rank)
        loss = engine(tokens[at : at + 2], targets[at : at + 2])
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    told: list[Any] = [None] * world
    dist.all_gather_object(told, found)
    return [each[micro] for micro in range(count) for each in told]


def states(engine: Any) -> dict[str, Any]:
    """Everything that a checkpoint must bring back, by parameter: weight, exact value, moments, and steps."""
    weights = engine.module_state_dict()
    found = {}
    for name, param in engine.module.named_parameters():
        kept = {"weight": weights[name].clone(), "exact": safe_get_full_fp32_param(param)}
        for key in (*MOMENTS, "step"):
            kept[key] = safe_get_full_optimizer_state(param, key)
        found[name] = kept
    return found


def as_kept(name: str, value: torch.Tensor, key: str, moments: str) -> torch.Tensor:
    """A moment rounded as this format of the moments keeps it."""
    if moments == "fp32" or not is_compact(value.numel(), value.ndim):
        return value
    made = Moment.filled(value.numel(), moments)
    made.write(value.flatten().contiguous(), key == "exp_avg")
    return made.decode(key == "exp_avg").view(value.shape)


def differing(found: dict[str, Any], saved: dict[str, Any], case: Case, before: Case) -> list[str]:
    """What is not what was saved, bit by bit; of moments in a format of fewer bits than they had, their rounding."""
    lines = [] if found.keys() == saved.keys() else ["other parameters"]
    for name, kept in saved.items():
        now = found[name]
        if not torch.equal(now["exact"], kept["exact"]):
            lines.append(f"exact value of {name}")
        if case.format[0] == before.format[0] and not torch.equal(now["weight"], kept["weight"]):
            lines.append(f"weight of {name}")
        for key in MOMENTS:
            if not torch.equal(now[key], as_kept(name, kept[key], key, case.format[2])):
                lines.append(f"{key} of {name}")
        if now["step"] != kept["step"]:
            lines.append(f"step of {name}: {now['step']}")
    return lines
