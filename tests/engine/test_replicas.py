"""The promise: with `"zero": {"check_replicas": N}` a bit that flips on one rank is reported within N steps.

The report names what differs and the rank, on all ranks. A clean run is never reported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from marks import longer
from models import WIDTH, batch, config, make_net, share
from torch import nn

import zero
from zero.core.hashing import hash_spans, hash_tensor
from zero.plan.layout import Span

NAME = "blocks.1.up.bias"


def flip(tensor: torch.Tensor, at: int, bit: int) -> None:
    """Flip one bit of element `at`, behind autograd's back."""
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize]
    tensor.detach().view(-1).view(kind)[at : at + 1].bitwise_xor_(1 << bit)


def hit_parameter(engine: Any) -> None:
    flip(dict(engine.module.named_parameters())[NAME].data, 3, 5)


def unit_of(engine: Any) -> Any:
    return dict(engine.module.named_parameters())[NAME]._zero_owner.unit


def hit_master(engine: Any) -> None:
    unit = unit_of(engine)
    flip(unit.master.tensor, unit.plan.layout.spans[NAME].start + 3, 0)


def hit_moment(engine: Any) -> None:
    unit = unit_of(engine)
    for name, held, tensor in engine.optimizer.shard_optimizer.tensors(unit):
        if name == "exp_avg_sq" and tensor.numel() == held.numel:
            flip(tensor, unit.plan.layout.spans[NAME].start - held.start + 3, 1)


def hit_rate(engine: Any) -> None:
    engine.optimizer.param_groups[0]["lr"] *= 1.5


def hit_own(what: str) -> Callable[[Any], None]:
    """Of what this rank holds alone in its replica: the first number of the unit that is one of a parameter."""

    def hit(engine: Any) -> None:
        unit = unit_of(engine)
        with unit.acquired(changed=True):
            kept = {name: tensor for name, _, tensor in engine.optimizer.shard_optimizer.tensors(unit)}
            kept |= {"shard": unit.shard, "master": unit.master.tensor}
            flip(kept[what], unit.plan.layout.fragments(unit.window)[0].at, 1)

    return hit


OWN = {f"own {what}": hit_own(what) for what in ("shard", "master", "exp_avg")}
HITS = {**OWN, "parameter": hit_parameter, "master": hit_master, "moment": hit_moment, "rate": hit_rate}


def flipped(cases: list[tuple], victim: int, shard_size: int = 0, offload: bool = False) -> list[tuple[int, str]]:
    """For each (stage, bf16, N, what): the steps after the flip until it was reported, and the report."""
    found = []
    for stage, bf16, every, what in cases:
        ours = {"check_replicas": every, "shard_size": shard_size}
        given_config = config(stage, dist.get_world_size(), bf16={"enabled": bf16}, zero=ours)
        if offload:
            given_config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
        engine, *_ = zero.initialize(model=make_net(), config=given_config)
        report = (-1, "nothing was reported")
        for step in range(8):
            if step == 4 and dist.get_rank() == victim:
                HITS[what](engine)
            try:
                engine.backward(engine(*share(step)))
                engine.step()
            except RuntimeError as error:
                report = (step - 3, str(error))
                break
        found.append(report)
        engine.destroy()
    return found


# fmt: off
CASES = [
    *((stage, bf16, every, "parameter") for stage in (0, 1, 2) for bf16 in (False, True) for every in (1, 3)),
    *((0, True, every, what) for what in ("master", "moment") for every in (1, 3)),
    (0, False, 3, "moment"), (0, False, 2, "rate"), (1, False, 2, "rate"), (3, True, 2, "rate"),
]
# fmt: on


@pytest.mark.parametrize(
    ("world", "victim", "cases"), [(2, 0, CASES[4:6]), *longer((3, 1, CASES))], ids=["two", "three"]
)
def test_a_flipped_bit_is_reported_within_n_steps_by_name_and_rank(pool, world, victim, cases):
    ranks = pool.run(world, flipped, cases, victim)
    for index, (stage, bf16, every, what) in enumerate(cases):
        for later, text in (results[index] for results in ranks):
            assert 1 <= later <= every, f"stage {stage}, bf16 {bf16}, every {every}, {what}: {text}"
            # Where steps lie between, the parameter has followed its master or moment.
            name = "'lr' of parameter group 0" if what == "rate" else f"parameter '{NAME}' of unit 'blocks.1'"
            if what in ("master", "moment") and every == 1:
                name = f"{'the master' if what == 'master' else 'exp_avg_sq'} of {name}"
            assert name in text
            who = f"rank {victim} differs from ranks 0, 2" if world == 3 else "rank 0 and rank 1 hold different values"
            assert who in text


@pytest.mark.parametrize("offload", [False, *longer(True)])
def test_so_is_one_in_what_is_cut_where_another_replica_has_the_same(pool, offload):
    cases = [(3, False, 2, "own shard"), (3, True, 1, "own master"), (2, True, 2, "own exp_avg")]
    for results in pool.run(4, flipped, cases, 1, 2, offload):
        for (_, _, every, _), (later, text) in zip(cases, results, strict=True):
            assert 1 <= later <= every, text
            assert "the shard of unit 'blocks.1', or its optimizer state, is not the same" in text
            assert "rank 1 and rank 3 hold different values" in text


class Normed(nn.Module):
    """Statistics that are each rank's own, and a table that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 7)
        self.norm = nn.BatchNorm1d(7)
        self.register_buffer("table", torch.arange(5))
        self.register_buffer("flag", torch.tensor([True, False]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.up(x)).square().mean() + self.table.sum() * 0


def buffers(stage: int, every: int, name: str | None) -> tuple[int, str]:
    """Train with a buffer flipped on rank 1 at step 6, if one is named."""
    given_config = config(stage, dist.get_world_size(), zero={"check_replicas": every})
    torch.manual_seed(1)
    engine, *_ = zero.initialize(model=Normed(), config=given_config)
    for step in range(12):
        if step == 6 and dist.get_rank() == 1 and name:
            flip(dict(engine.module.named_buffers())[name], 0, 0)
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        engine.backward(engine(x))
        try:
            engine.step()
        except RuntimeError as error:
            return step - 5, str(error)
    return -1, "nothing was reported"


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_buffer_that_came_apart_is_named_and_one_that_always_was_is_not(pool, stage):
    for every, name in ((1, "table"), (3, "flag"), (2, "norm.num_batches_tracked")):
        for later, text in pool.run(2, buffers, stage, every, name):
            assert 1 <= later <= every
            assert f"buffer '{name}' is not the same" in text
    for name in (None, "norm.running_mean"):
        assert pool.run(2, buffers, stage, 1, name) == [(-1, "nothing was reported")] * 2


def clean(stage: int, bf16: bool, optimizer: dict[str, Any], frozen: bool, shard_size: int = 0) -> int:
    ours = {"check_replicas": 2, "shard_size": shard_size}
    more = {"bf16": {"enabled": bf16}, "zero": ours, "optimizer": optimizer}
    model = make_net()
    if frozen:
        model.embed.requires_grad_(False)
        model.blocks[0].up.requires_grad_(False)
    engine, *_ = zero.initialize(model=model, config=config(stage, dist.get_world_size(), accumulation=2, **more))
    for step in range(24):
        engine.backward(engine(*share(step)))
        engine.step()
        if step == 11 and stage < 3:  # an edit that all ranks make
            with torch.no_grad():
                model.head.weight.mul_(0.5)
    return engine.global_steps


@pytest.mark.parametrize(("stage", "world"), [(1, 2), (3, 2), *longer((0, 2), (2, 2), (1, 4), (3, 4))])
def test_a_clean_run_is_not_reported(pool, stage, world):
    compact = {"type": "AdamW", "params": {"lr": 1e-3, "zero": {"moments": "8bit"}}}
    for bf16, optimizer, frozen in (
        (False, {"type": "RMSprop", "params": {"lr": 1e-3}}, False),
        (True, {"type": "AdamW", "params": {"lr": 1e-3}}, True),
        (True, compact, False),
    ):
        assert pool.run(world, clean, stage, bf16, optimizer, frozen, 2 if world == 4 else 0) == [12] * world


def test_one_rank_has_nothing_to_compare():
    engine, *_ = zero.initialize(model=make_net(), config=config(0, 1, zero={"check_replicas": 1}))
    engine.backward(engine(*batch(0, 2)))
    engine.step()
    assert engine.was_step_applied()


# --- the hash -----------------------------------------------------------------------------------------------


def seen(change: Callable[[torch.Tensor], None], numel: int, dtype: torch.dtype) -> bool:
    tensor = torch.randint(-100, 100, (numel,), generator=torch.Generator().manual_seed(numel)).to(dtype)
    other = tensor.clone()
    change(other)
    return bool(hash_tensor(tensor) != hash_tensor(other))


@settings(deadline=None)
@given(
    numel=st.integers(1, 300),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.uint8, torch.int64]),
    data=st.data(),
)
def test_every_flipped_bit_changes_the_hash(numel, dtype, data):
    at, bit = data.draw(st.integers(0, numel - 1)), data.draw(st.integers(0, 8 * dtype.itemsize - 2))
    assert seen(lambda tensor: flip(tensor, at, bit), numel, dtype)


def test_signs_flipped_in_pairs_and_elements_that_change_places_change_the_hash():
    for first in range(0, 60, 3):
        for second in range(first + 1, 60, 2):  # an even number of top bits, which plain weights would add up to 0

            def both(tensor: torch.Tensor, first: int = first, second: int = second) -> None:
                tensor[[first, second]] = -1 - tensor[[first, second]]

            assert seen(both, 64, torch.float32)
    assert seen(lambda tensor: tensor.copy_(tensor.flip(0)), 64, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_the_hash_of_a_span_is_of_its_elements_alone(dtype):
    flat = torch.arange(200_000).remainder(97).to(dtype)
    spans = [Span(0, 5), Span(16, 16), Span(48, 150_001), Span(199_984, 16), Span(32, 0)]
    before = hash_spans(flat, spans)
    inside = torch.zeros(200_000, dtype=torch.bool)
    for start, numel in spans:
        inside[start : start + numel] = True
    other = flat.clone()
    other[~inside] = 1
    assert torch.equal(hash_spans(other, spans), before)
    for index, (start, numel) in enumerate(spans[:4]):
        for at in (start, start + numel - 1):
            other = flat.clone()
            flip(other, at, 3)
            assert (hash_spans(other, spans) != before).nonzero().flatten().tolist() == [index]
