"""The promise: with `"local_sgd": {"sync_every": k}` replicas train by themselves, and become their mean every k steps.

A replica has the bits of an engine that trains alone on the replica's part of the batch; from mean to mean nothing of a
gradient or a parameter leaves it.
"""

from __future__ import annotations

import logging
import math
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from marks import longer
from models import WIDE, batch, make_net
from ranks import listening
from scenario import Record, differences, run, scenario, settings

import zero
from zero.config import load
from zero.config.errors import ConfigError
from zero.core.master import rounded
from zero.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
)

MOMENTS = ("exp_avg", "exp_avg_sq")
BETWEEN = {"gradient norm", "conditions of the ranks"}  # numbers that go to all ranks at each step


class State(NamedTuple):
    """What a replica has: exact values by parameter, moments by key, norms of its steps."""

    exact: dict[str, torch.Tensor]
    moments: dict[str, dict[str, torch.Tensor]]
    norms: list[float | None]


def mean(states: list[State]) -> State:
    """In the order of replicas, as fp32."""

    def of(many: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        return {name: sum((each[name] for each in many[1:]), many[0][name]) / len(many) for name in many[0]}

    keys = states[0].moments
    return State(of([s.exact for s in states]), {key: of([s.moments[key] for s in states]) for key in keys}, [])


def model(json: dict[str, Any]) -> torch.nn.Module:
    return make_net(width=WIDE) if "8bit" in str(json) else make_net()


def train(json: dict[str, Any], first: int, steps: int, offset: int = 0, start: State | None = None) -> State:
    """Some steps of an engine whose rank r trains on the part offset + r of the data, from a given state."""
    json = settings(json, dist.get_world_size())
    engine = zero.initialize(model=model(json), config=json)[0]
    params = dict(engine.module.named_parameters())
    for name, param in params.items() if start is not None else ():
        safe_set_full_fp32_param(param, start.exact[name])
        for key in start.moments:
            safe_set_full_optimizer_state(param, start.moments[key][name], key)
        safe_set_full_optimizer_state(param, first, "step")
    norms, each = [], json["gradient_accumulation_steps"]
    for number in range(first * each, (first + steps) * each):
        engine.backward(engine(*batch(1000 * (offset + dist.get_rank()) + number, 2)))
        engine.step()
        norms += [engine.get_global_grad_norm()] if (number + 1) % each == 0 else []
    exact = {name: safe_get_full_fp32_param(param).clone() for name, param in params.items()}
    moments = {
        key: {name: safe_get_full_optimizer_state(param, key).clone() for name, param in params.items()}
        for key in MOMENTS
    }
    computes = {name: rounded(exact[name], param.dtype) for name, param in params.items()}
    assert all(torch.equal(param, computes[name]) for name, param in params.items())
    engine.destroy()
    return State(exact, moments, norms)


def same(one: State, other: State) -> None:
    for name, values in other.exact.items():
        assert torch.equal(one.exact[name], values), name
        for key in other.moments:
            assert torch.equal(one.moments[key][name], other.moments[key][name]), (key, name)


LAMB = {"type": "Lamb", "params": {"lr": 1e-2}}
CODED = {"type": "AdamW", "params": {"lr": 1e-2, "zero": {"moments": "8bit"}}}


@pytest.mark.parametrize(
    ("world", "shards", "every", "json"),
    [
        (2, 1, 2, {"accumulation": 2, "gradient_clipping": 0.5}),
        (4, 2, 3, {"precision": "bf16", "gradient_clipping": 0.5}),
        *longer(
            (2, 1, 3, {"precision": "bf16", "accumulation": 2}),
            (4, 2, 2, {"accumulation": 2, "gradient_clipping": 0.5, "prescale_gradients": True}),
            (4, 1, 2, {"gradient_clipping": 0.5}),
            (2, 1, 2, {"optimizer": LAMB}),
            (4, 2, 2, {"optimizer": LAMB}),
            (4, 2, 2, {"optimizer": CODED}),
        ),
    ],
)
def test_replicas_have_the_bits_of_engines_that_train_alone_and_then_those_of_their_mean(
    pool: Any, world: int, shards: int, every: int, json: dict[str, Any]
) -> None:
    json = {**json, "stage": int(shards > 1)}
    ours = {"check_order": True, **({"shard_size": shards} if shards > 1 else {})}
    ours = {**json, "local_sgd": {"sync_every": every}, "zero": ours}
    start, norms = None, [[] for _ in range(world)]
    for first in (0, every):  # two means
        alone = [pool.run(shards, train, json, first, every, part, start) for part in range(0, world, shards)]
        start = mean([ranks[0] for ranks in alone])
        if json.get("optimizer") == CODED:  # as it is kept
            start = pool.run(shards, train, json, first + every, 0, 0, start)[0]
        for rank in range(world):
            norms[rank] += alone[rank // shards][0].norms
    for rank, found in enumerate(pool.run(world, train, ours, 0, 2 * every)):
        same(found, start)
        # Four ranks pad units otherwise than two, so that shards end elsewhere, and squares add up in another order.
        assert found.norms == (norms[rank] if shards == 1 else pytest.approx(norms[rank], rel=2**-50, abs=0)), rank
    # One step on they are apart again.
    apart = pool.run(world, train, ours, 0, 2 * every + 1)
    last = [pool.run(shards, train, json, 2 * every, 1, part, start)[0] for part in range(0, world, shards)]
    for rank, found in enumerate(apart):
        same(found, last[rank // shards])


class Replica:
    """One replica in plain torch: torch's AdamW over fp32 values, which the model computes with in its dtype."""

    def __init__(self, part: int, dtype: torch.dtype) -> None:
        self.part, self.net = part, make_net().to(dtype)
        self.exact = [param.detach().float().clone() for param in make_net().parameters()]
        self.optimizer = torch.optim.AdamW(self.exact, lr=1e-2, weight_decay=0.1)

    def show(self) -> None:
        with torch.no_grad():
            for param, exact in zip(self.net.parameters(), self.exact, strict=True):
                param.copy_(rounded(exact, param.dtype))

    def step(self, number: int, accumulation: int) -> None:
        sums = [torch.zeros_like(exact) for exact in self.exact]
        for turn in range(accumulation):
            self.net.zero_grad()
            self.net(*batch(1000 * self.part + accumulation * number + turn, 2)).backward()
            for total, param in zip(sums, self.net.parameters(), strict=True):
                total += param.grad.float()
        for exact, total in zip(self.exact, sums, strict=True):
            exact.grad = total / accumulation
        self.optimizer.step()
        self.show()


def torch_oracle(world: int, precision: str, steps: int, every: int, accumulation: int) -> list[list[torch.Tensor]]:
    """Exact values and moments of the mean after these steps, by replicas that are trained one after the other."""
    replicas = [Replica(part, torch.bfloat16 if precision == "bf16" else torch.float32) for part in range(world)]
    for number in range(steps):
        for replica in replicas:
            replica.step(number, accumulation)
        if (number + 1) % every == 0:
            states = [[replica.optimizer.state[exact] for exact in replica.exact] for replica in replicas]
            kinds = [[replica.exact for replica in replicas]]
            kinds += [[[each[key] for each in state] for state in states] for key in MOMENTS]
            for kind in kinds:
                for those in zip(*kind, strict=True):
                    middle = sum(those[1:], those[0]) / world
                    for each in those:
                        each.copy_(middle)
            for replica in replicas:
                replica.show()
    return [kind[0] for kind in kinds]


def torch_adamw(json: dict[str, Any], steps: int) -> State:
    """On the ranks: with the class of torch instead of our kernels."""
    json = {key: value for key, value in settings(json, dist.get_world_size()).items() if key != "optimizer"}
    given = lambda groups: torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1)  # noqa: E731
    engine = zero.initialize(model=make_net(), optimizer=given, config=json)[0]
    each = json["gradient_accumulation_steps"]
    for number in range(steps * each):
        engine.backward(engine(*batch(1000 * dist.get_rank() + number, 2)))
        engine.step()
    params = dict(engine.module.named_parameters())
    exact = {name: safe_get_full_fp32_param(param).clone() for name, param in params.items()}
    moments = {
        key: {name: safe_get_full_optimizer_state(p, key).clone() for name, p in params.items()} for key in MOMENTS
    }
    engine.destroy()
    return State(exact, moments, [])


@pytest.mark.parametrize(
    ("every", "precision", "accumulation"), [(2, "bf16", 2), *longer((3, "fp32", 1), (2, "fp32", 2), (3, "bf16", 1))]
)
def test_two_replicas_train_bit_for_bit_as_plain_torch(
    pool: Any, every: int, precision: str, accumulation: int
) -> None:
    json = {"precision": precision, "accumulation": accumulation, "local_sgd": {"sync_every": every}}
    exact, *moments = torch_oracle(2, precision, 2 * every, every, accumulation)
    for found in pool.run(2, torch_adamw, json, 2 * every):
        for name, value in zip(found.exact, exact, strict=True):
            assert torch.equal(found.exact[name], value), name
        for key, values in zip(MOMENTS, moments, strict=True):
            for name, value in zip(found.moments[key], values, strict=True):
                assert torch.equal(found.moments[key][name], value), (key, name)


@pytest.mark.parametrize("stage", [0, *longer(1, 3)])
def test_each_step_is_plain_training(pool: Any, stage: int) -> None:
    plain = scenario(pool, "net", {"stage": stage}, state=True)
    found = scenario(pool, "net", {"stage": stage, "local_sgd": {"sync_every": 1}}, state=True)
    for one, other in zip(found, plain, strict=True):
        assert not differences(one, other, "losses", "norms", "weights", "exact", "moments")


def sent(json: dict[str, Any], steps: int) -> list[list[tuple[str, tuple[int, ...]]]]:
    """Of each step the collectives that this rank waited for, with their ranks."""
    found: list[list[tuple[str, tuple[int, ...]]]] = [[]]

    def loop(engine: Any, number: int, inputs: Any) -> torch.Tensor:
        if number == 0:
            seen = lambda collective, *_: found[-1].append((collective.direction, collective.ranks))  # noqa: E731
            engine._sharded.world.watchdog.events.subscribe(waited=seen)
        engine.backward(loss := engine(*inputs))
        return loss

    run("net", json, steps, loop=loop, watch=lambda engine, number: found.append([]))
    return found[:steps]


@pytest.mark.parametrize(("world", "shards"), [(4, 2), *longer((2, 1), (4, 1))])
def test_between_means_replicas_exchange_only_the_numbers_of_a_step(pool: Any, world: int, shards: int) -> None:
    ours = {"shard_size": shards} if shards > 1 else {}
    json = {"stage": int(shards > 1), "zero": ours, "local_sgd": {"sync_every": 3}}
    for rank, steps in enumerate(pool.run(world, sent, json, 6)):
        own = set(range(rank // shards * shards, (rank // shards + 1) * shards))
        outside = [[what for what, ranks in step if not {*ranks} <= own] for step in steps]
        assert [set(step) <= BETWEEN for step in outside] == [True, True, False] * 2, outside
        assert {*outside[2]} - BETWEEN == {"reduce", "replica gather"}


def overflowing() -> tuple[list[Any], list[float | None], bool]:
    """Of each step whether it was skipped, the loss scale behind it; and whether the replicas are one at the end."""

    def loop(engine: Any, number: int, inputs: Any) -> torch.Tensor:
        loss = engine(*inputs)
        engine.backward(loss * math.inf if number == 1 and dist.get_rank() == 1 else loss)
        return loss

    def watch(engine: Any, number: int) -> tuple[bool, float]:
        return engine.optimizer.overflow, engine.optimizer.loss_scale

    json = {"fp16": {"enabled": True, "initial_scale_power": 4, "hysteresis": 1}}
    record = run("net", {**json, "local_sgd": {"sync_every": 2}}, 4, loop=loop, watch=watch)
    weights = [torch.zeros_like(each) for each in record.weights.values()]
    for each, own in zip(weights, record.weights.values(), strict=True):
        dist.broadcast(each.copy_(own), 0)
    return record.seen, record.norms, all(map(torch.equal, weights, record.weights.values()))


def test_all_replicas_skip_the_step_of_one_with_an_overflow(pool: Any) -> None:
    for seen, norms, one in pool.run(2, overflowing):
        assert seen == [(False, 16.0), (True, 8.0), (False, 8.0), (False, 8.0)]
        assert [math.isfinite(norm) for norm in norms] == [True, False, True, True]
        assert one


@pytest.mark.ranks(2)
def test_of_an_optimizer_s_single_numbers_those_that_are_fractions_are_averaged_too() -> None:
    json = settings({"local_sgd": {"sync_every": 2}, "zero_allow_untested_optimizer": True}, 2)
    engine = zero.initialize(model=make_net(), optimizer=Measured, config=json)[0]
    for number in range(2):
        engine.backward(engine(*batch(1000 * dist.get_rank() + number, 2)))
        engine.step()
        unit = engine._sharded.trained[0]
        states, group = engine.optimizer.states, engine.optimizer.param_groups[0]
        found = torch.tensor([states.number(unit, group, "largest"), states.number(unit, group, "count")])
        both = [torch.zeros(2), torch.zeros(2)]
        dist.all_gather(both, found)
        assert torch.equal(*both) == bool(number)  # apart after the first step, one after the second
        assert found[1] == 2 * (number + 1)
    engine.destroy()


class Measured(torch.optim.SGD):
    """Keeps the largest gradient that it has seen, and an integer."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, lr=lr)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            state = self.state[param]
            state["largest"] = max(state.get("largest", 0.0), param.grad.abs().max().item())
            state["count"] = state.get("count", 0) + 2
            state["last"] = param.grad.clone()
        super().step()


def differ(values: torch.Tensor) -> bool:
    """Whether ranks have other values."""
    own = values.detach().cpu()  # gloo
    dist.broadcast(first := own.clone(), 0)
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, not torch.equal(first, own))
    return any(found)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("way", ["module_state_dict", "save_16bit_model", "weight_updates", "average_replicas"])
def test_what_gives_weights_away_takes_the_mean_first(way: str, tmp_path: Any) -> None:
    with listening(logging.INFO) as said:
        engine = zero.initialize(model=make_net(), config=settings({"local_sgd": {"sync_every": 9}}, 2))[0]
        weight = engine.module.head.weight
        for number in range(2):
            engine.backward(engine(*batch(1000 * dist.get_rank() + number, 2)))
            engine.step()
        assert differ(weight)
        own = weight.detach().cpu()
        dist.all_gather(both := [torch.zeros_like(own), torch.zeros_like(own)], own)
        folder = [str(tmp_path)]
        dist.broadcast_object_list(folder)
        found = getattr(engine, way)(*(folder if way == "save_16bit_model" else ()))
        if way == "weight_updates":
            list(found)
        assert torch.equal(weight, (both[0] + both[1]) / 2)
        if way == "module_state_dict":
            assert torch.equal(found["head.weight"], weight)
        early = [text for text in said if "2 steps apart" in text]
        assert len(early) == (dist.get_rank() == 0)
        engine.backward(engine(*batch(dist.get_rank(), 2)))
        engine.step()
        engine.destroy()
        assert any("1 step after a mean" in text for text in said) == (dist.get_rank() == 0)


def saved(json: dict[str, Any], steps: int, at: int, folder: str) -> Record:
    def watch(engine: Any, number: int) -> None:
        if number + 1 == at:
            engine.save_checkpoint(folder)

    return run("net", json, steps, watch=watch, state=True)


@pytest.mark.parametrize(
    ("world", "shards", "precision"), [(2, 1, "bf16"), *longer((4, 2, "fp32"), (4, 2, "bf16"), (2, 1, "fp32"))]
)
def test_a_resumed_run_has_the_bits_of_the_run_that_saved(
    pool: Any, world: int, shards: int, precision: str, tmp_path: Any
) -> None:
    ours = {"shard_size": shards} if shards > 1 else {}
    json = {"stage": int(shards > 1), "zero": ours, "precision": precision, "local_sgd": {"sync_every": 2}}
    unbroken = scenario(pool, "net", json, world, 6, state=True)
    for at in (4, 3):  # at a mean, which changes nothing; and between two, which takes one
        folder = str(tmp_path / str(at))
        whole = pool.run(world, saved, json, 6, at, folder)
        resumed = scenario(pool, "net", json, world, 6 - at, load=folder, first=at, state=True)
        for one, other, never in zip(resumed, whole, unbroken, strict=True):
            assert not differences(one, other, "weights", "exact", "moments")
            assert one.losses == other.losses[at:]
            assert bool(differences(other, never, "exact")) == (at == 3)


@pytest.mark.parametrize(
    ("json", "said"),
    [
        ({"stage": 2}, "zero_optimization.stage 2 (set 0 or 1); keep one"),
        ({"stage": 3}, "zero_optimization.stage 3"),
        (
            {"stage": 1},
            "stage 1 over all 4 ranks as one replica (set zero.shard_size to a divisor of 4 below it, or the stage",
        ),
        ({"sequence_parallel_size": 2}, "a grid of dp_replicate 2 x cp 2"),
        ({"tensor_parallel": {"autotp_size": 2}}, "a grid of dp_replicate 2 x tp 2"),
        ({"pipeline": {"stages": 2}}, "a grid of pp 2 x dp_replicate 2"),
        ({"expert_parallel": {"enabled": True, "autoep_size": 2}}, "a grid of"),
        ({"zero": {"reduce": "tree", "check_replicas": 5}}, "zero.reduce 'tree', zero.check_replicas; keep one"),
        ({"optimizer": {"type": "Muon", "params": {"beta2": 0.9}}}, "optimizer.params.beta2; keep one"),
        ({"zero": {"mean": "tokens"}}, "zero.mean 'tokens'"),
        ({"zero": {"alarm": {"loss": 6}, "unit_norms": True}}, "zero.unit_norms, zero.alarm"),
        ({"managed_gradient_accumulation": False}, "managed_gradient_accumulation false"),
        (
            {"stage": 1, "zero": {"shard_size": 2}, "section": {"offload_optimizer": {"device": "cpu"}}},
            "zero_optimization.offload_optimizer",
        ),
    ],
)
def test_what_cannot_be_is_refused(json: dict[str, Any], said: str) -> None:
    whole = settings({**json, "local_sgd": {"sync_every": 4}}, 4)
    del whole["train_batch_size"]
    with pytest.raises(ConfigError) as error:
        load(whole, 4)
    assert f"local_sgd.sync_every: got 4, and each step of all ranks with {said}" in str(error.value)
    whole["local_sgd"] = {"sync_every": 1}
    load(whole, 4)
