"""The promise: several engines live in one process and in one graph, trained, frozen, or only asked."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from closeness import allowed, error, twice
from models import WIDTH, Block, config
from stages import inputs
from torch import nn

import zero
from zero.watchdog.watchdog import Watchdog

STEPS = 3


def net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(Block(), Block(), nn.Linear(WIDTH, WIDTH))


class Plain:
    """The same loop in plain torch, which sees the data of both ranks."""

    ranks = (0, 1)

    def __init__(self, models: list[nn.Module], trained: int, dtype: torch.dtype) -> None:
        self.models = [model.to(dtype) for model in models]
        settings = config(0, 2)["optimizer"]["params"]
        self.optimizers = [torch.optim.AdamW(model.parameters(), **settings) for model in self.models[:trained]]
        self.dtype = dtype

    def data(self, step: int, rank: int) -> torch.Tensor:
        return inputs(step, rank).to(self.dtype)

    def backward(self, loss: torch.Tensor) -> None:
        (loss / 2).backward()

    def step(self, index: int) -> None:
        self.optimizers[index].step()
        self.optimizers[index].zero_grad()

    def zero_grad(self, index: int) -> None:
        self.models[index].zero_grad()


class Ours:
    """The loop under engines, one rank's data."""

    def __init__(self, models: list[nn.Module], trained: int, stage: int) -> None:
        self.ranks = (dist.get_rank(),)
        settings = config(stage, 2)
        without = {key: value for key, value in settings.items() if key != "optimizer"}
        self.models = [
            zero.initialize(model=model, config=settings if index < trained else without)[0]
            for index, model in enumerate(models)
        ]

    def data(self, step: int, rank: int) -> torch.Tensor:
        return inputs(step, rank)

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def step(self, index: int) -> None:
        self.models[index].step()

    def zero_grad(self, index: int) -> None:
        self.models[index].zero_grad()


Side = Any  # Plain or Ours


def adversaries(side: Side, step: int) -> None:
    """The generator learns through the discriminator, which then learns on what is detached."""
    generator, critic = side.models
    for rank in side.ranks:
        side.backward(-critic(generator(side.data(step, rank))).mean())
    side.zero_grad(1)
    side.step(0)
    for rank in side.ranks:
        x = side.data(step, rank)
        with torch.no_grad():
            made = generator(x)
        side.backward((critic(made) - critic(x)).square().mean())
    side.step(1)


def distillation(side: Side, step: int) -> None:
    """A student follows a frozen teacher, once on its answers and once with the gradient through it."""
    student, teacher = side.models
    for rank in side.ranks:
        x = side.data(step, rank)
        with torch.no_grad():
            wanted = teacher(x)
        answer = student(x)
        side.backward((answer - wanted).square().mean() + teacher(answer).square().mean())
    side.step(0)


def feedback(side: Side, step: int) -> None:
    """A policy generates with a growing input; a value, a reference and the policy itself judge it."""
    policy, value, reference = side.models
    for rank in side.ranks:
        x = side.data(step, rank)
        policy.eval()
        with torch.no_grad():
            for _ in range(3):
                x = torch.cat([x, torch.tanh(policy(x)[-1:])])
        policy.train()
        with torch.inference_mode():
            old = reference(x)
        now = policy(x)
        worth = value(x)
        gain = (now * worth.detach()).mean() + (now - old.clone()).square().mean()
        side.backward(gain + (worth - now.detach()).square().mean())
    side.step(1)
    side.step(0)


# seeds of the models, how many of them are trained, the loop
CASES: dict[str, tuple[tuple[int, ...], int, Callable[[Side, int], None]]] = {
    "adversaries": ((1, 2), 2, adversaries),
    "distillation": ((1, 2), 1, distillation),
    "feedback": ((1, 2, 1), 2, feedback),
}


def params(models: list[nn.Module]) -> dict[str, torch.Tensor]:
    return {f"{i}.{name}": param.detach() for i, model in enumerate(models) for name, param in model.named_parameters()}


def trained_by(name: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    seeds, trained, loop = CASES[name]
    side = Plain([net(seed) for seed in seeds], trained, dtype)
    for step in range(STEPS):
        loop(side, step)
    return params(side.models)


def under_engines(name: str) -> list[dict[str, torch.Tensor]]:
    seeds, trained, loop = CASES[name]
    found = []
    for stage in range(4):
        models = [net(seed) for seed in seeds]
        side = Ours(models, trained, stage)
        for step in range(STEPS):
            loop(side, step)
        for engine in side.models:
            engine.destroy()
        found.append(params(models))
    return found


@pytest.mark.parametrize("name", CASES)
def test_engines_together(pool, name):
    exact = trained_by(name, torch.float64)
    limit = allowed(exact, *twice(lambda: trained_by(name, torch.float32)))
    for stages in pool.run(2, under_engines, name):
        assert error(stages[0], exact) <= limit
        for stage in (1, 2, 3):
            assert all(torch.equal(stages[stage][key], value) for key, value in stages[0].items()), f"stage {stage}"


def _after(last: Any, first: Any) -> None:
    """Have the next updates of the engine `last` wait for those of the engine `first`."""
    over, name = threading.Event(), first._sharded.trained[-1].plan.name
    first.optimizer._updater.on_update = lambda what, unit: over.set() if (what, unit) == ("done", name) else None
    last.optimizer._updater.on_update = lambda what, unit: over.wait(60) if what == "update" else None


def beside_the_loop(held: bool) -> list[torch.Tensor]:
    """Two engines whose updates run beside the loop; `held`: each rank's begin with another engine."""
    models = [net(seed) for seed in (1, 2)]
    settings = config(1, 2)
    settings["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    engines = [zero.initialize(model=model, config=settings)[0] for model in models]
    last, first = engines[dist.get_rank()], engines[1 - dist.get_rank()]
    for step in range(2):
        for engine in engines:
            engine.backward(engine(inputs(step, dist.get_rank())).square().mean())
        if held:
            _after(last, first)
        for engine in engines:
            engine.step()
    for engine in engines:
        engine.destroy()
    return [param.detach() for model in models for param in model.parameters()]


@pytest.mark.ranks(2)
def test_updates_of_two_engines_may_come_in_another_order_on_each_rank():
    assert all(map(torch.equal, beside_the_loop(False), beside_the_loop(True)))


def offloaded(stage: int) -> dict[str, Any]:
    settings = config(stage, 2)
    settings["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    return settings


def trained_in_turn(engines: list[tuple[Any, dist.ProcessGroup]]) -> list[list[torch.Tensor]]:
    for step in range(2):
        for engine, group in engines:
            engine.backward(engine(inputs(step, dist.get_rank(group))).square().mean())
        for engine, _ in engines:
            engine.step()
    for engine, _ in engines:
        engine.destroy()
    return [[param.detach() for param in engine.module.parameters()] for engine, _ in engines]


def one_of_two_ranks(stage: int) -> list[list[torch.Tensor]]:
    made = [(zero.initialize(model=net(seed), config=offloaded(stage))[0], dist.group.WORLD) for seed in (1, 2)]
    return trained_in_turn(made)


def in_groups(stage: int) -> dict[str, list[torch.Tensor]]:
    """Two engines in each of two groups, of which rank 1 is in both; rank 0 has begun one that nobody came to."""
    pairs = {"a": dist.new_group([0, 1]), "b": dist.new_group([1, 2])}
    mine = {name: group for name, group in pairs.items() if dist.get_rank(group) >= 0}
    made = {}
    if dist.get_rank() == 0:
        watchdog = Watchdog(0)
        watchdog.start((0, 1), pairs["a"], 60.0, False)
        watchdog.close()
    for seed in (1, 2):
        for name, group in reversed(mine.items()):
            mpu = SimpleNamespace(get_data_parallel_group=lambda group=group: group)
            made[f"{name}{seed}"] = zero.initialize(model=net(seed), config=offloaded(stage), mpu=mpu)[0], group
    watchdogs = {name: engine._sharded.world.watchdog for name, (engine, _) in made.items()}
    numbers = {name: watchdog.number for name, watchdog in watchdogs.items()}
    keys = [(watchdog.store.ranks, watchdog.number) for watchdog in watchdogs.values()]
    assert numbers == {name: int(name[1]) + (name[0] == "a") for name in made}, "the group's own count"
    assert len(set(keys)) == len(keys)
    return dict(zip(made, trained_in_turn(list(made.values())), strict=True))


@pytest.mark.parametrize("stage", [1, 3])
def test_ranks_of_overlapping_groups_may_own_different_numbers_of_engines(pool, stage):
    wanted = pool.run(2, one_of_two_ranks, stage)[0]
    found = pool.run(3, in_groups, stage)
    assert [sorted(each) for each in found] == [["a1", "a2"], ["a1", "a2", "b1", "b2"], ["b1", "b2"]]
    for each in found:
        for name, params in each.items():
            assert all(map(torch.equal, wanted[int(name[1]) - 1], params)), name
