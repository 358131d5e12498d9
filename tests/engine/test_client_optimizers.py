"""The promise: an optimizer and a scheduler of the user's own train as in plain torch, or are refused by name.

A `zero.FusedOptimizer` that a script makes trains bit for bit as the section of the JSON does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import oracle
import pytest
import torch
import torch.distributed as dist
from models import WIDE, batch, config, make_net, step
from oracle import Training
from ranks import listening
from torch import nn
from torch.optim import lr_scheduler

import zero

KINDS: dict[str, dict[str, Any]] = {
    "ASGD": {"lr": 1e-2, "t0": 2},
    "Adadelta": {"lr": 0.5},
    "Adagrad": {"lr": 1e-2, "initial_accumulator_value": 0.1},
    "Adam": {"lr": 1e-2, "amsgrad": True},
    "AdamW": {"lr": 1e-2},
    "Adamax": {"lr": 1e-2},
    "NAdam": {"lr": 1e-2},
    "RAdam": {"lr": 1e-2},
    "RMSprop": {"lr": 1e-3, "momentum": 0.5, "centered": True},
    "Rprop": {"lr": 1e-3},
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True},
}
FUSED: dict[str, dict[str, Any]] = {  # of `zero.FusedOptimizer`, at stages 0 to 3
    "Adam": {"lr": 1e-2, "adam_w_mode": False, "weight_decay": 0.1},
    "Lion": {"lr": 1e-3},
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    "Adagrad": {"lr": 1e-2, "initial_accumulator_value": 0.1},
    "AdamW": {"lr": 1e-2, "weight_decay": 0.1, "zero": {"moments": "8bit"}},
}
MATRICES = ("Adafactor", "LBFGS", "SparseAdam")


class Signs(torch.optim.Optimizer):
    """An optimizer that torch does not have: moves by the sign of a running mean."""

    def __init__(self, params: Any, lr: float = 1e-2, *, decay: float = 0.5, cautious: bool = False) -> None:
        super().__init__(params, {"lr": lr, "decay": decay})
        self.cautious = cautious  # not in the groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    mean = self.state[param].setdefault("mean", torch.zeros_like(param))
                    mean.lerp_(param.grad, 1 - group["decay"])
                    moved = torch.sign(mean)
                    if self.cautious:
                        moved = moved * (mean * param.grad > 0)
                    param.sub_(moved, alpha=group["lr"])


class Derived(torch.optim.SGD):
    """A subclass that changes nothing."""


class Forgetful(Signs):
    """Its constructor's argument is kept nowhere."""

    def __init__(self, params: Any, lr: float, strength: float) -> None:
        super().__init__(params, lr * strength)


class DerivedMuon(torch.optim.Muon):
    """Still needs matrices."""


def without_optimizer(stage: int = 0, world: int = 1, **more: Any) -> dict[str, Any]:
    made = config(stage, world, **more)
    del made["optimizer"]
    return made


def kinds() -> dict[str, Callable[[Any], torch.optim.Optimizer]]:
    found: dict[str, Any] = {
        name: lambda params, name=name: getattr(torch.optim, name)(params, **KINDS[name]) for name in KINDS
    }
    found["Signs"] = lambda params: Signs(params, 3e-3, decay=0.25, cautious=True)
    found["Derived"] = lambda params: Derived(params, lr=0.1, momentum=0.5)
    return found


def trained(stage: int, name: str, steps: int = 3) -> list[torch.Tensor]:
    net = make_net(blocks=1)
    given = without_optimizer(stage, dist.get_world_size(), zero_allow_untested_optimizer=True)
    engine = zero.initialize(model=net, optimizer=kinds()[name](net.parameters()), config=given)[0]
    for number in range(steps):
        step(engine, number)
    engine.destroy()
    return [param.detach().clone() for param in net.parameters()]


def plain(name: str, steps: int = 3) -> list[torch.Tensor]:
    optimizer = kinds()[name]
    training = Training(1, steps, build=lambda: make_net(blocks=1), optimizer=lambda net: optimizer(net.parameters()))
    return list(oracle.train(training, "fp32").params.values())


def test_every_elementwise_optimizer_of_torch_is_here():
    every = {name for name, kind in vars(torch.optim).items() if isinstance(kind, type)} - {"Optimizer"}
    assert every == {*KINDS, *MATRICES, "Muon"}  # that one: test_muon.py


@pytest.mark.ranks(1)
def test_one_rank_trains_as_plain_torch():
    for name in kinds():
        assert all(map(torch.equal, trained(0, name), plain(name))), name


@pytest.mark.ranks(2)
def test_all_stages_train_alike():
    """Each kind at stage 0 and at another one."""
    for number, name in enumerate(kinds()):
        assert all(map(torch.equal, trained(0, name), trained(1 + number % 3, name))), name


def test_the_first_line_counts_what_the_first_step_makes_or_says_that_it_comes_on_top():
    for name, optimizer in (kinds() | {"plain SGD": lambda params: torch.optim.SGD(params, lr=0.1)}).items():
        net = make_net(width=8 * WIDE)
        given = without_optimizer(zero_allow_untested_optimizer=True)
        with listening(logging.INFO) as lines:
            engine = zero.initialize(model=net, optimizer=optimizer(net.parameters()), config=given)[0]
        before = engine.state_nbytes()
        step(engine, 0)
        ours, more = name in ("Signs", "Derived"), engine.state_nbytes().optimizer - before.optimizer
        assert (more > 0) if ours else (more == 0), name
        (first,) = (line for line in lines if line.startswith("stage 0"))
        assert f" {before.total / 2**20:.1f} MiB of model state per rank at rest" in first
        assert ("at rest, and on top what the optimizer makes in its first step, " in first) is ours


@pytest.mark.parametrize("name", MATRICES)
def test_what_needs_whole_matrices_is_refused_by_name(name):
    net = nn.Linear(4, 4, bias=False)
    client = getattr(torch.optim, name)(net.parameters())
    for allowed in (False, True):
        with pytest.raises(ValueError, match=f"optimizer: {name} cannot run on shards: it "):
            zero.initialize(
                model=net, optimizer=client, config=without_optimizer(zero_allow_untested_optimizer=allowed)
            )


@pytest.mark.parametrize(
    ("make", "allowed", "message"),
    [
        (lambda params: Signs(params), False, "optimizer: Signs is none of torch.optim; if each element"),
        (lambda params: Derived(params, lr=1.0), False, "optimizer: Derived is none of torch.optim; if each element"),
        (lambda params: DerivedMuon([torch.ones(2, 2)], lr=1.0), True, "optimizer: DerivedMuon cannot run on shards"),
        (lambda params: Forgetful(params, 1.0, 2.0), True, "optimizer: Forgetful keeps ['strength'] of its"),
        (lambda params: 3, True, "initialize(optimizer=...): the callable made a int; wanted an optimizer"),
    ],
)
def test_what_cannot_run_is_said(make, allowed, message):
    given = without_optimizer(zero_allow_untested_optimizer=allowed)
    with pytest.raises(ValueError) as raised:
        zero.initialize(model=make_net(), optimizer=make, config=given)
    assert str(raised.value).startswith(message)
    with pytest.raises(ValueError, match=r"got a int; wanted an optimizer or a callable"):
        zero.initialize(model=make_net(), optimizer=3, config=given)


def test_steps_taken_before_are_not_forgotten_in_silence(caplog):
    net = make_net()
    client = torch.optim.AdamW(net.parameters())
    net(*batch(0, 2)).backward()
    client.step()
    with caplog.at_level(logging.WARNING, logger="zero"):
        zero.initialize(model=net, optimizer=client, config=without_optimizer())
    assert "AdamW has taken steps; its state is not taken over" in caplog.text


def test_a_callable_gets_groups_when_groups_were_given():
    net = make_net()
    seen = []

    def make(params: Any) -> torch.optim.Optimizer:
        seen.append(params)
        return torch.optim.SGD(params, lr=0.5)

    head = list(net.head.parameters())
    groups = [{"params": head, "lr": 0.25}, {"params": list(net.blocks.parameters())}]
    engine = zero.initialize(model=net, optimizer=make, model_parameters=groups, config=without_optimizer())[0]
    assert engine.get_lr() == [0.25, 0.5]
    zero.initialize(model=make_net(), optimizer=make, config=without_optimizer())
    assert isinstance(seen[1][0], nn.Parameter)


SCHEDULES = {
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=6),
    "CosineAnnealingLR": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 4),
}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("bound", [True, False], ids=["object", "callable"])
def test_schedulers_of_torch_write_to_the_groups_that_train(name, bound):
    rates = []
    net, other = make_net(), make_net()
    reference = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    schedule = SCHEDULES[name](reference)
    for _ in range(4):
        reference.step()
        schedule.step()
        rates.append((reference.param_groups[0]["lr"], reference.param_groups[0]["momentum"]))
    client = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    given = SCHEDULES[name](client) if bound else SCHEDULES[name]
    engine = zero.initialize(model=net, optimizer=client, lr_scheduler=given, config=without_optimizer())[0]
    for number, wanted in enumerate(rates):
        step(engine, number)
        assert (engine.get_lr()[0], engine.get_mom()[0]) == wanted


def test_a_scheduler_that_wants_a_metric_gets_it():
    engine = zero.initialize(
        model=make_net(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        lr_scheduler=lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0),
        config=without_optimizer(accumulation=2),
    )[0]
    for number in range(4):
        engine.backward(engine(*batch(number, 2)))
        if engine.is_gradient_accumulation_boundary():
            with pytest.raises(ValueError, match=r"wants step\(lr_kwargs={'metrics': ...}\)"):
                engine.step()
        engine.step(lr_kwargs={"metrics": 1.0})
    assert engine.global_steps == 2
    assert engine.get_lr() == [0.05]


def test_a_scheduler_of_another_optimizer_is_refused():
    net = make_net()
    stray = lr_scheduler.StepLR(torch.optim.SGD(net.parameters(), lr=0.1), 1)
    with pytest.raises(ValueError, match="StepLR is bound to an optimizer that is not the one that trains"):
        zero.initialize(model=net, lr_scheduler=stray, config=config(0, 1))


def test_what_initialize_refuses_leaves_the_model_as_it_was():
    net = make_net()
    empty = torch.utils.data.TensorDataset(torch.ones(0, 2))
    for wrong, text in (
        ({"config": config(3, 1, scheduler={"type": "WarmupLRR"})}, "did you mean 'WarmupLR'"),
        ({"config": config(3, 1), "lr_scheduler": "WarmupLR"}, "got a str; wanted a scheduler"),
        ({"config": config(3, 1), "training_data": empty}, "wanted at least one sample"),
    ):
        with pytest.raises(ValueError, match=text):
            zero.initialize(model=net, **wrong)
        assert torch.equal(net.head.weight, make_net().head.weight)
    engine, *_ = zero.initialize(model=net, config=config(3, 1))
    step(engine, 0)
    engine.destroy()


class OfAnAdapter(zero.FusedOptimizer):
    """With a signature of its own, and one more attribute."""

    def __init__(self, model_params: Any, learning_rate: float) -> None:
        super().__init__(model_params, "AdamW", lr=learning_rate)


def fused(stage: int, kind: str, by_object: bool, **more: Any) -> list[torch.Tensor]:
    net, world = make_net(width=WIDE, blocks=1), dist.get_world_size()
    groups = [{"params": list(net.blocks.parameters()), "lr": 3e-3}, {"params": list(net.head.parameters())}]
    if by_object:
        optimizer = zero.FusedOptimizer(groups, kind, **FUSED[kind])
        given = without_optimizer(stage, world, **more)
        engine, *_ = zero.initialize(model=net, optimizer=optimizer, config=given)
        assert engine.optimizer.param_groups[0] is optimizer.param_groups[0]
    else:
        given = config(stage, world, optimizer={"type": kind, "params": FUSED[kind]}, **more)
        engine, *_ = zero.initialize(model=net, model_parameters=groups, config=given)
    for number in range(3):
        step(engine, number)
    engine.destroy()
    return [param.detach().clone() for param in net.parameters()]


@pytest.mark.ranks(2)
def test_a_fused_optimizer_is_the_section_of_the_json(tmp_path):
    drive = {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}}
    ways: list[tuple[int, str, dict[str, Any]]] = [(number % 4, kind, {}) for number, kind in enumerate(FUSED)]
    ways += [(2, "AdamW", {"bf16": {"enabled": True}}), (3, "AdamW", {"zero_optimization": drive})]
    for stage, kind, more in ways:
        pair = [fused(stage, kind, by_object, **more) for by_object in (True, False)]
        assert all(map(torch.equal, *pair)), f"{kind} at stage {stage} with {more}"


def test_a_class_of_an_adapter_and_a_scheduler_of_torch():
    net = make_net()
    optimizer = OfAnAdapter(net.parameters(), 0.5)
    with pytest.raises(RuntimeError, match=r"OfAnAdapter\.step\(\): it updates nothing itself"):
        optimizer.step()
    schedule = lr_scheduler.LambdaLR(optimizer, lambda count: 1 / (1 + count))
    engine, *_ = zero.initialize(model=net, optimizer=optimizer, lr_scheduler=schedule, config=without_optimizer(1))
    step(engine, 0)
    assert engine.get_lr() == [0.25]


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
def test_wrong_arguments_of_it_are_said_at_once(kind, arguments, said):
    with pytest.raises(ValueError) as raised:
        zero.FusedOptimizer(make_net().parameters(), kind, **arguments)
    assert str(raised.value).startswith(said)


def test_what_only_bf16_has_is_refused_elsewhere():
    net = make_net()
    optimizer = zero.FusedOptimizer(net.parameters(), "AdamW", zero={"master": "remainder"})
    with pytest.raises(ValueError, match=r"FusedOptimizer\.zero\.master: 'remainder' needs bf16\.enabled"):
        zero.initialize(model=net, optimizer=optimizer, config=without_optimizer(1))
