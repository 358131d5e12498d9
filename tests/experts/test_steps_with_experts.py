"""The promise: steps of divided experts keep what steps promise: fp16's vote, the number of micro-batches of each."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cut_models import full, integers, plain
from expert_models import Experts, json_with, one_process
from marks import longer

import zero
from zero.utils import safe_get_full_grad

pytestmark = pytest.mark.ranks
CUT = {"stage3_param_persistence_threshold": 0}
FP16 = {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 100, "hysteresis": 1}


def light() -> Experts:
    """Of few numbers, so that its sums are exact in 16 bits, too."""
    model = Experts(blocks=1)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(torch.rand(param.shape, generator=generator) < 0.4)
    return model


def halves(number: int, place: int) -> dict[str, torch.Tensor]:
    batch = {name: value[:, :4] for name, value in integers(number, place).items()}
    return batch | {"weights": batch["weights"].half()}


@pytest.mark.parametrize(
    ("world", "ep", "stage"),
    longer(*((w, ep, s) for w, ep in ((2, 2), (4, 4), (4, 2)) for s in range(4))),
)
def test_all_ranks_skip_a_step_whose_overflow_is_in_one_ranks_experts(world: int, ep: int, stage: int) -> None:
    """And the next one is that of one process, at half the scale."""
    json = json_with(ep, stage, fp16=FP16, zero_optimization=CUT)
    engine, *_ = zero.initialize(model=light(), config=json)
    spoilt = engine.module.blocks[0].mix.experts.up
    last = dist.get_rank() == world - 1
    handle = spoilt.register_hook(lambda grad: grad * math.inf) if last else None
    batches = [halves(1, place) for place in range(world)]
    for number in range(2):
        engine.backward(engine(**halves(number, dist.get_rank())))
        if number:
            grads = {name: safe_get_full_grad(param).clone() for name, param in engine.module.named_parameters()}
        engine.step()
        if not number:
            assert all(torch.equal(value, light().get_parameter(name)) for name, value in full(engine).items())
            assert (engine.skipped_steps, engine.optimizer.loss_scale) == (1, 8.0)
            if handle is not None:
                handle.remove()
    singles = [
        {name: value.float() if name == "weights" else value for name, value in each.items()} for each in batches
    ]
    wanted = one_process(light, [singles], functools.partial(torch.optim.SGD, lr=0.125)).model
    before = dict(light().named_parameters())
    for name, value in full(engine).items():
        assert torch.equal(grads[name], (before[name] - wanted.get_parameter(name)) * 8), name
        assert torch.equal(value, wanted.get_parameter(name)), name
    assert (engine.skipped_steps, engine.optimizer.loss_scale) == (1, 8.0)
    engine.destroy()


def unmanaged(ep: int, stage: int, **more: Any) -> Any:
    json = json_with(ep, stage, zero_optimization=CUT, managed_gradient_accumulation=False, **more)
    del json["gradient_accumulation_steps"]
    return zero.initialize(model=Experts(), config=json)[0]


@pytest.mark.parametrize(
    ("world", "ep", "stage"), longer(*((w, ep, s) for w, ep in ((2, 2), (4, 4), (4, 2)) for s in range(4)))
)
def test_ranks_that_have_run_out_of_batches_give_empty_ones(world: int, ep: int, stage: int) -> None:
    """Of no token: the others' tokens go to their experts, and the mean is over the tokens that there are."""
    engine, counts = unmanaged(ep, stage, zero={"mean": "tokens"}), (3, 1, 0, 4)
    model = Experts()
    total = sum(counts[:world])
    for micro in range(max(counts)):
        batch = integers(micro, dist.get_rank())
        runs = micro < counts[dist.get_rank()]
        batch = batch if runs else {name: value[:0] for name, value in batch.items()}
        engine.backward(engine(**batch), tokens=int(runs))
    for place in range(world):
        for micro in range(counts[place]):
            (model(**integers(micro, place)) / total).backward()
    for name, param in engine.module.named_parameters():
        assert torch.equal(safe_get_full_grad(param), model.get_parameter(name).grad), name
    engine.step()
    engine.destroy()


@pytest.mark.parametrize(
    ("world", "ep", "stage"), longer(*((w, ep, s) for w, ep in ((2, 2), (4, 2)) for s in range(4)))
)
@pytest.mark.parametrize("told", [True, False])
def test_ranks_with_other_numbers_of_batches_are_told_what_to_do(world: int, ep: int, stage: int, told: bool) -> None:
    """And go on with the next step."""
    engine, counts = unmanaged(ep, stage), (2, 1, 2, 2)[:world]
    mine = counts[dist.get_rank()]
    with pytest.raises(RuntimeError, match=r"tokens travel to experts.*an empty batch, of 0 rows"):
        if told:
            engine.begin_step(mine)
        for micro in range(mine):
            engine.backward(engine(**integers(micro, dist.get_rank())))
        engine.step()
    engine.optimizer.zero_grad()
    engine.backward(engine(**integers(0, dist.get_rank())))
    wanted = plain(Experts, integers, world, 1)["grads"]
    for name, param in engine.module.named_parameters():
        assert torch.equal(safe_get_full_grad(param), wanted[name]), name
    engine.step()
    engine.destroy()


@pytest.mark.parametrize(("world", "stage"), longer(*((w, s) for w in (2, 4) for s in range(4))))
def test_steps_of_other_numbers_of_micro_batches(world: int, stage: int) -> None:
    engine = unmanaged(world, stage)
    for count in (2, 1, 4):
        for micro in range(count):
            engine.backward(engine(**integers(micro, dist.get_rank())))
        wanted = plain(Experts, integers, world, count)["grads"]
        for name, param in engine.module.named_parameters():
            assert torch.equal(safe_get_full_grad(param), wanted[name]), name
        engine.step()
        engine.load_module_state_dict(Experts().state_dict())
    engine.destroy()
