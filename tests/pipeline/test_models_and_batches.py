"""The promise: whatever the model and its micro-batches are, its stages train as all of it does in one process."""

from __future__ import annotations

import itertools
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from marks import longer
from pipelines import (
    CLASSES,
    WIDTH,
    Found,
    accumulated,
    chain,
    compare,
    ended,
    json_of,
    pipelined,
    samples,
    stepped,
)
from states import weights_of
from torch import nn

import zero

each_schedule = pytest.mark.parametrize("schedule", ["1f1b", *longer("gpipe", "interleaved", "zero_bubble", "zbv")])
VOCABULARY = 11


def trains_alike(pool: Any, make: Any, section: dict[str, Any], ranks: int = 2, **more: Any) -> list[Found]:
    """Those of the ranks that have a stage each, which are compared with one process."""
    data, stage = ranks // section.get("stages", 2), more.pop("stage", 2)
    how = {key: more.pop(key) for key in ("data", "loss_fn", "steps") if key in more}
    json = json_of(stage, data, 4, **more)
    found = pool.run(ranks, pipelined, json | {"pipeline": {"stages": 2, **section}}, make, **how)
    wanted = pool.run(data, accumulated, json | {"zero_optimization": {"stage": min(stage, 1)}}, make, **how)
    compare(found, wanted[0])
    return found


# -- models


def bare() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, CLASSES), nn.Tanh(), nn.ReLU(), nn.Identity())


@each_schedule
def test_deepspeed_1522_and_5792_a_stage_without_parameters(pool, schedule):
    """It has no part in the norm, and nobody waits for it."""
    trains_alike(
        pool, bare, {"schedule": schedule, "partition": [1, 3] if schedule in ("1f1b", "gpipe") else "uniform"}
    )


def in_place() -> nn.Sequential:
    """Blocks that change what they are given."""
    torch.manual_seed(5)
    blocks = [nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH)) for _ in range(4)]
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *blocks, nn.Linear(WIDTH, CLASSES))


@each_schedule
def test_a_stage_that_changes_its_input_in_place(pool, schedule):
    """As the second one of AlexNet in DeepSpeed's examples does."""
    trains_alike(pool, in_place, {"schedule": schedule})


def frozen_first() -> nn.Sequential:
    model = chain(4)
    for layer in (model[0], model[1]):
        layer.requires_grad_(False)
    return model


def frozen_last() -> nn.Sequential:
    model = chain(4)
    for layer in (model[2], model[3]):
        layer.requires_grad_(False)
    return model


@each_schedule
@pytest.mark.parametrize("make", [frozen_first, frozen_last])
@pytest.mark.parametrize("gather", ["step", *longer("use")])
def test_stages_that_are_frozen(pool, schedule, make, gather):
    trains_alike(pool, make, {"schedule": schedule, "gather": gather}, stage=3 if gather == "step" else 1)


class Skips(nn.Module):
    """Its first values go to later blocks, too; the root has a parameter that is read late, and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.shift = nn.Parameter(torch.randn(WIDTH))
        self.unused = nn.Parameter(torch.randn(2))
        self.relu = nn.ReLU()
        self.last = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        first = x = self.first(x)
        for block in self.blocks:
            x = self.relu(block(x)) + first
        return self.last(x.transpose(0, 1).transpose(0, 1) * scale + self.shift)


@each_schedule
def test_values_that_skip_stages(pool, schedule):
    trains_alike(pool, Skips, {"schedule": schedule})


class Tied(nn.Module):
    """An embedding that is the head, too, and stands between blocks once more."""

    def __init__(self, again: bool = False) -> None:
        super().__init__()
        torch.manual_seed(9)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.again = nn.Linear(WIDTH, VOCABULARY, bias=False) if again else None
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        if again:
            self.again.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for number, block in enumerate(self.blocks):
            x = torch.tanh(block(x))
            if self.again is not None and number == 2:
                x = x + self.again(x).softmax(-1) @ torch.ones(VOCABULARY, WIDTH)
        return self.head(x)


def tied_thrice() -> nn.Module:
    return Tied(again=True)


def words(number: int, place: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * place + number)
    ids = torch.randint(VOCABULARY, (3, 5), generator=generator)
    return ids, ids.roll(-1, 1)


def loss_of_words(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


TIES = [("1f1b", 2, 2, Tied), *longer(("zbv", 2, 2, Tied), ("interleaved", 2, 2, Tied), ("zero_bubble", 2, 4, Tied))]
TIES += longer(
    ("1f1b", 4, 4, Tied),
    ("1f1b", 4, 4, tied_thrice),
    ("zbv", 2, 2, tied_thrice),
    ("1f1b", 2, 4, Tied),
    ("gpipe", 2, 4, Tied),
)


@pytest.mark.parametrize(("schedule", "stages", "ranks", "make"), TIES)
@pytest.mark.parametrize("stage", [3, *longer(0, 1, 2)])
def test_megatron_6500_and_megatron_bridge_5380_a_tied_embedding(pool, schedule, stages, ranks, make, stage):
    """Its gradient is the sum of those of all stages, in another order than one process has; its copies stay equal."""
    json, data = json_of(stage, ranks // stages, 4, gradient_clipping=0.0), ranks // stages
    how = {"data": words, "loss_fn": loss_of_words}
    section: dict[str, Any] = {"stages": stages, "schedule": schedule}
    if make is tied_thrice:
        section["stage_map"] = {"blocks.1": 1, "blocks.2": 2, "blocks.3": 3, "again": 2, "head": 3}
    found = pool.run(ranks, pipelined, json | {"pipeline": section}, make, **how)
    wanted = pool.run(data, accumulated, json, make, **how)[0]
    copies = [each.state["embed.weight"] for each in found if "embed.weight" in each.state]
    holders = {("zbv", Tied): 1, ("zbv", tied_thrice): 2, ("1f1b", tied_thrice): 3}.get((schedule, make), 2)
    assert len(copies) == holders * data
    assert all(torch.equal(copies[0], each) for each in copies)
    for each in found:
        torch.testing.assert_close(each.norms, wanted.norms, rtol=1e-6, atol=0)
        for name, value in each.state.items():
            torch.testing.assert_close(value, wanted.state[name], rtol=1e-5, atol=1e-7)


def standing_twice() -> nn.Module:
    """A layer that is the second one, and the last but one."""
    torch.manual_seed(9)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(9)]
    layers[7] = layers[1]
    return nn.Sequential(*layers)


@pytest.mark.parametrize("stage", [1, *longer(3)])
@pytest.mark.parametrize(("schedule", "stages", "holders"), [("1f1b", 3, 2), *longer(("zbv", 2, 1), ("gpipe", 4, 2))])
def test_a_layer_that_stands_on_some_of_the_stages(pool, schedule, stages, holders, stage):
    """It is the second layer on one of its ranks, and the first on another, and a rank between has none."""
    json = json_of(stage, 1, 6, gradient_clipping=0.0)
    section = {"stages": stages, "schedule": schedule, "partition": "uniform"}
    found = pool.run(stages, pipelined, json | {"pipeline": section}, standing_twice)
    wanted = pool.run(1, accumulated, json_of(min(stage, 1), 1, 6, gradient_clipping=0.0), standing_twice)[0]
    assert sum("1.weight" in each.state for each in found) == holders
    for each in found:
        torch.testing.assert_close(each.norms, wanted.norms, rtol=1e-6, atol=0)
        for name, value in each.state.items():
            torch.testing.assert_close(value, wanted.state[name], rtol=1e-5, atol=1e-7)


# -- micro-batches


def of_other_sizes(number: int, place: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows and lengths that change from one micro-batch to the next."""
    rows, length = 1 + number % 3, 2 + number % 4
    x, _ = samples(number, place, rows * length)
    return x.view(rows, length, WIDTH), torch.randint(
        CLASSES, (rows, length), generator=torch.Generator().manual_seed(number)
    )


@each_schedule
def test_deepspeed_5696_micro_batches_of_other_sizes_and_lengths(pool, schedule):
    trains_alike(pool, chain, {"schedule": schedule}, data=of_other_sizes, loss_fn=loss_of_words)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None, labels: Any = None) -> Any:
        for layer in self.layers:
            x = torch.tanh(layer(x))
            if mask is not None:
                x = x * mask[:, None]
        return {"loss": F.cross_entropy(x, labels), "logits": x}


def dicts(number: int, place: int) -> Any:
    x, y = samples(number, place)
    return {"x": x, "labels": y % WIDTH} | ({"mask": (y > 1).float()} if number % 2 else {})


def masked(json: dict[str, Any]) -> Found:
    """Batches are dicts, of which the model computes its own loss; some have a mask."""
    engine = zero.initialize(model=Masked(), config=json)[0]
    loss_of = None if "pipeline" in json else lambda engine, batch: engine(**batch)["loss"]
    return ended(engine, *stepped(engine, (dicts(number, 0) for number in itertools.count()), 3, loss_of))


@each_schedule
def test_batches_that_are_dicts_with_keywords_that_come_and_go(pool, schedule):
    json = json_of(1, 1, 4)
    found = pool.run(2, masked, json | {"pipeline": {"stages": 2, "schedule": schedule}})
    compare(found, pool.run(1, masked, json)[0])


class Dropped(nn.Module):
    """Says which of its places were dropped."""

    seen: ClassVar[list[torch.Tensor]] = []

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = F.dropout(torch.ones_like(x), 0.5, self.training)
        Dropped.seen.append(kept)
        return self.linear(x) * kept


def dropped(json: dict[str, Any], **more: Any) -> tuple[Found, list[torch.Tensor]]:
    Dropped.seen.clear()

    def make() -> nn.Sequential:
        torch.manual_seed(5)
        return nn.Sequential(*(Dropped() for _ in range(4)))

    return pipelined(json, make, **more), list(Dropped.seen)


@each_schedule
def test_dropout_falls_elsewhere_in_each_layer_micro_batch_and_replica_though_all_have_one_seed(pool, schedule):
    json = json_of(1, 2, 4, pipeline={"stages": 2, "schedule": schedule})
    found = pool.run(4, dropped, json, steps=2)
    masks = [mask for _, seen in found for mask in seen]
    assert len(masks) == 2 * 4 * 4 * 2  # layers x micro-batches x steps x replicas
    assert len({tuple(mask.flatten().tolist()) for mask in masks}) == len(masks)
    # Computed again they are the same, and the second run is the first.
    again = pool.run(4, dropped, json | {"zero": {"recompute": {"modules": ["Dropped"]}}}, steps=2)
    for (one, _), (other, _) in zip(found, again, strict=True):
        assert one.losses == other.losses and all(torch.equal(one.state[name], other.state[name]) for name in one.state)


@pytest.mark.parametrize("kind", ["Muon", *longer("Lamb", "Lion")])
@pytest.mark.parametrize("stage", [1, *longer(3)])
def test_megatron_4641_one_rule_updates_a_tied_weight_on_all_stages(pool, kind, stage):
    """Muon takes matrices of blocks, and Adam embeddings; the head that is one, too, must not be taken for a matrix."""
    json = json_of(stage, 1, 4, optimizer={"type": kind, "params": {"lr": 0.01}}, gradient_clipping=0.0)
    how = {"data": words, "loss_fn": loss_of_words, "steps": 2, "state": weights_of}
    found = pool.run(2, pipelined, json | {"pipeline": {"stages": 2}}, Tied, **how)
    wanted = pool.run(1, accumulated, json, Tied, **how)[0]
    assert torch.equal(found[0].state["embed.weight"], found[1].state["embed.weight"])
    for each in found:
        for name, value in each.state.items():
            torch.testing.assert_close(value, wanted.state[name], rtol=1e-5, atol=1e-6)
