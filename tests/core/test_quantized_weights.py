"""The promise: with `zero_quantized_weights` all ranks compute with the same 8 bits of the exact values, and only that.

Whatever is kept or handed out is exact: masters, checkpoints, saved weights, GatheredParameters, the module afterwards.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from marks import longer
from models import WIDE, make_net, share, step
from scenario import settings

import zero
from zero.kernels.wire import decode, encode
from zero.utils.full import safe_get_full_fp32_param

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
