"""The promise: a new engine that loads a checkpoint goes on as that run would have.

Its learning rates, momenta, loss scale, counters, random numbers and data are bitwise those of the run that was not
interrupted; what only one side has is said. Ranks that were not there draw what no other rank draws.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models import config, make_net
from torch.optim import lr_scheduler as torchs
from torch.optim.swa_utils import SWALR
from torch.utils.data import TensorDataset

import zero
from zero.checkpoint.plain_values import decode, encode
from zero.data import RepeatingLoader
from zero.engine.checkpoint import random_state

STEPS = 9
AT = 4  # the step behind which the run is interrupted
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2, "hysteresis": 1}}
STREAMS = zero.checkpointing.get_cuda_rng_tracker()


@pytest.fixture(autouse=True)
def one_stream() -> Iterator[None]:
    STREAMS.reset()
    STREAMS.add("stream", 1)
    yield
    STREAMS.reset()


def tokens() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(*(torch.randint(0, 17, (14, 5), generator=generator) for _ in range(2)))


def make(schedule: Any = None, groups: Callable | None = None, client: Any = None, **more: Any) -> Any:
    model = make_net(blocks=1)
    return zero.initialize(
        model=model,
        optimizer=client,
        model_parameters=None if groups is None else groups(model),
        config=config(0, 1, **more),
        lr_scheduler=schedule,
        training_data=tokens(),
    )[0]


def two_groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    params = list(model.parameters())
    return [{"params": params[:3], "lr": 3e-3, "name": "first"}, {"params": params[3:], "weight_decay": 0.0}]


def draws() -> tuple[Any, ...]:
    """From each generator of the process, of which Python's and NumPy's keep a number; and of a stream."""
    own = torch.rand(3).tolist(), random.gauss(0, 1), np.random.randn(), torch.rand(3, device=DEVICE).tolist()
    return *own, of_stream("stream")


def of_stream(name: str) -> list[float]:
    with STREAMS.fork(name):
        return torch.rand(2, device=DEVICE).tolist()


def seed(number: int) -> None:
    torch.manual_seed(number), random.seed(number), np.random.seed(number)
    STREAMS.reset()
    STREAMS.add("stream", number)


def train(engine: Any, steps: range, batches: RepeatingLoader | None = None, metrics: bool = False) -> list[Any]:
    """What each step sees: hyperparameters, loss scale, batch and loss; and counters and draws behind it."""
    seen, batches = [], batches or RepeatingLoader(engine.training_dataloader)
    for step in steps:
        for _ in range(engine.gradient_accumulation_steps()):
            batch = next(batches)
            loss = engine(*batch)
            engine.backward(loss * (math.inf if engine.fp16_enabled() and step % 3 == 1 else 1))
            groups = [{k: v for k, v in group.items() if k != "params"} for group in engine.optimizer.param_groups]
            seen.append((repr(groups), engine.optimizer.loss_scale, batch[0].tolist(), loss.item()))
            # The loss falls and rises, for the scheduler that looks at it.
            engine.step(lr_kwargs={"metrics": math.cos(step)} if metrics else None)
        seen.append((engine.global_steps, engine.micro_steps, engine.global_samples, engine.skipped_steps))
        seen.append(draws())
    return seen


def interrupted(folder: Path, build: Callable[[], Any], **kwargs: Any) -> list[Any]:
    """What a run saw that was not interrupted; a new engine that took over behind step AT saw the same."""
    engine = build()
    seed(11), draws()
    batches = RepeatingLoader(engine.training_dataloader)
    train(engine, range(AT), batches, **kwargs)
    engine.save_checkpoint(folder)
    wanted = train(engine, range(AT, STEPS), batches, **kwargs)
    engine.destroy()
    seed(5)
    other = build()
    other.load_checkpoint(folder)
    assert train(other, range(AT, STEPS), **kwargs) == wanted
    other.destroy()
    return wanted


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


SCHEDULES: dict[str, Any] = {
    "LambdaLR": lambda o: torchs.LambdaLR(o, [lambda step: 0.9**step, Twice()]),
    "OneCycleLR": lambda o: torchs.OneCycleLR(o, 0.1, total_steps=12),
    "CyclicLR": lambda o: torchs.CyclicLR(o, 0.01, 0.1, step_size_up=3, mode="exp_range", gamma=0.9),
    "CosineAnnealingWarmRestarts": lambda o: torchs.CosineAnnealingWarmRestarts(o, 3, T_mult=2),
    "MultiStepLR": lambda o: torchs.MultiStepLR(o, [2, 5, 5, 7]),
    "SequentialLR": sequence,
    "SWALR": lambda o: SWALR(o, 0.05, anneal_epochs=6),
}
OURS: dict[str, dict[str, Any]] = {
    "WarmupLR": {"warmup_num_steps": 6},
    "WarmupDecayLR": {"total_num_steps": 8, "warmup_num_steps": 3},
    "WarmupCosineLR": {"total_num_steps": 8, "warmup_num_steps": 3},
    "OneCycle": {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 3, "decay_step_size": 2},
    "LRRangeTest": {"lr_range_test_step_size": 2},
}


@pytest.mark.parametrize("name", [*SCHEDULES, *OURS])
def test_schedules_go_on(name, tmp_path):
    section = {"scheduler": {"type": name, "params": OURS[name]}} if name in OURS else {}
    wanted = interrupted(tmp_path, lambda: make(SCHEDULES.get(name), two_groups, **section))
    assert len({seen[0] for seen in wanted[::3]}) > 2, "the rates do not move"


def test_a_schedule_that_looks_at_the_loss_goes_on(tmp_path):
    def build() -> Any:
        return make(lambda o: torchs.ReduceLROnPlateau(o, patience=0, cooldown=1), two_groups)

    interrupted(tmp_path, build, metrics=True)


@pytest.mark.parametrize("micro", [1, 3])
def test_the_window_and_the_data_go_on_with_accumulation(micro, tmp_path):
    interrupted(tmp_path, lambda: make(micro=micro, accumulation=2))


def test_the_loss_scale_goes_on_with_the_optimizer(tmp_path):
    """And so does what is left of the hysteresis, of which the first overflow took one."""
    patient = {"fp16": FP16["fp16"] | {"loss_scale_window": 5, "hysteresis": 2}}
    assert len({seen[1] for seen in interrupted(tmp_path / "patient", lambda: make(**patient))[::3]}) > 2
    wanted = interrupted(tmp_path, lambda: make(**FP16))
    assert len({seen[1] for seen in wanted[::3]}) > 2, "the scale does not move"
    other = make(**FP16)
    other.load_checkpoint(tmp_path, load_optimizer_states=False)
    assert other.optimizer.loss_scale == 256
    make().save_checkpoint(tmp_path, tag="fp32")
    other.load_checkpoint(tmp_path, tag="fp32")
    assert other.optimizer.loss_scale == 256, "a run in fp32 has no loss scale to hand on"


def test_the_seeds_of_the_tree_go_on(tmp_path):
    seeds = iter((1, 2))

    def build() -> Any:
        torch.manual_seed(next(seeds))
        net = torch.nn.Sequential(torch.nn.Embedding(17, 4), torch.nn.Dropout(), torch.nn.Linear(4, 1))
        net.forward = lambda tokens, _: torch.nn.Sequential.forward(net, tokens).square().mean()
        settings = config(0, 1, zero={"reduce": "tree"})
        return zero.initialize(model=net, config=settings, training_data=tokens())[0]

    interrupted(tmp_path, build)


def test_a_schedule_and_what_it_writes_go_together(tmp_path):
    def build() -> Any:
        made = make(SCHEDULES["OneCycleLR"], two_groups)
        for group in made.optimizer.param_groups:
            group["weight_decay"] = 0.75
        return made

    def values(of: Any) -> list[list[Any]]:
        """What the schedule writes, with where it is, and what it does not."""
        groups = of.optimizer.param_groups
        written = [(group["lr"], group["betas"]) for group in groups]
        return [[*written, of.lr_scheduler.last_epoch], [group["weight_decay"] for group in groups]]

    engine = make(SCHEDULES["OneCycleLR"], two_groups)
    train(engine, range(3))
    engine.save_checkpoint(tmp_path)
    saved, fresh = values(engine), values(build())
    for optimizer, scheduler in itertools.product((False, True), repeat=2):
        other = build()
        other.load_checkpoint(tmp_path, load_optimizer_states=optimizer, load_lr_scheduler_states=scheduler)
        assert values(other) == [(saved if scheduler else fresh)[0], (saved if optimizer else fresh)[1]]
        assert other.global_steps == 3


def test_what_only_one_side_has_is_said(tmp_path, caplog):
    with_one, without = make(SCHEDULES["MultiStepLR"]), make()
    train(with_one, range(1))
    without.training_dataloader = None
    for name, engine in (("one", with_one), ("none", without), ("data", make())):
        engine.save_checkpoint(tmp_path / name)
    with caplog.at_level(logging.WARNING, logger="zero"):
        without.load_checkpoint(tmp_path / "one")
        assert "the checkpoint has a learning-rate scheduler, this run has none" in caplog.text
        assert "the checkpoint has a data position" in caplog.text
        caplog.clear()
        with_one.load_checkpoint(tmp_path / "none")
        assert "this run has a learning-rate scheduler, the checkpoint has none" in caplog.text
        caplog.clear()
        with_one.load_checkpoint(tmp_path / "data", load_lr_scheduler_states=False)
        assert "scheduler" not in caplog.text


def deal(folder: Path, load: bool) -> tuple[list[str], tuple[int, ...], list[float]]:
    """On one rank: the samples that the loader gives, the counters behind them, and what the rank draws first."""
    world = torch.distributed.get_world_size()
    settings = config(3, world, micro=2, zero={"check_replicas": 1})
    engine, _, loader, _ = zero.initialize(model=make_net(blocks=1), config=settings, training_data=tokens())
    if load:
        engine.load_checkpoint(folder)
    drawn, found = torch.rand(2).tolist(), []
    for batch in itertools.islice(loader, None if load else 2):
        engine.backward(engine(*batch))
        engine.step()
        found += [str(row) for row in batch[0].tolist()]
    if not load:
        engine.save_checkpoint(folder)
    counters = engine.global_steps, engine.global_samples, engine.skipped_steps, engine.micro_steps
    engine.destroy()
    return found, counters, drawn


def test_other_numbers_of_ranks_share_what_is_left_of_the_pass(pool, tmp_path):
    """14 samples: 8 on 2 ranks, then 6 on 3 ranks, or on one."""
    first = pool.run(2, deal, tmp_path, False)
    assert first[0][1] == (2, 8, 0, 2)
    for world in (3, 1):
        then = pool.run(world, deal, tmp_path, True)
        rows = sorted(row for rank in (*first, *then) for row in rank[0])
        assert rows == sorted(str(row[0].tolist()) for row in tokens())
        assert then[0][1][1] == 14
        assert len({str(rank[2]) for rank in then[1:]}) == world - 1, "two ranks draw the same"


def test_ranks_that_were_not_there_draw_what_no_other_draws():
    device, saved = torch.device("cpu"), []
    STREAMS.add("alike", 7)
    STREAMS.add("apart", 8)

    def through_json(value: Any) -> Any:
        made, tensors = encode(value, "state")
        return decode(json.loads(json.dumps(made, allow_nan=False)), tensors)

    for rank in range(2):
        torch.manual_seed(rank), random.seed(rank), np.random.seed(rank)
        saved.append(through_json(random_state.capture(device)))
        of_stream("apart")

    def of(rank: int, step: int, states: list[Any]) -> tuple[Any, ...]:
        random_state.restore(through_json(random_state.for_rank(states, rank, step)), device)
        return (
            *(torch.rand(3).tolist(), random.gauss(0, 1), np.random.randn()),
            of_stream("apart"),
            of_stream("alike"),
        )

    first = [of(rank, 10, saved) for rank in range(4)]
    assert first == [of(rank, 10, saved) for rank in range(4)]
    assert [len(set(map(str, drawn))) for drawn in zip(*first, strict=True)] == [4, 4, 4, 4, 1]
    assert of(1, 11, saved) == first[1]
    assert of(2, 11, saved)[0] != first[2][0]
    assert of(1, 10, [saved[0], None])[0] != first[1][0]


def test_tensors_in_a_clients_groups_stay_the_same_objects(tmp_path):
    made = []

    def client(params: Any) -> Any:
        made.append(torch.optim.Adam(params, lr=torch.tensor(0.5), foreach=False))
        return made[-1]

    first, second = make(client=client), make(client=client)
    first.optimizer.param_groups[0]["lr"].fill_(0.125)
    first.save_checkpoint(tmp_path)
    held = made[1].param_groups[0]["lr"]
    second.load_checkpoint(tmp_path)
    assert made[1].param_groups[0]["lr"] is held and held.item() == 0.125


def test_without_a_schedule_hyperparameters_that_the_script_changed_go_on(tmp_path):
    engine, other = make(None, two_groups), make(None, two_groups)
    engine.optimizer.param_groups[1].update(lr=0.25, betas=(0.5, 0.75))
    engine.save_checkpoint(tmp_path)
    other.load_checkpoint(tmp_path)
    for group, wanted in zip(other.optimizer.param_groups, engine.optimizer.param_groups, strict=True):
        assert group.pop("params") and wanted.pop("params")
        assert group == wanted
