"""The promise: several engines live in one process and in one graph, trained, frozen, or only asked."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from closeness import allowed, error, twice
from models import WIDTH, Block, config
from scenario import settings
from stages import inputs
from torch import nn

import zero

STEPS = 3


def net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(Block(), Block(), nn.Linear(WIDTH, WIDTH))


class Plain:
    """One model as an engine is called: plain torch, which sees the data of both ranks."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        self.module, self.optimizer = model, optimizer
        self.train, self.eval, self.zero_grad = model.train, model.eval, model.zero_grad

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)

    def backward(self, loss: torch.Tensor) -> None:
        (loss / 2).backward()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


Side = list[Any]  # of engines, or of Plain
Data = list[torch.Tensor]  # of this step: of all ranks, or of this one


def adversaries(side: Side, data: Data) -> None:
    """The generator learns through the discriminator, which then learns on what is detached."""
    generator, critic = side
    for x in data:
        generator.backward(-critic(generator(x)).mean())
    critic.zero_grad()
    generator.step()
    for x in data:
        with torch.no_grad():
            made = generator(x)
        critic.backward((critic(made) - critic(x)).square().mean())
    critic.step()


def distillation(side: Side, data: Data) -> None:
    """A student follows a frozen teacher, once on its answers and once with the gradient through it."""
    student, teacher = side
    for x in data:
        with torch.no_grad():
            wanted = teacher(x)
        answer = student(x)
        student.backward((answer - wanted).square().mean() + teacher(answer).square().mean())
    student.step()


def feedback(side: Side, data: Data) -> None:
    """A policy generates with a growing input; a value, a reference and the policy itself judge it."""
    policy, value, reference = side
    for x in data:
        policy.eval()
        with torch.no_grad():
            for _ in range(3):
                x = torch.cat([x, torch.tanh(policy(x)[-1:])])
        policy.train()
        with torch.inference_mode():
            old = reference(x)
        now, worth = policy(x), value(x)
        gain = (now * worth.detach()).mean() + (now - old.clone()).square().mean()
        policy.backward(gain + (worth - now.detach()).square().mean())
    value.step()
    policy.step()


class Case(NamedTuple):
    """The last of the models, all but `trained`, have no optimizer."""

    seeds: tuple[int, ...]
    trained: int
    loop: Callable[[Side, Data], None]


CASES = {
    "adversaries": Case((1, 2), 2, adversaries),
    "distillation": Case((1, 2), 1, distillation),
    "feedback": Case((1, 2, 1), 2, feedback),
}


def params(side: Side) -> dict[str, torch.Tensor]:
    found = [(index, each.module.named_parameters()) for index, each in enumerate(side)]
    return {f"{index}.{name}": param.detach() for index, named in found for name, param in named}


def trained_by(name: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    case, side = CASES[name], []
    for index, seed in enumerate(case.seeds):
        model = net(seed).to(dtype)
        optimizer = torch.optim.AdamW(model.parameters(), **config(0, 2)["optimizer"]["params"])
        side.append(Plain(model, optimizer if index < case.trained else None))
    for step in range(STEPS):
        case.loop(side, [inputs(step, rank).to(dtype) for rank in (0, 1)])
    return params(side)


def under_engines(name: str) -> list[dict[str, torch.Tensor]]:
    case, found = CASES[name], []
    for stage in range(4):
        side = []
        for index, seed in enumerate(case.seeds):
            json = config(stage, 2) | ({} if index < case.trained else {"optimizer": None})
            side.append(zero.initialize(model=net(seed), config=json)[0])
        for step in range(STEPS):
            case.loop(side, [inputs(step, dist.get_rank())])
        for engine in side:
            engine.destroy()
        found.append(params(side))
    return found


@pytest.mark.parametrize("name", CASES)
def test_engines_together(pool, name):
    exact = trained_by(name, torch.float64)
    limit = allowed(exact, *twice(lambda: trained_by(name, torch.float32)))
    for stages in pool.run(2, under_engines, name):
        assert error(stages[0], exact) <= limit
        for stage in (1, 2, 3):
            assert all(torch.equal(stages[stage][key], value) for key, value in stages[0].items()), f"stage {stage}"


def in_groups(stage: int, groups: dict[str, list[int]]) -> dict[str, list[torch.Tensor]]:
    """Train two engines in each group that this rank is in, with updates beside the loop; parameters by engine."""
    made, json = {}, settings({"stage": stage, "section": {"offload_optimizer": {"device": "cpu"}}}, 2)
    every = {name: dist.new_group(ranks) for name, ranks in groups.items()}
    for seed in (1, 2):
        for name, group in reversed(every.items()):
            if dist.get_rank(group) >= 0:
                mpu = SimpleNamespace(get_data_parallel_group=lambda group=group: group)
                made[f"{name}{seed}"] = zero.initialize(model=net(seed), config=json, mpu=mpu)[0], group
    for step in range(2):
        for engine, group in made.values():
            engine.backward(engine(inputs(step, dist.get_rank(group))).square().mean())
        for engine, _ in made.values():
            engine.step()
    for engine, _ in made.values():
        engine.destroy()
    return {name: [param.detach() for param in engine.module.parameters()] for name, (engine, _) in made.items()}


@pytest.mark.parametrize("stage", [1, 3])
def test_ranks_of_overlapping_groups_may_own_different_numbers_of_engines(pool, stage):
    """Rank 1 is in both."""
    wanted = pool.run(2, in_groups, stage, {"all": [0, 1]})[0]
    found = pool.run(3, in_groups, stage, {"a": [0, 1], "b": [1, 2]})
    assert [sorted(each) for each in found] == [["a1", "a2"], ["a1", "a2", "b1", "b2"], ["b1", "b2"]]
    for each in found:
        for name, params in each.items():
            assert all(map(torch.equal, wanted[f"all{name[1]}"], params)), name
