"""The promise: a new engine that takes over a run's state goes on as that run would have.

Its learning rates, momenta, loss scale, counters, random numbers and data are bitwise those of the run that was not
interrupted; what does not fit is refused before anything is changed, and what only one side has is said.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from models import config, make_net
from torch.optim import lr_scheduler as torchs
from torch.optim.swa_utils import SWALR
from torch.utils.data import TensorDataset

import zero
from zero.checkpoint.plain import decode, encode
from zero.data import RepeatingLoader
from zero.engine.checkpoint import random_state
from zero.engine.checkpoint.resume import check, rank_state, restore, shared_state

STEPS = 9
AT = 4  # the step behind which the run is interrupted


def tokens() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(*(torch.randint(0, 17, (14, 5), generator=generator) for _ in range(2)))


def make(schedule: Any = None, groups: Callable | None = None, client: Any = None, seed: int = 7, **more: Any) -> Any:
    model = make_net(seed, blocks=1)
    given = None if groups is None else groups(model)
    settings = config(0, 1, **more)
    return zero.initialize(
        model=model,
        optimizer=client,
        model_parameters=given,
        config=settings,
        lr_scheduler=schedule,
        training_data=tokens(),
    )[0]


def two_groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    params = list(model.parameters())
    return [{"params": params[:3], "lr": 3e-3, "name": "first"}, {"params": params[3:], "weight_decay": 0.0}]


def through_json(value: Any) -> Any:
    made, tensors = encode(value, "state")
    return decode(json.loads(json.dumps(made, allow_nan=False)), tensors)


def train(engine: Any, steps: range, batches: RepeatingLoader | None = None, **kwargs: Any) -> list[Any]:
    """What each optimizer step sees: hyperparameters, loss scale, the batch; and counters and draws behind it."""
    seen, batches = [], batches or RepeatingLoader(engine.training_dataloader)
    for step in steps:
        for _ in range(engine.gradient_accumulation_steps()):
            batch = next(batches)
            loss = engine(*batch)
            engine.backward(loss)
            groups = [{k: v for k, v in group.items() if k != "params"} for group in engine.optimizer.param_groups]
            seen.append((repr(groups), engine.optimizer.loss_scale, batch[0].tolist()))
            # The loss falls and rises, for the scheduler that looks at it.
            engine.step(lr_kwargs={"metrics": math.cos(step)} if kwargs.get("metrics") else None)
        seen.append((engine.global_steps, engine.micro_steps, engine.global_samples, engine.skipped_steps))
        seen.append((torch.rand(3).tolist(), random.random(), random.gauss(0, 1), np.random.randn()))
    return seen


def interrupted(build: Callable[[], Any], **kwargs: Any) -> tuple[list[Any], list[Any]]:
    """What two runs saw behind step AT: one that went on, and a new engine that took over."""
    engine = build()
    torch.manual_seed(11), random.seed(11), np.random.seed(11)
    random.gauss(0, 1), np.random.randn()  # each keeps one number for the next call
    batches = RepeatingLoader(engine.training_dataloader)
    train(engine, range(AT), batches, **kwargs)
    shared, own = through_json(shared_state(engine)), through_json(rank_state(engine))
    wanted = train(engine, range(AT, STEPS), batches, **kwargs)
    engine.destroy()
    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    other = build()
    restore(other, shared, own, optimizer=True, scheduler=True)
    found = train(other, range(AT, STEPS), **kwargs)
    other.destroy()
    return wanted, found


class Twice:
    """A schedule that is an object with state."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, epoch: int) -> float:
        self.calls += 1
        return 1 / self.calls


def sequence(optimizer: Any) -> Any:
    parts = [torchs.LinearLR(optimizer, 0.1, total_iters=3), torchs.CosineAnnealingLR(optimizer, 6)]
    return torchs.SequentialLR(optimizer, parts, milestones=[3])


def chain(optimizer: Any) -> Any:
    return torchs.ChainedScheduler([torchs.ExponentialLR(optimizer, 0.9), torchs.StepLR(optimizer, 2)], optimizer)


SCHEDULES: dict[str, Any] = {
    "LambdaLR": lambda o: torchs.LambdaLR(o, [lambda step: 0.9**step, Twice()]),
    "MultiplicativeLR": lambda o: torchs.MultiplicativeLR(o, lambda step: 0.9),
    "OneCycleLR": lambda o: torchs.OneCycleLR(o, 0.1, total_steps=12),
    "CyclicLR": lambda o: torchs.CyclicLR(o, 0.01, 0.1, step_size_up=3, mode="exp_range", gamma=0.9),
    "CosineAnnealingWarmRestarts": lambda o: torchs.CosineAnnealingWarmRestarts(o, 3, T_mult=2),
    "CosineAnnealingLR": lambda o: torchs.CosineAnnealingLR(o, 6),
    "MultiStepLR": lambda o: torchs.MultiStepLR(o, [2, 5, 5, 7]),
    "PolynomialLR": lambda o: torchs.PolynomialLR(o, 8),
    "SequentialLR": sequence,
    "ChainedScheduler": chain,
    "SWALR": lambda o: SWALR(o, 0.05, anneal_epochs=6),
}
OURS: dict[str, dict[str, Any]] = {
    "WarmupLR": {"warmup_num_steps": 6},
    "WarmupDecayLR": {"total_num_steps": 8, "warmup_num_steps": 3},
    "WarmupCosineLR": {"total_num_steps": 8, "warmup_num_steps": 3},
    "OneCycle": {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 3, "decay_step_size": 2},
    "LRRangeTest": {"lr_range_test_step_size": 2},
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_of_torch_go_on(name):
    wanted, found = interrupted(lambda: make(SCHEDULES[name], two_groups))
    assert found == wanted
    assert len({seen[0] for seen in wanted[::3]}) > 2, "the rates do not move"


@pytest.mark.parametrize("name", OURS)
def test_schedules_of_the_json_go_on(name):
    section = {"type": name, "params": OURS[name]}
    wanted, found = interrupted(lambda: make(None, two_groups, scheduler=section))
    assert found == wanted


def test_a_schedule_that_looks_at_the_loss_goes_on():
    build = lambda: make(lambda o: torchs.ReduceLROnPlateau(o, patience=0, cooldown=1), two_groups)  # noqa: E731
    wanted, found = interrupted(build, metrics=True)
    assert found == wanted


def test_without_a_schedule_hyperparameters_that_the_script_changed_go_on():
    def build() -> Any:
        engine = make(None, two_groups)
        engine.optimizer.param_groups[1].update(lr=0.25, betas=(0.5, 0.75))
        return engine

    engine = build()
    shared = through_json(shared_state(engine))
    other = make(None, two_groups)
    restore(other, shared, None, optimizer=True, scheduler=True)
    for group, wanted in zip(other.optimizer.param_groups, engine.optimizer.param_groups, strict=True):
        assert group.pop("params") and wanted.pop("params")
        assert group == wanted


def test_a_clients_groups_and_tensors_in_them_stay_the_same_objects():
    made = []

    def client(params: Any) -> Any:
        made.append(torch.optim.Adam(params, lr=torch.tensor(0.5), foreach=False, capturable=True))
        return made[-1]

    first, second = make(client=client), make(client=client)
    first.optimizer.param_groups[0]["lr"].fill_(0.125)
    held = made[1].param_groups[0]["lr"]
    restore(second, through_json(shared_state(first)), None, optimizer=True, scheduler=True)
    assert made[1].param_groups[0]["lr"] is held and held.item() == 0.125


@pytest.mark.parametrize("micro", [1, 3])
def test_the_window_and_the_data_go_on_with_accumulation(micro):
    wanted, found = interrupted(lambda: make(micro=micro, accumulation=2))
    assert found == wanted


def test_the_loss_scale_goes_on():
    def overflow(scaler: Any, calls: range) -> list[float]:
        scales = []
        for call in calls:
            scaler.update(call % 5 == 0)
            scales.append(scaler.loss_scale)
        return scales

    fp16 = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2}
    engine, other = make(fp16=fp16), make(fp16=fp16)
    overflow(engine.optimizer.loss_scaler, range(12))
    shared = through_json(shared_state(engine))
    restore(other, shared, None, optimizer=True, scheduler=True)
    assert other._sharded.reducer.scale == other.optimizer.loss_scale == engine.optimizer.loss_scale != 256
    more = overflow(engine.optimizer.loss_scaler, range(12, 40))
    assert overflow(other.optimizer.loss_scaler, range(12, 40)) == more
    fresh = make(fp16=fp16)
    restore(fresh, shared, None, optimizer=False, scheduler=True)
    assert fresh.optimizer.loss_scale == 256
    restore(fresh, through_json(shared_state(make())), None, optimizer=True, scheduler=True)
    assert fresh.optimizer.loss_scale == 256, "a run in fp32 has no loss scale to hand on"


def test_the_seeds_of_the_tree_go_on():
    engine, other = (make(seed=seed, zero={"reduce": "tree"}) for seed in (1, 2))

    def draws(of: Any) -> list[float]:
        with of._training.randomness.forward(3, 0):
            return torch.rand(2).tolist()

    first = draws(engine)
    assert draws(other) != first
    restore(other, through_json(shared_state(engine)), None, optimizer=True, scheduler=True)
    second = draws(engine)
    assert draws(other) == second != first


def test_a_schedule_and_what_it_writes_go_together():
    engine = make(SCHEDULES["OneCycleLR"], two_groups)
    train(engine, range(3))
    shared = through_json(shared_state(engine))

    def values(of: Any) -> list[Any]:
        return [(group["lr"], group["betas"], group["weight_decay"]) for group in of.optimizer.param_groups]

    def other() -> Any:
        made = make(SCHEDULES["OneCycleLR"], two_groups)
        for group in made.optimizer.param_groups:
            group["weight_decay"] = 0.75
        return made

    fresh = values(other())
    kept = other()
    restore(kept, shared, None, optimizer=True, scheduler=False)
    assert [v[:2] for v in values(kept)] == [v[:2] for v in fresh] and kept.lr_scheduler.last_epoch == 0
    assert [v[2] for v in values(kept)] == [v[2] for v in values(engine)]
    taken = other()
    restore(taken, shared, None, optimizer=False, scheduler=True)
    assert [v[:2] for v in values(taken)] == [v[:2] for v in values(engine)] and taken.lr_scheduler.last_epoch == 3
    assert [v[2] for v in values(taken)] == [0.75, 0.75]
    neither = other()
    restore(neither, shared, None, optimizer=False, scheduler=False)
    assert values(neither) == fresh and neither.global_steps == 3


def test_what_does_not_fit_is_refused_before_anything_is_changed():
    engine = make(SCHEDULES["OneCycleLR"], two_groups)
    train(engine, range(2))
    other = make(SCHEDULES["MultiStepLR"])
    shared = through_json(shared_state(engine))
    with pytest.raises(
        ValueError, match=r"2 parameter group.*the optimizer 1.*scheduler OneCycleLR, this run MultiStepLR"
    ):
        check(other, shared, True, True, "the checkpoint")
    check(other, shared, False, False, "the checkpoint")


def test_what_only_one_side_has_is_said(caplog):
    with_one, without = make(SCHEDULES["MultiStepLR"]), make()
    train(with_one, range(1))
    without.training_dataloader = None
    with caplog.at_level(logging.WARNING, logger="zero"):
        restore(without, through_json(shared_state(with_one)), None, optimizer=True, scheduler=True)
        assert "the checkpoint has a learning-rate scheduler, this run has none" in caplog.text
        assert "the checkpoint has a data position" in caplog.text
        caplog.clear()
        restore(with_one, through_json(shared_state(without)), None, optimizer=True, scheduler=True)
        assert "this run has a learning-rate scheduler, the checkpoint has none" in caplog.text
        caplog.clear()
        restore(with_one, through_json(shared_state(make())), None, optimizer=True, scheduler=False)
        assert "scheduler" not in caplog.text


def test_an_open_window_is_dropped_and_begins_anew():
    engine = make(accumulation=2)
    train(engine, range(2))
    shared = through_json(shared_state(engine))
    batches = iter(engine.training_dataloader)
    engine.backward(engine(*next(batches)))
    other = make(accumulation=2)
    restore(other, shared, None, optimizer=True, scheduler=True)
    assert (other.global_steps, other.micro_steps) == (2, 4)
    assert not other.is_gradient_accumulation_boundary()
    restore(engine, shared, None, optimizer=True, scheduler=True)
    assert not engine._sharded.reducer.holds_gradients


# --- on ranks -------------------------------------------------------------------------------------------------


def deal(saved: Any, batches: int | None) -> Any:
    """On one rank: what the engine's loader gives, and the state behind it."""
    world = torch.distributed.get_world_size()
    settings = config(3, world, micro=2, zero={"check_replicas": 1})
    made = zero.initialize(model=make_net(blocks=1), config=settings, training_data=tokens())
    engine, _, loader, _ = made
    if saved is not None:
        shared, own = saved
        state = random_state.for_rank(own, engine.global_rank, shared["counters"]["global_steps"])
        restore(engine, shared, {"random": state}, optimizer=True, scheduler=True)
    drawn, found = torch.rand(2).tolist(), []
    for batch in itertools.islice(loader, batches):
        engine.backward(engine(*batch))
        engine.step()
        found += [str(row) for row in batch[0].tolist()]
    shared, own = shared_state(engine), rank_state(engine)["random"]
    engine.destroy()
    return found, encode(shared, "shared"), encode(own, "own"), drawn


def test_other_numbers_of_ranks_share_what_is_left_of_the_pass(pool):
    """14 samples: 8 on 2 ranks, then 6 on 3 ranks, or on one."""
    first = pool.run(2, deal, None, 2)
    saved = decode(*first[0][1]), [decode(*rank[2]) for rank in first]
    assert saved[0]["counters"] == {"global_steps": 2, "global_samples": 8, "skipped_steps": 0, "micro_steps": 2}
    for world in (3, 1):
        then = pool.run(world, deal, saved, None)
        rows = sorted(row for rank in (*first, *then) for row in rank[0])
        assert rows == sorted(str(row[0].tolist()) for row in tokens())
        assert decode(*then[0][1])["counters"]["global_samples"] == 14
        assert len({str(rank[3]) for rank in then[1:]}) == max(0, world - 1), "two ranks draw the same"
