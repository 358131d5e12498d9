"""The promise: an optimizer and a scheduler of the user's own train as in plain torch, or are refused by name."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import oracle
import pytest
import torch
import torch.distributed as dist
from models import batch, config, make_net, share
from oracle import Training
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


def settings(stage: int = 0, world: int = 1, **more: Any) -> dict[str, Any]:
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
    given = settings(stage, dist.get_world_size(), zero_allow_untested_optimizer=True)
    engine = zero.initialize(model=net, optimizer=kinds()[name](net.parameters()), config=given)[0]
    for step in range(steps):
        engine.backward(engine(*share(step)))
        engine.step()
    engine.destroy()
    return [param.detach().clone() for param in net.parameters()]


def plain(name: str, steps: int = 3) -> list[torch.Tensor]:
    optimizer = kinds()[name]
    training = Training(1, steps, build=lambda: make_net(blocks=1), optimizer=lambda net: optimizer(net.parameters()))
    return list(oracle.train(training, "fp32").params.values())


def alone() -> list[str]:
    """On one rank the gradients are those of plain torch, bit by bit; so must be the parameters."""
    return [
        name
        for name in kinds()
        if not all(torch.equal(a, b) for a, b in zip(trained(0, name), plain(name), strict=True))
    ]


def test_every_elementwise_optimizer_of_torch_is_here():
    every = {name for name, kind in vars(torch.optim).items() if isinstance(kind, type)} - {"Optimizer"}
    assert every == {*KINDS, *MATRICES, "Muon"}  # that one: test_muon.py


def test_one_rank_trains_as_plain_torch(pool):
    assert pool.run(1, alone) == [[]]


@pytest.mark.ranks(2)
def test_all_stages_train_alike():
    wrong = []
    for name in kinds():
        wanted = trained(0, name)
        for stage in (1, 2, 3):
            found = trained(stage, name)
            wrong += [f"{name} {stage}" for a, b in zip(found, wanted, strict=True) if not torch.equal(a, b)]
    assert wrong == []


@pytest.mark.parametrize("name", MATRICES)
def test_what_needs_whole_matrices_is_refused_by_name(name):
    net = nn.Linear(4, 4, bias=False)
    client = getattr(torch.optim, name)(net.parameters())
    for allowed in (False, True):
        with pytest.raises(ValueError, match=f"optimizer: {name} cannot run on shards: it "):
            zero.initialize(model=net, optimizer=client, config=settings(zero_allow_untested_optimizer=allowed))


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
    given = settings(zero_allow_untested_optimizer=allowed)
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
        zero.initialize(model=net, optimizer=client, config=settings())
    assert "AdamW has taken steps; its state is not taken over" in caplog.text


def test_a_callable_gets_groups_when_groups_were_given():
    net = make_net()
    seen = []

    def make(params: Any) -> torch.optim.Optimizer:
        seen.append(params)
        return torch.optim.SGD(params, lr=0.5)

    head = list(net.head.parameters())
    groups = [{"params": head, "lr": 0.25}, {"params": list(net.blocks.parameters())}]
    engine = zero.initialize(model=net, optimizer=make, model_parameters=groups, config=settings())[0]
    assert engine.get_lr() == [0.25, 0.5]
    zero.initialize(model=make_net(), optimizer=make, config=settings())
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
    engine = zero.initialize(model=net, optimizer=client, lr_scheduler=given, config=settings())[0]
    for step in range(4):
        engine.backward(engine(*batch(step, 2)))
        engine.step()
        assert (engine.get_lr()[0], engine.get_mom()[0]) == rates[step]


def test_a_scheduler_that_wants_a_metric_gets_it():
    engine = zero.initialize(
        model=make_net(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        lr_scheduler=lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0),
        config=settings(accumulation=2),
    )[0]
    for step in range(4):
        engine.backward(engine(*batch(step, 2)))
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
    engine.backward(engine(*batch(0, 2)))
    engine.step()
    engine.destroy()
