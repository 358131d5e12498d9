"""The promise: norms of each unit are those of plain torch, at every stage and world, known one step later."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from marks import longer
from models import batch, config, make_net, share

import zero

STEPS = 4


class Sink:
    def __init__(self) -> None:
        self.got: dict[tuple[str, int], float] = {}

    def write_events(self, event_list: Any) -> None:
        self.got |= {(name, samples): value for name, value, samples in event_list if name.startswith("Train/Units/")}


def plain(world: int, units: dict[str, list[str]]) -> dict[tuple[str, int], float]:
    """Gradient, parameter and update norm of each unit in each step but the last."""
    net, norms = make_net(), {}
    params = dict(net.named_parameters())
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.1)
    for number in range(STEPS - 1):
        optimizer.zero_grad()
        net(*batch(number, 2 * world)).backward()
        before = {name: param.detach().clone() for name, param in params.items()}
        grads = {name: param.grad.clone() for name, param in params.items()}
        optimizer.step()
        for unit, names in units.items():
            kinds = {
                "gradient": [grads[name] for name in names],
                "parameter": [params[name].detach() for name in names],
                "update": [params[name].detach() - before[name] for name in names],
            }
            for kind, tensors in kinds.items():
                norm = torch.cat([tensor.flatten().double() for tensor in tensors]).norm().item()
                norms[f"Train/Units/{unit}/{kind}_norm", 2 * world * (number + 1)] = norm
    return norms


def compare(stage: int, every: Any = True, **more: Any) -> None:
    world = dist.get_world_size() if dist.is_initialized() else 1
    sink = Sink()
    settings = config(stage, world, steps_per_print=float("inf"), zero={"unit_norms": every}, **more)
    engine, *_ = zero.initialize(model=make_net(), config=settings)
    units = {unit.plan.name: [spec.name for spec in unit.plan.params] for unit in engine._sharded.units}
    assert len(units) > 3
    engine.monitor.add(sink)
    for number in range(STEPS):
        engine.backward(engine(*share(number)))
        engine.step()
    engine.destroy()
    wanted = {key: value for key, value in plain(world, units).items() if key[1] // (2 * world) % every == 0}
    if world == 1 or dist.get_rank() == 0:
        assert len(wanted) == 3 * len(units) * ((STEPS - 1) // every)
        assert sink.got == pytest.approx(wanted, rel=2e-4)
    else:
        assert sink.got == {}


@pytest.mark.parametrize("stage", [3, *longer(0)])
def test_the_norms_of_one_rank(stage: int):
    compare(stage)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [0, 3, *longer(1, 2)])
def test_the_norms_of_two_ranks(stage: int):
    compare(stage)


@pytest.mark.ranks(2)
def test_every_second_step():
    compare(2, every=2)


@pytest.mark.long
@pytest.mark.ranks(2)
def test_where_the_host_updates():
    compare(2, zero_optimization={"stage": 2, "offload_optimizer": {"device": "cpu"}})


def test_a_skipped_step_has_none_and_the_next_one_has():
    sink = Sink()
    engine, *_ = zero.initialize(model=make_net(), config=config(1, 1, zero={"unit_norms": True}))
    engine.monitor.add(sink)
    for number in range(4):
        engine.backward(engine(*share(number)) * (float("nan") if number == 1 else 1))
        engine.step()
    engine.destroy()
    assert {samples for _, samples in sink.got} == {2, 6}
