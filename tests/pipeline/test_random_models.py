"""The promise: models of whatever layers train in stages as plain torch does, under any schedule and ZeRO stage.

Layers change values in place, hand out transposed and broken memory, tuples, and parameters; modules stand in several
places, parameters between modules are read on several stages, and gradients are clipped.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from marks import longer
from states import weights_of
from torch import nn

import zero

WIDTH, MICRO_BATCHES, STEPS, ROWS = 6, 12, 2, 3
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble", "zbv", "dualpipev")


class Function(nn.Module):
    """A layer without parameters."""

    def __init__(self, call: Any) -> None:
        super().__init__()
        self.forward = call


def add_in_place(x: torch.Tensor) -> torch.Tensor:
    x += 1.0
    return x


def transposed(x: torch.Tensor) -> torch.Tensor:
    return x.t().contiguous().t()


def broadcast(x: torch.Tensor) -> torch.Tensor:
    return x.unsqueeze(0).expand(2, -1, -1).transpose(0, 1)


class Parted(nn.Linear):
    """Gives a tuple with numbers, what needs no gradient, and what nobody uses."""

    def forward(self, x: torch.Tensor) -> Any:
        y = super().forward(x)
        return y, {"input": x, "none": None, "of": y.detach(), "unused": y * 2}, torch.arange(3)


class Joined(nn.Linear):
    def forward(self, x: Any) -> torch.Tensor:
        return super().forward(x[0]) + x[1]["input"] * x[1]["of"]


class Untrained(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return x * super().forward(x).sigmoid()


class Pictures(nn.Conv2d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x[:, None, None].expand(-1, 2, 4, -1).contiguous(memory_format=torch.channels_last)
        return super().forward(x)


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


MAKERS = {
    "linear": lambda: [linear()],
    "in place": lambda: [linear(), nn.ReLU(inplace=True)],
    "added to": lambda: [linear(), Function(add_in_place)],
    "transposed": lambda: [Function(transposed)],
    "broadcast": lambda: [Function(broadcast), Function(lambda x: x.sum(1))],
    "tuple": lambda: [Parted(WIDTH, WIDTH), Joined(WIDTH, WIDTH)],
    "norm": lambda: [linear(), nn.LayerNorm(WIDTH)],
    "frozen": lambda: [linear().requires_grad_(False)],
    "untrained": lambda: [Untrained(WIDTH, WIDTH)],
    "pictures": lambda: [Pictures(2, 2, 3, padding=1), nn.Tanh(), Function(lambda x: x.mean((1, 2)))],
}


def layers(draw: random.Random) -> nn.Sequential:
    found: list[nn.Module] = [linear()]
    while len(found) < 12:
        kind = draw.choice(["again", *MAKERS])
        again = [each for each in found if type(each) is nn.Linear]
        found += [draw.choice(again)] if kind == "again" else MAKERS[kind]()
    return nn.Sequential(*found, linear())


class Skips(nn.Module):
    """Reads values of earlier layers, and its own parameter, between layers."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.layers = nn.ModuleList(nn.Sequential(linear(), nn.ReLU(inplace=draw.random() < 0.5)) for _ in range(12))
        self.plan = [(draw.randrange(at + 1), draw.choice(["add", "mul", "scale", "halves", ""])) for at in range(12)]
        self.head = linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values = [x]
        for layer, (source, how) in zip(self.layers, self.plan, strict=True):
            y = layer(values[-1])
            y = y + values[source] if how == "add" else y
            y = y * torch.sigmoid(values[source]) if how == "mul" else y
            y = y * self.scale if how == "scale" else y
            y = torch.cat(y.chunk(2, 1)[::-1], 1) if how == "halves" else y
            values.append(y)
        return self.head(values[-1])


def model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    draw = random.Random(seed)
    return Skips(draw) if seed % 3 == 0 else layers(draw)


def samples(seed: int, place: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(100 * seed + place)
    found = []
    for _ in range(STEPS * MICRO_BATCHES):
        rows = ROWS + int(torch.randint(2, (), generator=generator))
        x = torch.randn(rows, WIDTH, generator=generator)
        found.append((x, torch.randint(WIDTH, (rows,), generator=generator)))
    return found


def plain(seed: int, replicas: int, clip: float) -> tuple[list[float], dict[str, torch.Tensor]]:
    made, losses = model(seed), []
    trained = [param for param in made.parameters() if param.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    for step in range(STEPS):
        own = slice(step * MICRO_BATCHES, (step + 1) * MICRO_BATCHES)
        each = [F.cross_entropy(made(x), y) for place in range(replicas) for x, y in samples(seed, place)[own]]
        loss = sum(each) / len(each)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, {name: param.detach() for name, param in made.named_parameters() if param.requires_grad}


def in_stages(seed: int, json: dict[str, Any]) -> tuple[list[float], dict[str, torch.Tensor]]:
    engine = zero.initialize(model=model(seed), config=json, loss_fn=F.cross_entropy)[0]
    stream = iter(samples(seed, engine.get_data_parallel_rank()))
    losses = [float(engine.train_batch(stream)) for _ in range(STEPS)]
    weights = weights_of(engine, trained=True)
    engine.destroy()
    return losses, weights


@pytest.mark.parametrize("seed", [*range(6), *longer(*range(6, 54))])
def test_a_model_of_any_layers_trains_as_plain_torch_does(pool: Any, seed):
    draw = random.Random(1000 + seed)
    stages, replicas = draw.choice([(2, 1), (2, 2), (4, 1)] if seed >= 6 else [(2, 1)])
    json = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "gradient_clipping": draw.choice([0.05, 100.0]),
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": draw.randrange(4)},
        "pipeline": {"stages": stages, "schedule": SCHEDULES[seed % 6], "gather": draw.choice(["step", "use"])},
    }
    losses, weights = plain(seed, replicas, json["gradient_clipping"])
    found = pool.run(stages * replicas, in_stages, seed, json)
    for mine, _ in found:
        torch.testing.assert_close(mine, losses, rtol=1e-5, atol=0)
    assert {name for _, each in found for name in each} == weights.keys()
    for _, each in found:
        for name, value in each.items():
            torch.testing.assert_close(value, weights[name], rtol=1e-5, atol=2e-6)
