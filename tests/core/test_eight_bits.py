"""The promise: with `zero_quantized_weights` all ranks compute with the same 8 bits of the exact values, and only that.

Whatever is kept or handed out is exact: masters, checkpoints, saved weights, GatheredParameters, the module afterwards.
With `zero_quantized_gradients` 8 bits travel, and their sum is that of fp32 in the order of ranks. What a rank rounds
away it sends with its next gradient, unless the last one came to nothing.
"""

from __future__ import annotations

from functools import reduce
from pathlib import Path
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
from zero.core.reduction import ErrorFeedback
from zero.kernels.wire import decode, encode
from zero.utils.full import safe_get_full_fp32_param, safe_get_full_grad

BF16, QUANTIZED = {"bf16": {"enabled": True}}, {"zero_quantized_weights": True}


def engine_of(more: dict[str, Any], quantized: bool = True, **section: Any) -> Any:
    json = settings({"stage": 3, "section": (QUANTIZED if quantized else {}) | section, **more}, dist.get_world_size())
    return zero.initialize(model=make_net(width=WIDE), config=json)[0]


def seen(engine: Any) -> dict[str, torch.Tensor]:
    """Each parameter as a forward reads it."""
    found: dict[str, torch.Tensor] = {}
    names = {param: name for name, param in engine.module.named_parameters()}

    def read(module: torch.nn.Module, *_: Any) -> None:
        for param in module.parameters(recurse=False):
            found[names[param]] = param.detach().clone()

    handles = [module.register_forward_pre_hook(read) for module in engine.module.modules()]
    with torch.no_grad():
        engine(*share(0))
    for handle in handles:
        handle.remove()
    return found


def in_8_bits(exact: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What is to be seen of a parameter."""
    flat = torch.zeros(-(-exact.numel() // 64) * 64)
    flat[: exact.numel()] = exact.flatten()
    return decode(encode(flat), torch.empty(flat.numel(), dtype=dtype))[: exact.numel()].view(exact.shape)


CASES = [
    (2, {}, {}),
    *longer(
        (2, BF16, {}),
        (4, BF16, {"zero_hpz_partition_size": 2}),
        (4, {"zero": {"shard_size": 2}}, {}),
        (2, {"optimizer": {"type": "Lion", "params": {"lr": 1e-3, "zero": {"moments": "8bit"}}}}, {}),
        (2, BF16, {"offload_optimizer": {"device": "cpu"}}),
        (2, {"optimizer": {"type": "Muon", "params": {"lr": 1e-2}}}, {"zero_quantized_gradients": True}),
        (2, BF16, {"offload_param": {"device": "cpu"}}),
        (1, {}, {}),
    ),
]


@pytest.mark.ranks
@pytest.mark.parametrize(("world", "more", "section"), CASES)
def test_all_ranks_see_the_8_bits_of_the_exact_values(
    world: int, more: dict[str, Any], section: dict[str, Any]
) -> None:
    engine = engine_of(more, **section)
    for number in range(3):
        step(engine, number)
    dtype = torch.bfloat16 if "bf16" in more else torch.float32
    for name, value in seen(engine).items():
        exact = safe_get_full_fp32_param(engine.module.get_parameter(name))
        assert torch.equal(value, exact if world == 1 else in_8_bits(exact, dtype)), name
        everywhere = [torch.empty_like(value) for _ in range(world)]
        dist.all_gather(everywhere, value)
        assert all(torch.equal(each, value) for each in everywhere)
    engine.destroy()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("more", [{}, *longer(BF16)])
def test_what_is_handed_out_is_exact(more: dict[str, Any]) -> None:
    """Inside GatheredParameters, also in a forward; what is written there, and else nothing; and after `destroy`."""
    engine = engine_of(more)
    step(engine, 0)
    weight, dtype = engine.module.head.weight, torch.bfloat16 if more else torch.float32
    exact = safe_get_full_fp32_param(weight)
    inside = []

    def read(*_: Any) -> None:
        with zero.GatheredParameters([weight]):
            inside.append(weight.detach().clone())

    handle = engine.module.head.register_forward_pre_hook(read)
    with torch.no_grad():
        engine(*share(0))
    handle.remove()
    with zero.GatheredParameters([weight]):
        inside.append(weight.detach().clone())
    written = exact.clone()
    written[3, 5] = 7.0
    with zero.GatheredParameters([weight], modifier_rank=0):
        inside.append(weight.detach().clone())
        weight.data[3, 5] = 7.0
    assert len(inside) == 3 and all((each - exact).abs().max() <= 2**-8 * exact.abs().max() for each in inside)
    if not more:
        assert all(torch.equal(each, exact) for each in inside)
    assert torch.equal(safe_get_full_fp32_param(weight), written)
    assert torch.equal(seen(engine)["head.weight"], in_8_bits(written, dtype))
    engine.destroy()
    assert torch.equal(weight.detach()[4:], inside[0][4:])


@pytest.mark.ranks(2)
def test_checkpoints_are_exact(tmp_path: Path) -> None:
    """The first one has what a run without 8 bits has; a later one loads into such a run, and into another one with."""
    folder = str(tmp_path)
    with_, without = engine_of({}), engine_of({}, quantized=False)
    first = [safe_get_full_fp32_param(param) for param in without.module.parameters()]
    with torch.no_grad():
        with_(*share(0))  # so that 8 bits have been there
    with_.save_checkpoint(folder, tag="first")
    step(without, 0)
    without.load_checkpoint(folder, tag="first")
    assert all(map(torch.equal, map(safe_get_full_fp32_param, without.module.parameters()), first))
    for number in range(2):
        step(with_, number)
    with_.save_checkpoint(folder, tag="later")
    again = engine_of({})
    step(again, 5)
    for engine in (without, again):
        engine.load_checkpoint(folder, tag="later")
        for name, param in engine.module.named_parameters():
            exact = safe_get_full_fp32_param(with_.module.get_parameter(name))
            assert torch.equal(safe_get_full_fp32_param(param), exact)
    with_.save_16bit_model(folder, "weights.bin")
    dist.barrier()
    saved = torch.load(Path(folder, "weights.bin"))
    for name, param in with_.module.named_parameters():
        assert torch.equal(saved[name], safe_get_full_fp32_param(param))
    losses = [step(engine, 2) for engine in (with_, again)]
    assert torch.equal(*losses)
    for engine in (with_, without, again):
        engine.destroy()


@pytest.mark.ranks(2)
def test_bytes_on_the_wire() -> None:
    """At most 0.27 of those of fp32, scales included."""
    sent = []
    for coded in (True, False):
        engine = engine_of({"comms_logger": {"enabled": True}}, coded, zero_quantized_gradients=coded)
        step(engine, 0)
        sent.append({name: each.sent for name, each in engine.log_comms_summary().items()})
        engine.destroy()
    for direction in ("gather", "reduce"):
        assert 0 < sent[0][direction] <= 0.27 * sent[1][direction]


# --- gradients -------------------------------------------------------------------------------------------------------


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


SUMS = [
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
@pytest.mark.parametrize(("world", "fake", "stage", "more"), SUMS)
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
    gradient, feedback = torch.randn(4096), ErrorFeedback(4096, 1, torch.device("cpu"))
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
def test_a_forward_that_writes_leaves_the_rest_exact() -> None:
    """An embedding with `max_norm` writes into its weight."""
    torch.manual_seed(0)
    embed, json = torch.nn.Embedding(17, 12, max_norm=1.0), settings({"stage": 3, "section": QUANTIZED}, 2)
    engine = zero.initialize(model=torch.nn.Sequential(embed, torch.nn.Linear(12, 17)), config=json)[0]
    before = safe_get_full_fp32_param(embed.weight)
    with torch.no_grad():
        engine(torch.tensor([[1, 2, 3]]))
    after = safe_get_full_fp32_param(embed.weight)
    rows = torch.ones(17, dtype=torch.bool)
    rows[1:4] = False
    assert torch.equal(before[rows], after[rows])
    assert (after[1:4].norm(dim=1) < 1.01).all() and (before[1:4].norm(dim=1) > 1.01).all()
    engine.destroy()


def test_what_is_not_finite_is_seen_and_leaves_no_error() -> None:
    for bad in (float("inf"), float("-inf"), float("nan")):
        gradient, feedback = torch.ones(128), ErrorFeedback(128, 1, torch.device("cpu"))
        gradient[70] = bad
        sent = decode(feedback.encode(gradient), torch.empty(128))
        assert sent[:64].isfinite().all() and not sent[64:].isfinite().any()
        assert decode(feedback.encode(torch.ones(128)), torch.empty(128)).isfinite().all()
