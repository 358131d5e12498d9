"""The promise: with `zero_quantized_gradients` 8 bits travel, and their sum is that of fp32 in the order of ranks.

What a rank rounds away it sends with its next gradient, unless the last one came to nothing.
"""

from __future__ import annotations

from functools import reduce
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fake_nccl import on_fake_nccl
from marks import longer
from models import WIDE, make_net, share, step
from scenario import runs, same, settings
from stand_in_device import DEVICE

import zero
from zero.core.feedback import ErrorFeedback
from zero.kernels.wire import decode, encode
from zero.utils.full import safe_get_full_fp32_param, safe_get_full_grad


def rows_of(grads: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    found = [[torch.empty_like(grad) for _ in range(dist.get_world_size())] for grad in grads]
    for rows, grad in zip(found, grads, strict=True):
        dist.all_gather(rows, grad)
    return found


def rounded(grad: torch.Tensor) -> torch.Tensor:
    """What others see of a gradient: of a parameter, whose blocks no other shares."""
    flat = torch.zeros(-(-grad.numel() // 64) * 64)
    flat[: grad.numel()] = grad.flatten()
    return decode(encode(flat), flat)[: grad.numel()].view(grad.shape)


def json_of(stage: int, **more: Any) -> dict[str, Any]:
    section = {"zero_quantized_gradients": True, **more.pop("section", {})}
    return settings({"stage": stage, "section": section, **more}, dist.get_world_size())


def check_first(device: Any, json: dict[str, Any], rows: list[list[torch.Tensor]]) -> None:
    model, world = make_net(width=WIDE), dist.get_world_size()
    engine, *_ = zero.initialize(model=model, config=json)
    engine.backward(engine(*(part.to(device) for part in share(0))))
    for (name, param), of_ranks in zip(model.named_parameters(), rows, strict=True):
        wanted = reduce(torch.add, of_ranks if world == 1 else map(rounded, of_ranks))
        assert torch.equal(safe_get_full_grad(param).cpu() * world, wanted), name
    assert world == 1 or not torch.equal(rounded(rows[0][0]), rows[0][0])  # so that the above says something
    engine.destroy()


CASES = [
    (2, False, 2, {}),
    *longer(
        (4, False, 3, {"bf16": {"enabled": True}, "section": {"zero_quantized_weights": False}}),
        (4, False, 1, {}),
        (2, False, 2, {"section": {"offload_optimizer": {"device": "cpu"}}}),
        (4, True, 3, {"zero": {"reduce": "backend"}}),
        (1, False, 2, {}),
    ),
]


@pytest.mark.ranks
@pytest.mark.parametrize(("world", "fake", "stage", "more"), CASES)
def test_the_sum_is_that_of_fp32_in_the_order_of_ranks(world: int, fake: bool, stage: int, more: Any) -> None:
    """The first gradient has no error of an earlier one: its sum is that of what plain torch gives, rounded."""
    plain = make_net(width=WIDE).to(torch.bfloat16 if "bf16" in more else torch.float32)
    plain(*share(0)).backward()
    rows, json = rows_of([param.grad.float() for param in plain.parameters()]), json_of(stage, **more)
    if not fake:
        check_first("cpu", json, rows)
        return
    with pytest.MonkeyPatch.context() as patch, on_fake_nccl(patch):
        check_first(DEVICE, json, rows)


@pytest.mark.parametrize("optimizer", ["Muon", *longer("AdamW")])
@pytest.mark.parametrize("world", [2, *longer(4)])
def test_stages_agree_bitwise(pool: Any, world: int, optimizer: str) -> None:
    sections = [(1, {}), (2, {"offload_optimizer": {"device": "cpu"}}), (3, {"stage3_param_persistence_threshold": 0})]
    json = {"optimizer": {"type": optimizer, "params": {"lr": 0.01}}}
    cases = [
        (("wide", {"stage": stage, "section": {"zero_quantized_gradients": True, **section}, **json}), {"state": True})
        for stage, section in sections
    ]
    for wanted, *others in pool.run(world, runs, cases):
        assert all(same(other, wanted, "losses", "exact") for other in others)


def test_what_is_rounded_away_comes_with_the_next() -> None:
    """The mean of what is sent of one gradient, again and again, comes to it; without feedback it does not."""
    torch.manual_seed(0)
    gradient, feedback = torch.randn(4096), ErrorFeedback(4096, torch.device("cpu"))
    total = torch.zeros(4096)
    for _ in range(50):
        total += decode(feedback.encode(gradient), torch.empty(4096))
    once = (decode(encode(gradient), torch.empty(4096)) - gradient).norm()
    assert (total / 50 - gradient).norm() < once / 20
    assert feedback.nbytes == 4096 * 66 // 64


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [2, *longer(3)])
def test_a_skipped_step_leaves_nothing_behind(stage: int) -> None:
    """After it training goes on as if there had been no such step."""
    found = []
    for spoilt in (False, True):
        json = json_of(stage, fp16={"enabled": True, "loss_scale": 8})
        engine, *_ = zero.initialize(model=make_net(width=WIDE), config=json)
        if spoilt:
            engine.backward(engine(*share(9)) * (torch.inf if dist.get_rank() == 1 else 1))
            engine.step()
            assert not engine.was_step_applied()
        found.append([step(engine, number) for number in range(3)])
        engine.destroy()
    assert found[0] == found[1]


@pytest.mark.ranks(2)
def test_a_run_that_goes_on_from_a_checkpoint_begins_without_one(tmp_path: Any) -> None:
    """In the same engine as in a new one."""
    found = []
    for number in range(2):
        engine, *_ = zero.initialize(model=make_net(width=WIDE), config=json_of(2))
        if number == 0:
            step(engine, 0)
            engine.save_checkpoint(str(tmp_path))
            step(engine, 1)
        engine.load_checkpoint(str(tmp_path))
        for later in range(2, 5):
            step(engine, later)
        found.append([safe_get_full_fp32_param(param) for param in engine.module.parameters()])
        engine.destroy()
    assert all(map(torch.equal, *found))
