"""The promise: a `zero.FusedOptimizer` that a script makes trains bit for bit as the section of the JSON does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models import WIDE, config, make_net, step
from torch.optim.lr_scheduler import LambdaLR

import zero

KINDS: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 1e-2, "weight_decay": 0.1, "zero": {"moments": "8bit"}},
    "Adam": {"lr": 1e-2, "adam_w_mode": False, "weight_decay": 0.1},
    "Lion": {"lr": 1e-3},
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    "Adagrad": {"lr": 1e-2, "initial_accumulator_value": 0.1},
}


class OfAnAdapter(zero.FusedOptimizer):
    """With a signature of its own, and one more attribute."""

    def __init__(self, model_params: Any, learning_rate: float) -> None:
        super().__init__(model_params, "AdamW", lr=learning_rate)


def trained(stage: int, kind: str, by_object: bool, **more: Any) -> list[torch.Tensor]:
    net, world = make_net(width=WIDE, blocks=1), torch.distributed.get_world_size()
    settings = config(stage, world, optimizer={"type": kind, "params": KINDS[kind]}, **more)
    if by_object:
        del settings["optimizer"]
        groups = [{"params": list(net.blocks.parameters()), "lr": 3e-3}, {"params": list(net.head.parameters())}]
        optimizer = zero.FusedOptimizer(groups, kind, **KINDS[kind])
        engine, *_ = zero.initialize(model=net, optimizer=optimizer, config=settings)
        assert engine.optimizer.param_groups[0] is optimizer.param_groups[0]
    else:
        groups = [{"params": list(net.blocks.parameters()), "lr": 3e-3}, {"params": list(net.head.parameters())}]
        engine, *_ = zero.initialize(model=net, model_parameters=groups, config=settings)
    for number in range(3):
        step(engine, number)
    engine.destroy()
    return [param.detach().clone() for param in net.parameters()]


def compared(folder: str) -> list[str]:
    drive = {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": folder}}
    ways: list[tuple[int, str, dict[str, Any]]] = [
        (stage, kind, {}) for stage, kind in enumerate(KINDS, -1) if stage >= 0
    ]
    ways += [(2, "AdamW", {"bf16": {"enabled": True}}), (3, "AdamW", {"zero_optimization": drive})]
    wrong = []
    for stage, kind, more in ways:
        pair = [trained(stage, kind, by_object, **more) for by_object in (True, False)]
        if not all(torch.equal(mine, theirs) for mine, theirs in zip(*pair, strict=True)):
            wrong.append(f"{kind} at stage {stage} with {more}")
    return wrong


def test_it_is_the_section_of_the_json(pool: Any, tmp_path: Path) -> None:
    assert pool.run(2, compared, str(tmp_path)) == [[], []]


def test_a_class_of_an_adapter_and_a_scheduler_of_torch() -> None:
    net, settings = make_net(), config(1, 1)
    del settings["optimizer"]
    optimizer = OfAnAdapter(net.parameters(), 0.5)
    with pytest.raises(RuntimeError, match=r"OfAnAdapter\.step\(\): it updates nothing itself"):
        optimizer.step()
    schedule = LambdaLR(optimizer, lambda count: 1 / (1 + count))
    engine, *_ = zero.initialize(model=net, optimizer=optimizer, lr_scheduler=schedule, config=settings)
    step(engine, 0)
    assert engine.get_lr() == [0.25]
    engine.destroy()


@pytest.mark.parametrize(
    ("kind", "arguments", "said"),
    [
        ("AdamW", {"lr": -1}, "FusedOptimizer.lr: got -1"),
        ("AdamW", {"betta": 1}, "FusedOptimizer: unknown key 'betta'; did you mean 'betas'?"),
        ("Adam", {"amsgrad": True}, "FusedOptimizer.amsgrad: got true, wanted false"),
        (
            "SGD",
            {"maximize": True},
            "FusedOptimizer(kind='SGD'): 'maximize' is true; give initialize() the class of torch",
        ),
        ("RMSprop", {}, "FusedOptimizer(kind='RMSprop'): our kernels run Adam, AdamW, Lamb, Lion, SGD and Adagrad"),
    ],
)
def test_wrong_arguments_are_said_at_once(kind: str, arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError) as raised:
        zero.FusedOptimizer(make_net().parameters(), kind, **arguments)
    assert str(raised.value).startswith(said)


def test_what_only_bf16_has_is_refused_elsewhere() -> None:
    net, settings = make_net(), config(1, 1)
    del settings["optimizer"]
    optimizer = zero.FusedOptimizer(net.parameters(), "AdamW", zero={"master": "remainder"})
    with pytest.raises(ValueError, match=r"FusedOptimizer\.zero\.master: 'remainder' needs bf16\.enabled"):
        zero.initialize(model=net, optimizer=optimizer, config=settings)
