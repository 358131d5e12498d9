"""What an engine trains, whole, for several tests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from zero.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state


def weights_of(engine: Any, trained: bool = False) -> dict[str, torch.Tensor]:
    """The exact weights that this rank has; `trained`: without frozen ones."""
    named = engine.module.named_parameters()
    return {name: safe_get_full_fp32_param(each) for name, each in named if each.requires_grad or not trained}


def state_of(engine: Any, keys: Iterable[str] = ("exp_avg", "exp_avg_sq")) -> dict[str, torch.Tensor]:
    """The exact weights that it trains, and their states of these keys."""
    found = weights_of(engine, trained=True)
    params = dict(engine.module.named_parameters())
    states = {f"{key} of {name}": safe_get_full_optimizer_state(params[name], key) for name in found for key in keys}
    return found | states
