"""The promise: an optimizer made of a class of `deepspeed.ops` updates as the one that the JSON names."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from models import config, make_net, step

import zero

NUMBERS = {"lr": 0.01, "weight_decay": 0.1}
# Module, class and what it is called with; and what the JSON says.
CLASSES = [
    ("adam", "DeepSpeedCPUAdam", {"adamw_mode": False}, "Adam", {"adam_w_mode": False}),
    ("adam", "FusedAdam", {"set_grad_none": True}, "AdamW", {}),
    ("adagrad", "DeepSpeedCPUAdagrad", {"eps": 1e-6}, "Adagrad", {"eps": 1e-6}),
    ("lamb", "FusedLamb", {"max_coeff": 0.5}, "Lamb", {"max_coeff": 0.5}),
    ("lion", "FusedLion", {"betas": (0.8, 0.9)}, "Lion", {"betas": [0.8, 0.9]}),
]


def trained(kind: str, more: dict[str, Any], make: Any = None) -> list[torch.Tensor]:
    model, settings = make_net(), config(2, 2)
    settings["optimizer"] = {"type": kind, "params": {**NUMBERS, **more}}
    optimizer = None if make is None else make(model.parameters())
    if make is not None:
        del settings["optimizer"]
    engine, *_ = zero.initialize(model=model, optimizer=optimizer, config=settings)
    for number in range(3):
        step(engine, number)
    weights = [param.detach().clone() for param in model.parameters()]
    engine.destroy()
    return weights


def of_ops(module: str, name: str) -> Any:
    importlib.import_module("zero.as_deepspeed")
    return getattr(importlib.import_module(f"deepspeed.ops.{module}"), name)


def by_both(module: str, name: str, given: dict[str, Any], kind: str, more: dict[str, Any]) -> bool:
    made = of_ops(module, name)
    ours = trained(kind, more, lambda params: made(params, **NUMBERS, **given))
    assert not all(map(torch.equal, ours, make_net().parameters()))
    return all(map(torch.equal, ours, trained(kind, more)))


@pytest.mark.parametrize("case", CLASSES, ids=[name for _, name, *_ in CLASSES])
def test_it_updates_as_the_json_says(door: Any, case: tuple[Any, ...]) -> None:
    assert door.run(2, by_both, *case) == [True, True]


def refused(more: dict[str, Any]) -> str:
    with pytest.raises(ValueError) as error:
        of_ops("lamb", "FusedLamb")(make_net().parameters(), **more)
    return str(error.value)


def test_a_limit_for_the_norm_is_refused_where_the_engine_has_its_own(door: Any) -> None:
    assert "set gradient_clipping in the JSON instead" in door.run(1, refused, {"max_grad_norm": 1.0})[0]
