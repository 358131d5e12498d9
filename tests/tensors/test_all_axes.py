"""The promise: layers that are cut go together with data ranks, shared sequences and stages, all of them at a time.

One process of plain torch, which has the same samples, gives the losses, norms and weights to compare with.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from cut_models import family, full, json_of, words
from marks import longer
from ranks import Pool
from sharing import needs_transformers
from torch import nn

import zero

CLOSE, STEPS, RATE = 1e-6, 3, 0.125
SIZES = {"num_hidden_layers": 4, "num_key_value_heads": 4}  # heads that all of the ranks divide


class Way(NamedTuple):
    """Sizes of axes; what is left of the ranks has samples of its own."""

    stage: int
    pp: int = 1
    cp: int = 1
    tp: int = 2
    gas: int = 2
    sequences: bool = False
    name: str = "llama"
    mode: str = "ulysses"
    schedule: str = "1f1b"

    @property
    def json(self) -> dict[str, Any]:
        found = json_of(self.tp, self.stage, self.gas)
        found["tensor_parallel"]["sequence_parallel"] = self.sequences
        if self.pp > 1:
            found["pipeline"] = {"stages": self.pp, "schedule": self.schedule}
        if self.cp > 1:
            found |= {"sequence_parallel_size": self.cp, "zero": {"context": {"mode": self.mode}}}
        return found


def make(name: str) -> nn.Module:
    return family(name, **SIZES)


@functools.cache
def one_process(name: str, data: int, gas: int) -> dict[str, Any]:
    """Of plain torch: the losses and norms of all steps, and the weights at last."""
    model, losses, norms = make(name), [], []
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for step in range(STEPS):
        parts = []
        for place in range(data):
            for micro in range(gas):
                parts.append(model(**words(step * gas + micro, place)).loss)
                (parts[-1] / (data * gas)).backward()
        losses.append(sum(part.item() for part in parts) / len(parts))
        norms.append(float(sum(param.grad.double().square().sum() for param in model.parameters())) ** 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "norms": norms, "weights": dict(model.state_dict())}


def trained(way: Way) -> dict[str, Any]:
    """The same on this rank, of the weights those of its stage."""
    engine, *_ = zero.initialize(model=make(way.name), config=way.json)
    place, losses, norms = engine.get_data_parallel_rank(), [], []
    assert engine.dp_world_size == dist.get_world_size() // (way.pp * way.cp * way.tp)

    def stream() -> Iterator[Any]:
        for number in range(STEPS * way.gas):
            yield words(number, place)

    feed = stream()
    for _ in range(STEPS):
        if way.pp > 1:
            losses.append(float(engine.train_batch(feed)))
        else:
            total = 0.0
            for _ in range(way.gas):
                loss = engine(**next(feed)).loss
                engine.backward(loss)
                engine.step()
                total += loss.item() / way.gas
            losses.append(float(engine.reduce(total)))
        norms.append(float(engine.get_global_grad_norm()))
    shapes = {name: tuple(param.shape) for name, param in engine.module.named_parameters()}
    found = {"losses": losses, "norms": norms, "weights": full(engine), "shapes": shapes}
    engine.destroy()
    return found


def check(pool: Pool, world: int, way: Way) -> None:
    wanted = one_process(way.name, world // (way.pp * way.cp * way.tp), way.gas)
    names: set[str] = set()
    for rank, found in enumerate(pool.run(world, trained, way)):
        assert found["losses"] == pytest.approx(wanted["losses"], rel=CLOSE), (rank, way)
        assert found["norms"] == pytest.approx(wanted["norms"], rel=CLOSE), (rank, way)
        for name, value in found["weights"].items():
            assert (value - wanted["weights"][name]).abs().max() <= CLOSE, (rank, name, way)
        names |= found["weights"].keys()
        cut = [name for name in found["shapes"] if name.endswith("o_proj.weight")]
        assert cut and (way.stage == 3 or all(found["shapes"][name] == (32, 32 // way.tp) for name in cut))
    assert names == {name for name, _ in make(way.name).named_parameters()}


FOUR = [
    Way(0, pp=2),
    Way(3, pp=2, sequences=True),
    Way(1, cp=2),
    Way(3, cp=2, sequences=True),
    Way(2),
    Way(3, sequences=True),
]
