"""The promise: what would train nothing, or the wrong thing, is an error or a warning that says what to do."""

from __future__ import annotations

import copy
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launching import Launchers
from models import batch, config, make_net, share, step
from ranks import listening
from torch import nn

import zero
from zero.launch.contract import INITIALIZED


def alone(**more: Any) -> Any:
    return zero.initialize(model=make_net(), config=config(1, 1, **more))


# --- steps without gradients ----------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_step_without_a_backward_is_an_error_and_changes_nothing(accumulation):
    """With accumulation, too, each step has its backward."""
    engine = alone(accumulation=accumulation)[0]
    engine(*batch(0, 2))
    wanted = r"without a backward since the last step\(\).* call engine.backward\(loss\)"
    for number in range(accumulation):
        with pytest.raises(RuntimeError, match=wanted):
            engine.step()
        step(engine, number)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=wanted):
            engine.step()
    assert (engine.global_steps, engine.micro_steps) == (1, accumulation)


def test_a_boundary_set_by_hand_takes_what_earlier_micro_batches_left():
    engine = alone(accumulation=2)[0]
    engine.set_gradient_accumulation_boundary(False)
    step(engine, 0)
    engine.set_gradient_accumulation_boundary(True)
    engine.step()
    assert engine.global_steps == 1
    with pytest.raises(RuntimeError, match="without a backward"):
        engine.step()


def test_plain_backward_of_one_loss_through_two_engines_counts_for_both():
    one, other = (zero.initialize(model=nn.Linear(3, 3), config=config(1, 1))[0] for _ in range(2))
    other(one(torch.ones(2, 3))).sum().backward()
    one.step()
    other.step()
    assert (one.global_steps, other.global_steps) == (1, 1)


# --- optimizers -----------------------------------------------------------------------------------------------


def test_step_of_the_returned_optimizer_is_that_of_the_engine():
    """Its hooks run once, whoever asks for the step."""
    settings = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 9}}, "accumulation": 2}
    (engine, optimizer, *_), (other, hooked, *_) = alone(**settings), alone(**settings)
    seen: list[str] = []
    for each in (optimizer, hooked):
        each.register_step_pre_hook(lambda *_: seen.append("before"))
        each.register_step_post_hook(lambda *_: seen.append("after"))
    for number in range(4):
        step(other, number)
        engine.backward(engine(*share(number)))
        optimizer.step()
    assert seen == ["before", "after"] * 4
    assert (engine.global_steps, engine.micro_steps) == (2, 4)
    assert engine.get_lr() == other.get_lr() != alone(**settings)[0].get_lr()
    pairs = zip(engine.parameters(), other.parameters(), strict=True)
    assert all(torch.equal(mine, theirs) for mine, theirs in pairs)
    with pytest.raises(RuntimeError, match=r"engine.step\(\) and optimizer.step\(\) are the same: call one"):
        engine.step()
    engine.destroy()
    with pytest.raises(RuntimeError, match="not attached to an engine"):
        optimizer.step()


def test_step_of_the_optimizer_that_was_handed_over_raises_until_the_engine_is_gone():
    net, settings = make_net(), config(1, 1)
    del settings["optimizer"]
    client = torch.optim.AdamW(net.parameters(), lr=0.1)
    engine, *_ = zero.initialize(model=net, optimizer=client, config=settings)
    step(engine, 0)
    before = copy.deepcopy(net.head.weight.detach())
    with pytest.raises(
        RuntimeError, match=r"AdamW\.step\(\) of the optimizer that initialize\(\) was given.*engine\.step"
    ):
        client.step()
    step(engine, 1)
    engine.destroy()
    net(*batch(0, 2)).backward()
    client.step()
    assert not torch.equal(before, net.head.weight)


# --- warnings -------------------------------------------------------------------------------------------------


@pytest.mark.ranks(2)
def test_clipping_that_sees_no_gradients_is_warned_of_once():
    engine, *_ = zero.initialize(model=make_net(), config=config(3, 2))
    with listening() as said:
        engine.backward(engine(*share(0)))
        assert all(param.grad is None for param in engine.parameters())
        assert said == [], "to look at a gradient is no clipping"
        for _ in range(2):
            assert torch.nn.utils.clip_grad_norm_(engine.parameters(), 1.0) == 0
    assert len(said) == (dist.get_rank() == 0)
    assert all("clip nothing, at any stage; set gradient_clipping in the JSON" in line for line in said)
    engine.destroy()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("limit", [0.0, 1.0])
def test_a_loop_that_clips_what_it_does_not_have_is_told_of_once(stage, limit):
    """torch finds no gradients in `param.grad`, returns 0 and clips nothing; the JSON clips."""
    json = config(stage, 2) | {"gradient_clipping": limit}
    engine, *_ = zero.initialize(model=make_net(), config=json)
    with listening() as said:
        for number in range(2):
            engine.backward(engine(*share(number)))
            assert stage == 3 or nn.utils.clip_grad_norm_(engine.parameters(), 1.0) == 0
            engine.step()
    engine.destroy()
    told = [line for line in said if "clip nothing, at any stage; set gradient_clipping in the JSON" in line]
    assert len(told) == (dist.get_rank() == 0 and not limit)


@pytest.mark.parametrize("kind", ["torch", "ours"])
def test_a_schedule_that_the_script_moves_too_is_told_of_once(kind):
    def train(between, last=lambda scheduler: None) -> list[str]:
        section = {"type": "StepLR", "params": {"step_size": 9}} if kind == "torch" else {"type": "WarmupLR"}
        engine, _, _, scheduler = alone(scheduler=section)
        scheduler.step()  # to begin elsewhere
        with listening() as said:
            for number in range(6):
                step(engine, number)
                between(scheduler, number)
            last(engine)
        return said

    wanted = "scheduler.step() beside engine.step(), which steps the scheduler itself: the schedule moves on twice "
    (line,) = train(lambda scheduler, number: scheduler.step())
    assert line.startswith(wanted)
    assert len(train(lambda scheduler, number: number in (1, 3) and scheduler.step())) == 1, "one for each epoch"
    assert train(lambda scheduler, number: number == 2 and scheduler.step()) == [], "to go on somewhere else"
    start = None

    def restore(scheduler, number):
        nonlocal start
        start = start or scheduler.state_dict()
        scheduler.load_state_dict(start)

    assert train(restore) == []


def test_a_scheduler_of_the_scripts_own_is_the_scripts_to_step():
    engine, optimizer, *_ = alone()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with listening() as said:
        for number in range(4):
            step(engine, number)
            scheduler.step()
    assert said == []


def test_a_step_that_is_forgotten_is_told_of_once():
    def backwards(count: int, boundary: bool | None = None, destroy: bool = False, **more: Any) -> list[str]:
        engine = alone(**more)[0]
        if boundary is not None:
            engine.set_gradient_accumulation_boundary(boundary)
        with listening() as said:
            for number in range(count):
                engine.backward(engine(*batch(number, 2)))
            if destroy:
                engine.destroy()
        return said

    for count, more in {45: {}, 20: {"accumulation": 4}, 21: {"boundary": True}}.items():
        (line,) = backwards(count, **more)
        assert line.startswith("20 backwards since the last engine.step(), without which nothing is trained: call it")
    (line,) = backwards(2, destroy=True)
    assert line.startswith("2 backwards since the last engine.step()")
    assert backwards(1, destroy=True) == backwards(19) == [], "a step may have many losses"
    assert backwards(40, boundary=False, destroy=True) == [], "Accelerate and Lightning say so where they hold it back"
    with pytest.raises(KeyError), listening() as said:
        try:
            engine = alone()[0]
            for number in range(3):
                engine.backward(engine(*batch(number, 2)))
            raise KeyError
        finally:
            engine.destroy()
    assert said == [], "the exception says enough"


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_hook_that_comes_after_initialize_finds_the_gradient_and_what_it_does_counts(stage):
    """As one that was there before; it is taken off by its own handle, and ours with the engine."""

    def train(before: bool) -> tuple[list[Any], Any]:
        net, seen = make_net(), []

        def double(param: nn.Parameter) -> None:
            seen.append(param.grad.clone())
            param.grad.mul_(2)

        handles = [net.head.weight.register_post_accumulate_grad_hook(double)] if before else []
        engine, *_ = zero.initialize(model=net, config=config(stage, 2))
        handles += [] if before else [net.head.weight.register_post_accumulate_grad_hook(double)]
        for number in range(3):
            if number == 2:
                handles[0].remove()
            step(engine, number)
        engine.destroy()
        net.head.weight.sum().backward()
        assert net.head.weight.grad is not None
        return seen, net.state_dict()

    (seen, weights), (wanted, plain) = train(False), train(True)
    assert len(seen) == len(wanted) == 2 and all(map(torch.equal, seen, wanted))
    assert all(torch.equal(weights[name], plain[name]) for name in plain)


def test_losses_that_are_not_finite_are_counted_and_told_of_at_powers_of_ten():
    engine, *_ = zero.initialize(model=nn.Linear(2, 1), config=config(0, 1))
    with listening() as said:
        for number in range(101):
            engine.backward(engine(torch.ones(1, 2)).sum() * float("nan" if number else 1))
            engine.step()
    told = [line for line in said if line.startswith("the loss of step")]
    assert [line.partition(";")[0] for line in told] == [
        "the loss of step 2 is nan on rank 0",
        "the loss of step 11 is nan on rank 0, in 10 steps so far",
        "the loss of step 101 is nan on rank 0, in 100 steps so far",
    ]


@pytest.mark.ranks(2)
def test_the_rank_with_such_a_loss_is_named_and_rank_0_speaks():
    engine, *_ = zero.initialize(model=make_net(), config=config(1, 2, accumulation=2))
    with listening() as said:
        for number in range(2):
            wrong = number == 0 and dist.get_rank() == 1
            engine.backward(engine(*share(number)) * (float("inf") if wrong else 1))
            engine.step()
    told = [line.partition(";")[0] for line in said if line.startswith("the loss of step")]
    assert told == (["the loss of step 1 is inf on rank 1"] if dist.get_rank() == 0 else [])
    engine.destroy()


@pytest.mark.ranks(2)
def test_ranks_that_are_fed_the_same_batch_are_warned_of_once():
    lines = {}
    for name, data in {"same": lambda number: batch(number, 2), "own": share}.items():
        engine, *_ = zero.initialize(model=make_net(), config=config(1, 2))
        with listening() as said:
            for number in range(3):
                engine.backward(engine(*data(number)))
                engine.step()
        lines[name] = said
        engine.destroy()
    assert lines["own"] == []
    assert len(lines["same"]) == (dist.get_rank() == 0)
    assert all(line.startswith("ranks 0, 1 were fed the same first batch") for line in lines["same"])


def test_a_job_that_calls_initialize_is_not_warned_that_none_does(launchers: Launchers, tmp_path):
    """One that does not is: tests/launch/test_launch.py."""
    script = tmp_path / "script.py"
    script.write_text(f"import os\nopen(os.environ['{INITIALIZED}'], 'w')\nprint(os.environ['ZERO_LOG'])")
    ended = launchers.run("run", "-q", "--num_gpus", "2", str(script), environment={**os.environ})
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.count("warning") == 2, "-q quiets the ranks, too"


def test_initialize_leaves_the_sign_that_the_launcher_looks_for(monkeypatch, tmp_path):
    sign = tmp_path / "sign"
    monkeypatch.setenv(INITIALIZED, str(sign))
    assert not sign.exists()
    alone()
    assert sign.exists()
