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
from models import WIDTH, make_net
from ranks import said_by
from scenario import Model, run, scenario, seeded
from torch import nn

from zero.engine.hashing import hash_tensor
from zero.utils import safe_get_local_optimizer_state, safe_set_local_optimizer_state

NAME = "blocks.1.up.bias"


def flip(tensor: torch.Tensor, at: int, bit: int) -> None:
    """Flip one bit of element `at`, behind autograd's back."""
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize]
    tensor.detach().view(-1).view(kind)[at : at + 1].bitwise_xor_(1 << bit)


def hit_parameter(engine: Any) -> None:
    flip(engine.module.get_parameter(NAME).data, 3, 5)


def hit_rate(engine: Any) -> None:
    engine.optimizer.param_groups[0]["lr"] *= 1.5


def hit_exact(engine: Any) -> None:
    """What this rank keeps of exact values of the unit; the functions that set them set all replicas."""
    unit = engine.module.get_parameter(NAME)._zero_owner.unit
    with unit.shard.acquired(changed=True):
        kept = unit.shard.master.tensor if engine.bfloat16_enabled() else unit.shard.values
        flip(kept, unit.plan.layout.fragments(unit.shard.window)[0].at, 1)


def hit_moment(key: str) -> Callable[[Any], None]:
    """One element of the state of the first parameter of the unit of which this rank keeps any."""

    def hit(engine: Any) -> None:
        for param in [engine.module.get_parameter(NAME), *engine.module.blocks[1].parameters()]:
            kept = safe_get_local_optimizer_state(param, key)
            if kept.numel():
                flip(kept, 0, 12)  # a lower one may be rounded away before the comparison
                safe_set_local_optimizer_state(param, kept, key)
                return

    return hit


HITS = {
    "parameter": hit_parameter,
    "rate": hit_rate,
    "master": hit_exact,
    "moment": hit_moment("exp_avg_sq"),
    "own moment": hit_moment("exp_avg"),
}


def flipped(cases: list[tuple], victim: int, shard_size: int = 0, offload: bool = False) -> list[tuple[int, str]]:
    """For each (stage, bf16, N, what): the steps after the flip until it was reported, and the report."""
    found = []
    section = {"offload_optimizer": {"device": "cpu"}} if offload else {}
    for stage, bf16, every, what in cases:
        ours = {"check_replicas": every, "shard_size": shard_size}
        json = {"stage": stage, "bf16": {"enabled": bf16}, "zero": ours, "section": section}
        found.append(reported("net", json, 8, 4, lambda engine, what=what: HITS[what](engine), victim))
    return found


def reported(model: Any, json: Any, steps: int, at: int, hit: Callable[[Any], None], victim: int) -> tuple[int, str]:
    """Hit a rank before step `at`: the steps until it was reported, and the report."""
    last = 0

    def loop(engine: Any, number: int, inputs: Any) -> torch.Tensor:
        nonlocal last
        last = number
        if number == at and dist.get_rank() == victim:
            hit(engine)
        engine.backward(loss := engine(*inputs))
        return loss

    text = said_by(lambda: run(model, json, steps, loop=loop))
    return (-1, text) if text == "nothing" else (last - at + 1, text)


CASES = [
    *((stage, bf16, every, "parameter") for stage in (0, 1, 2) for bf16 in (False, True) for every in (1, 3)),
    *((0, True, every, what) for what in ("master", "moment") for every in (1, 3)),
    (0, False, 3, "moment"),
    *((stage, stage == 3, 2, "rate") for stage in (0, 1, 3)),
]


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
            if what == "master":
                name = "parameter 'blocks.1."
            if what in ("master", "moment") and every == 1:
                name = f"{'the master' if what == 'master' else 'exp_avg_sq'} of {name}"
            assert name in text
            who = f"rank {victim} differs from ranks 0, 2" if world == 3 else "rank 0 and rank 1 hold different values"
            assert who in text


@pytest.mark.parametrize("offload", [False, *longer(True)])
def test_so_is_one_in_what_is_cut_where_another_replica_has_the_same(pool, offload):
    cases = [(3, True, 1, "master"), (2, True, 2, "own moment")]
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


def normed(number: int, rank: int) -> tuple[torch.Tensor]:
    return (torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * number + rank)),)


def buffers(stage: int, every: int, name: str | None) -> tuple[int, str]:
    """Train with a buffer flipped on rank 1 at step 4, if one is named."""

    def hit(engine: Any) -> None:
        if name:
            flip(engine.module.get_buffer(name), 0, 0)

    json = {"stage": stage, "zero": {"check_replicas": every}}
    return reported(Model(seeded(Normed), normed), json, 8, 4, hit, 1)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_buffer_that_came_apart_is_named_and_one_that_always_was_is_not(pool, stage):
    for every, name in ((1, "table"), (3, "flag"), (2, "norm.num_batches_tracked")):
        for later, text in pool.run(2, buffers, stage, every, name):
            assert 1 <= later <= every
            assert f"buffer '{name}' is not the same" in text
    for name in (None, "norm.running_mean"):
        assert pool.run(2, buffers, stage, 1, name) == [(-1, "nothing")] * 2


def half_frozen() -> nn.Module:
    model = make_net()
    model.embed.requires_grad_(False)
    model.blocks[0].up.requires_grad_(False)
    return model


def edit(engine: Any, number: int) -> None:
    """One that all ranks make."""
    if number == 11 and engine.zero_optimization_stage() < 3:
        with torch.no_grad():
            engine.module.head.weight.mul_(0.5)


@pytest.mark.parametrize(("stage", "world"), [(1, 2), *longer((3, 4))])
def test_a_clean_run_is_not_reported(pool, stage, world):
    ours = {"check_replicas": 2, "shard_size": 2 if world == 4 else 0}
    for model, precision, kind, params in (
        ("net", "fp32", "RMSprop", {}),
        (half_frozen, "bf16", "AdamW", {}),
        ("net", "bf16", "AdamW", {"zero": {"moments": "8bit"}}),
    ):
        json = {"stage": stage, "precision": precision, "accumulation": 2, "zero": ours}
        json["optimizer"] = {"type": kind, "params": {"lr": 1e-3, **params}}
        assert [record.steps for record in scenario(pool, model, json, world, 12, watch=edit)] == [12] * world


# --- the hash -----------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(
    numel=st.integers(1, 300),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.uint8, torch.int64]),
    data=st.data(),
)
def test_every_flipped_bit_changes_the_hash(numel, dtype, data):
    at, bit = data.draw(st.integers(0, numel - 1)), data.draw(st.integers(0, 8 * dtype.itemsize - 2))
    tensor = torch.arange(numel).remainder(97).to(dtype)
    before = hash_tensor(tensor)
    flip(tensor, at, bit)
    assert hash_tensor(tensor) != before
