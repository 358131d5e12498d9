"""The promise: what an engine does beside plain steps it does with stages, and its numbers are those of one process."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from marks import longer
from offload_cases import BOTH, OPTIMIZER
from pipelines import (
    ROWS,
    WIDTH,
    Found,
    accumulated,
    batches,
    chain,
    compare,
    ended,
    json_of,
    pipelined,
    samples,
    stepped,
)
from torch import nn
from torch.utils.data import TensorDataset

import zero
from zero.parallel.pipeline import partition

IN_STAGES = {"pipeline": {"stages": 2}}
each_schedule = pytest.mark.parametrize("schedule", ["1f1b", *longer("gpipe", "interleaved", "zero_bubble", "zbv")])


def alike(pool: Any, json: dict[str, Any], ranks: int, steps: int = 3, stage: int = 1, **section: Any) -> None:
    json = json | {"zero_optimization": {"stage": stage, **json["zero_optimization"]}}
    found = pool.run(ranks, pipelined, json | {"pipeline": {"stages": 2, **section}}, steps=steps)
    plain = json | {"zero_optimization": {"stage": min(stage, 1)}}
    compare(found, pool.run(ranks // 2, accumulated, plain, steps=steps)[0])


@pytest.mark.parametrize("section", [OPTIMIZER, *longer(BOTH)], ids=["optimizer", "all"][:2])
@each_schedule
def test_offloaded(pool, schedule, section):
    json = json_of(1, 2, 4) | {"zero_optimization": dict(section)}
    alike(pool, json, 4, stage=3, schedule=schedule)


@each_schedule
@pytest.mark.parametrize("gather", ["step", *longer("use")])
def test_recomputed(pool, schedule, gather):
    json = json_of(1, 1, 4, zero={"recompute": {"modules": ["Sequential"]}})
    alike(pool, json, 2, stage=3, schedule=schedule, gather=gather)


@pytest.mark.parametrize("schedule", ["zbv", *longer("1f1b", "gpipe", "interleaved", "zero_bubble", "dualpipev")])
def test_pytorch_196641_several_schedules_before_a_step(pool, schedule):
    json = json_of(1, 2, 8)
    alike(pool, json, 4, stage=2, schedule=schedule, micro_batches=4)


def evaluated(json: dict[str, Any], between: bool) -> tuple[Found, list[float]]:
    engine = zero.initialize(model=chain(), config=json, loss_fn=F.cross_entropy)[0]
    stream, losses, norms, seen = batches(engine.get_data_parallel_rank()), [], [], []
    for _ in range(3):
        if between:
            seen.append(float(engine.eval_batch(batches(7))))
        losses.append(float(engine.train_batch(stream)))
        norms.append(engine.get_global_grad_norm())
    assert engine.training
    return ended(engine, losses, norms), seen


@each_schedule
def test_automodel_3530_an_evaluation_between_steps(pool, schedule):
    json = json_of(2, 1, 4, pipeline={"stages": 2, "schedule": schedule})
    found, plain = (pool.run(2, evaluated, json, between) for between in (True, False))
    for (mine, seen), (other, _) in zip(found, plain, strict=True):
        compare([mine], other)
        assert seen == found[0][1] and len(set(seen)) == 3


def outputs(json: dict[str, Any]) -> Any:
    engine, model = zero.initialize(model=chain(), config=json, loss_fn=F.cross_entropy)[0], chain()
    loss, given = engine.eval_batch(batches(3), return_logits=True, num_micro_batches=3)
    parts = [samples(number, 3) for number in range(3)]
    wanted = torch.cat([model(x) for x, _ in parts])
    torch.testing.assert_close(float(loss), float(sum(F.cross_entropy(model(x), y) for x, y in parts)) / 3)
    engine.destroy()
    assert (given is None) == (engine.global_rank == 0)
    return given is None or torch.equal(given, wanted)


def test_outputs_of_an_evaluation_are_in_order(pool):
    assert all(pool.run(2, outputs, json_of(1, 1, 4, **IN_STAGES)))


def by_tokens(json: dict[str, Any]) -> Found:
    """The mean over what micro-batches count, which differs."""

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> Any:
        counted = target > 1
        return F.cross_entropy(output, target, reduction="none")[counted].sum() / max(1, int(counted.sum())), int(
            counted.sum()
        )

    engine = zero.initialize(model=chain(), config=json, **({"loss_fn": loss_fn} if "pipeline" in json else {}))[0]
    stream, norms, losses = batches(engine.get_data_parallel_rank()), [], []
    for _ in range(3):
        if "pipeline" in json:
            losses.append(float(engine.train_batch(stream)))
        else:
            total, tokens = 0.0, 0.0
            for _ in range(4):
                x, y = next(stream)
                loss, count = loss_fn(engine(x), y)
                engine.backward(loss, tokens=count)
                engine.step()
                total, tokens = total + float(loss.detach()) * count, tokens + count
            total, tokens = engine.reduce(total, "sum"), engine.reduce(tokens, "sum")
            losses.append(total / tokens)
        norms.append(engine.get_global_grad_norm())
    return ended(engine, losses, norms)


@each_schedule
def test_the_mean_over_tokens(pool, schedule):
    json = json_of(1, 2, 4, zero={"mean": "tokens"})
    found = pool.run(4, by_tokens, json | {"pipeline": {"stages": 2, "schedule": schedule}})
    compare(found, pool.run(2, by_tokens, json)[0])


FP16 = {"fp16": {"enabled": True, "initial_scale_power": 20, "hysteresis": 1, "auto_cast": True}}


@each_schedule
def test_an_overflow_on_one_stage_skips_the_step_of_all(pool, schedule):
    json = json_of(2, 1, 4) | FP16
    found = pool.run(2, overflowing, json | {"pipeline": {"stages": 2, "schedule": schedule}})
    assert found[0] == found[1]
    assert found[0][0] > 0


def overflowing(json: dict[str, Any]) -> tuple[int, float, list[float]]:
    engine = zero.initialize(model=chain(), config=json, loss_fn=F.cross_entropy)[0]
    stream = batches(0)
    losses = [float(engine.train_batch(stream)) for _ in range(12)]
    found = engine.skipped_steps, engine.optimizer.loss_scale, losses
    engine.destroy()
    return found


@pytest.mark.parametrize(
    "json", [{"zero": {"check_replicas": 1, "check_order": True}}, *longer({"zero": {"reduce": "tree"}})]
)
@each_schedule
def test_comparisons_and_trees(pool, schedule, json):
    alike(pool, json_of(1, 2, 4, **json), 4, schedule=schedule)


@pytest.mark.parametrize("stage", [3, *longer(1)])
def test_built_under_init(pool, stage):
    json = json_of(stage, 2, 4, **IN_STAGES)
    found = pool.run(4, born_sharded, json)
    compare(found, pool.run(2, accumulated, json_of(1, 2, 4))[0])


def born_sharded(json: dict[str, Any]) -> Found:
    def make() -> nn.Module:
        with zero.Init(config_dict_or_path=json):
            return chain()

    return pipelined(json, make)


def test_training_data_is_dealt_to_replicas(pool):
    assert len({tuple(each) for each in pool.run(4, with_data, json_of(1, 2, 2, **IN_STAGES))}) == 1


def with_data(json: dict[str, Any]) -> list[float]:
    x = torch.randn(6 * ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, torch.arange(len(x)) % 5)
    engine = zero.initialize(model=chain(), config=json, loss_fn=F.cross_entropy, training_data=data)[0]
    losses = [float(engine.train_batch()) for _ in range(4)]  # more than a pass
    engine.destroy()
    return losses


def saved(json: dict[str, Any], folder: str, load: str = "", steps: int = 2) -> Found:
    engine = zero.initialize(model=chain(), config=json, loss_fn=F.cross_entropy)[0]
    if load:
        engine.load_checkpoint(load)
    numbers = stepped(engine, batches(engine.get_data_parallel_rank()), steps)
    if folder:
        engine.save_checkpoint(folder)
        engine.save_16bit_model(folder)
    return ended(engine, *numbers)


WAYS = [(2, "1f1b", 2), (1, "gpipe", 1), *longer((4, "1f1b", 4), (2, "zbv", 2), (2, "interleaved", 4))]


@pytest.mark.parametrize(("stages", "schedule", "ranks"), WAYS)
def test_a_checkpoint_of_two_stages_loads_at_any_number_and_in_plain_torch(pool, tmp_path, stages, schedule, ranks):
    two = json_of(1, 1, 4, pipeline={"stages": 2})
    before = pool.run(2, saved, two, str(tmp_path))
    section = {"stages": stages, "schedule": schedule}
    other = json_of(3, ranks // stages, 4 * stages // ranks, pipeline=section)
    loaded = pool.run(ranks, saved, other, "", str(tmp_path), steps=0)
    state = {name: value for each in before for name, value in each.state.items()}
    for each in loaded:
        assert each.state and all(torch.equal(value, state[name]) for name, value in each.state.items())
    model = chain()
    (file,) = Path(tmp_path).glob("*.bin")
    model.load_state_dict(torch.load(file))
    assert all(torch.equal(param, state[name]) for name, param in model.named_parameters())


class Timed(nn.Linear):
    """Lets a clock go on while it runs."""

    now: ClassVar[float] = 0.0

    def __init__(self, seconds: float) -> None:
        super().__init__(WIDTH, WIDTH)
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Timed.now += self.seconds
        return super().forward(x)


def by_time(json: dict[str, Any]) -> list[str]:
    torch.manual_seed(1)
    model = nn.Sequential(Timed(12.0), *(Timed(1.0) for _ in range(6)))
    data = TensorDataset(torch.randn(32, WIDTH), torch.arange(32) % 5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(partition, "time", SimpleNamespace(perf_counter=lambda: Timed.now))
        engine = zero.initialize(model=model, config=json, loss_fn=F.cross_entropy, training_data=data)[0]
    engine.train_batch()
    names = [name for name, _ in engine.module.named_parameters()]
    engine.destroy()
    return names


def test_layers_are_divided_by_the_time_that_they_take(pool):
    first, second = pool.run(2, by_time, json_of(1, 1, 4, pipeline={"stages": 2, "partition": "time"}))
    assert first == ["0.weight", "0.bias"]
    assert len(second) == 12
