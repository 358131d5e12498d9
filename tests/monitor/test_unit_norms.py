"""The promise: norms of each unit are those of plain torch, at every stage and world, known one step later."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from marks import longer
from models import batch, make_net
from scenario import run

STEPS, UNITS = 4, ("<root>", "blocks.0", "blocks.1", "blocks.2")
Norms = dict[tuple[str, int], float]


def of_engine(stage: int, every: Any = True, spoiled: int = -1, **more: Any) -> Norms:
    """By name and number of samples, what a sink is given; `spoiled`: the step whose loss is not finite."""
    got: Norms = {}

    class Sink:
        def write_events(self, event_list: Any) -> None:
            got.update({(name, at): value for name, value, at in event_list if name.startswith("Train/Units/")})

    def loop(engine: Any, number: int, inputs: Any) -> torch.Tensor:
        if number == 0:
            engine.monitor.add(Sink())
        engine.backward(loss := engine(*inputs) * (float("nan") if number == spoiled else 1))
        return loss

    run("net", stage, STEPS, loop=loop, zero={"unit_norms": every}, **more)
    return got


def plain(world: int) -> Norms:
    """Gradient, parameter and update norm of each unit in each step but the last."""
    net, norms = make_net(), {}
    params = dict(net.named_parameters())
    home = {name: next((unit for unit in UNITS[1:] if name.startswith(f"{unit}.")), UNITS[0]) for name in params}
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.1)
    for number in range(STEPS - 1):
        optimizer.zero_grad()
        for part in range(world):
            (net(*batch(1000 * part + number, 2)) / world).backward()
        before = {name: param.detach().clone() for name, param in params.items()}
        grads = {name: param.grad.clone() for name, param in params.items()}
        optimizer.step()
        after = {name: param.detach() for name, param in params.items()}
        updates = {name: after[name] - before[name] for name in params}
        for unit in UNITS:
            for kind, values in (("gradient", grads), ("parameter", after), ("update", updates)):
                own = [values[name].flatten().double() for name in params if home[name] == unit]
                norms[f"Train/Units/{unit}/{kind}_norm", 2 * world * (number + 1)] = torch.cat(own).norm().item()
    return norms


def compare(stage: int, every: Any = True, **more: Any) -> None:
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    found = of_engine(stage, every, **more)
    wanted = {key: value for key, value in plain(world).items() if key[1] // (2 * world) % every == 0}
    assert len(wanted) == 3 * len(UNITS) * ((STEPS - 1) // every)
    assert found == (pytest.approx(wanted, rel=2e-4) if rank == 0 else {})


@pytest.mark.parametrize("stage", [3, *longer(0)])
def test_the_norms_of_one_rank(stage: int):
    compare(stage)


HOST = {"section": {"offload_optimizer": {"device": "cpu"}}}


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("stage", "every", "more"),
    [(0, True, {}), (3, True, {}), (2, 2, {}), *longer((1, True, {}), (2, True, {}), (2, True, HOST))],
)
def test_the_norms_of_two_ranks(stage: int, every: Any, more: dict[str, Any]):
    compare(stage, every, **more)


def test_a_skipped_step_has_none_and_the_next_one_has():
    assert {samples for _, samples in of_engine(1, spoiled=1)} == {2, 6}
