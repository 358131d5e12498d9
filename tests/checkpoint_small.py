"""A small model with engines that save and load it, and all that training changes of it, for several tests."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zero
from zero.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

ADAMW = {"type": "AdamW", "params": {"lr": 1e-2}}
BF16 = {"bf16": {"enabled": True}}
STATES = ("exp_avg", "exp_avg_sq", "momentum_buffer", "sum", "square_avg", "step")


class Small(nn.Module):
    """Two layers, a norm with buffers, and optionally more."""

    def __init__(self, tied: bool = False, width: int = 5, more: bool = False, frozen: str = "") -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(6, width)
        self.norm = nn.BatchNorm1d(width, affine=False)
        self.second = nn.Linear(width, 6)
        self.third = nn.Linear(6, width)
        if tied:
            self.third.weight = self.first.weight
        if more:
            self.added = nn.Linear(width, width)
            self.register_buffer("counted", torch.ones(3))
        for name, param in self.named_parameters():
            param.requires_grad_(not (frozen and name.startswith(frozen)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(x).float()).to(x.dtype)
        if hasattr(self, "added"):
            x = self.added(x)
        return self.third(self.second(x).tanh()).float().square().mean()


def engine_of(
    model: nn.Module, optimizer: Any = ADAMW, groups: Any = None, made: Any = None, stage: int = 3, **more: Any
) -> Any:
    section = {"stage": stage, **more.pop("zero_optimization", {})}
    settings = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0,
        "zero_optimization": section,
        "steps_per_print": float("inf"),
        **({"optimizer": optimizer} if made is None else {}),
        **more,
    }
    return zero.initialize(model=model, config=settings, model_parameters=groups, optimizer=made)[0]


def train(engine: Any, steps: int = 2, first: int = 0) -> list[float]:
    found = []
    rank = dist.get_rank() if dist.is_initialized() else 0
    for number in range(first, first + steps):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * number + rank))
        loss = engine(x.to(engine.module.first.weight.dtype))
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    return found


def held(engine: Any) -> dict[str, torch.Tensor]:
    """All that training changes, by a name."""
    found = {f"buffer {name}": value.clone() for name, value in engine.module.named_buffers()}
    for name, param in engine.module.named_parameters():
        with zero.GatheredParameters(param):
            found[name] = param.detach().clone()
        if param.requires_grad:
            found[f"exact {name}"] = safe_get_full_fp32_param(param)
            for key in STATES:
                with contextlib.suppress(ValueError):  # the optimizer has no such state
                    found[f"{key} {name}"] = torch.as_tensor(safe_get_full_optimizer_state(param, key))
    return found


def saved(folder: Path, engine: Any, steps: int = 2) -> Any:
    train(engine, steps)
    engine.save_checkpoint(folder)
    return engine


def loaded(folder: Path, engine: Any, **options: Any) -> Any:
    engine.load_checkpoint(folder, **options)
    return engine


def assert_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    assert not [name for name in found if not torch.equal(found[name], wanted[name])]


def refused(engine: Any, folder: Path, *parts: str, **options: Any) -> str:
    """The error of loading, which must leave everything as it was and hold these parts; the checkpoint is whole."""
    train(engine, 1, first=50)
    before = held(engine)
    with pytest.raises(ValueError, match=str(folder)) as caught:
        engine.load_checkpoint(folder, **options)
    assert caught.type is ValueError  # and no `Damaged`
    assert_equal(held(engine), before)
    train(engine, 1, first=51)
    for part in parts:
        assert part in str(caught.value), f"{part!r} is not in {caught.value}"
    return str(caught.value)
