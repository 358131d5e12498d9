"""The promise: a parameter's exact value, gradient and optimizer state can be read and written on every stage."""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from closeness import error, ulps
from marks import longer
from models import WIDE, batch, config, make_net
from torch import nn

import zero
from zero.core.values import piece
from zero.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_grad,
    safe_set_local_optimizer_state,
    safe_update_full_grad_vectorized,
)

KINDS = {
    "fp32": ({}, "fp32"),
    "bf16 remainder": ({"zero": {"master": "remainder"}}, "bf16"),
    "bf16 fp32 moments in 8bit": ({"zero": {"master": "fp32", "moments": "8bit"}}, "bf16"),
    "bf16 moments in bf16": ({"zero": {"moments": "bf16"}}, "bf16"),
}


def share(index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's part of a batch of 6."""
    world, rank = dist.get_world_size(), dist.get_rank()
    tokens, targets = batch(index, 6)
    part = slice(6 // world * rank, 6 // world * (rank + 1))
    return tokens[part], targets[part]


def step(engine: Any, index: int) -> None:
    engine.backward(engine(*share(index)))
    engine.step()


def start(stage: int, kind: str = "fp32", seed: int = 7, accumulation: int = 1, **optimizer: Any) -> Any:
    """An engine; the net is wide enough for moments in 8 bit, and its sizes divide by nothing."""
    extra, dtype = KINDS[kind]
    world = dist.get_world_size()
    chosen = optimizer or {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1, **extra}}
    settings = config(
        stage,
        world,
        micro=6 // world,
        accumulation=accumulation,
        bf16={"enabled": dtype == "bf16"},
        optimizer=chosen,
    )
    return zero.initialize(model=make_net(seed, blocks=1, width=WIDE), config=settings)[0]


def named(engine: Any) -> list[tuple[str, nn.Parameter]]:
    return list(engine.module.named_parameters())


def read(engine: Any, keys: tuple[str, ...]) -> dict[str, Any]:
    """Everything that makes up the run, by parameter."""
    return {
        name: (safe_get_full_fp32_param(param), *(safe_get_full_optimizer_state(param, key) for key in keys))
        for name, param in named(engine)
    }


def write(engine: Any, values: dict[str, Any], keys: tuple[str, ...]) -> None:
    for name, param in named(engine):
        value, *states = values[name]
        safe_set_full_fp32_param(param, value)
        for key, state in zip(keys, states, strict=True):
            safe_set_full_optimizer_state(param, state, key)


def same(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def all_same(one: dict[str, Any], two: dict[str, Any]) -> bool:
    return one.keys() == two.keys() and all(
        len(one[name]) == len(two[name]) and all(map(same, one[name], two[name])) for name in one
    )


ADAM = ("exp_avg", "exp_avg_sq", "step")


def moved(kind: str, keys: tuple[str, ...] = ADAM, stages: Iterable[int] = range(4), **optimizer: Any) -> list[bool]:
    """Two steps on one stage; then all is read there and written to fresh engines, and each goes on alone."""
    source = start(1, kind, **optimizer)
    read(source, keys)  # before the first step: must not change it
    for index in range(2):
        step(source, index)
    values = read(source, keys)
    said = [all(state[-1] == 2 for state in values.values()) if "step" in keys else True]
    copies = [start(stage, kind, seed=8, **optimizer) for stage in stages]
    for engine in copies:
        write(engine, values, keys)
        said.append(all_same(read(engine, keys), values))
    for engine in [source, *copies]:
        for index in (2, 3):
            step(engine, index)
    wanted = read(source, keys)
    said += [all_same(read(engine, keys), wanted) for engine in copies]
    said.append(not all_same(values, wanted))
    return said


@pytest.mark.parametrize("kind", ["bf16 remainder", *longer(*(kind for kind in KINDS if kind != "bf16 remainder"))])
def test_a_run_moved_by_hand_goes_on_bit_by_bit(pool, kind):
    assert all(all(found) for found in pool.run(3, moved, kind))


OTHERS = [
    ("Lion", {}, ("exp_avg", "step")),
    ("SGD", {"momentum": 0.9}, ("momentum_buffer", "step")),
    ("Adagrad", {"initial_accumulator_value": 0.1}, ("sum", "step")),
    ("NAdam", {}, ("exp_avg", "exp_avg_sq", "mu_product", "step")),
    ("RMSprop", {"momentum": 0.5, "centered": True}, ("square_avg", "momentum_buffer", "grad_avg", "step")),
    ("SGD", {"momentum": 0.9, "foreach": True}, ("momentum_buffer",)),
]


@pytest.mark.long
@pytest.mark.ranks(2)
def test_every_rules_states_can_be_moved():
    found = {
        f"{kind} {params}": all(moved("fp32", keys, (0, 3), type=kind, params={"lr": 1e-3, **params}))
        for kind, params, keys in OTHERS
    }
    assert found
    assert all(found.values()), found


def plain_gradients(world: int, steps: int) -> dict[str, torch.Tensor]:
    """Averaged over ranks and micro-batches, summed in the engine's order: micro-batches of a rank, then ranks."""
    rows = []
    for rank in range(world):
        net = make_net(blocks=1, width=WIDE)
        for index in range(steps):
            tokens, targets = batch(index, 6)
            part = slice(6 // world * rank, 6 // world * (rank + 1))
            net(tokens[part], targets[part]).backward()
        rows.append({name: param.grad for name, param in net.named_parameters()})
    return {name: sum(row[name] for row in rows) for name in rows[0]}


def gradients(stage: int) -> list[bool]:
    """Against plain torch after each of two micro-batches; nothing before and after; local pieces fit."""
    engine = start(stage, accumulation=2)
    found, said = [], [all(safe_get_full_grad(param) is None for _, param in named(engine))]
    for index in range(2):
        engine.backward(engine(*share(index)))
        found.append({name: safe_get_full_grad(param) for name, param in named(engine)})
        for name, wanted in plain_gradients(dist.get_world_size(), index + 1).items():
            # Where every micro-batch is reduced on its own, the order of the sum is another.
            limit = 0.0 if index == 0 or stage < 2 else ulps(8, [wanted / 4])
            said.append(error([found[-1][name]], [wanted / 4]) <= limit)
        if index == 1:
            for name, param in named(engine):
                mine = piece(param._zero_owner)
                whole = found[-1][name].flatten()
                said.append(torch.equal(safe_get_local_grad(param), whole[mine.start : mine.start + mine.numel]))
        engine.step()
    said.append(all(safe_get_full_grad(param) is None for _, param in named(engine)))
    said.append(all(safe_get_local_grad(param) is None for _, param in named(engine)))
    return said


@pytest.mark.parametrize("stage", [1, 3, *longer(0, 2)])
def test_gradients_are_the_average_so_far(pool, stage):
    assert all(all(said) for said in pool.run(2, gradients, stage))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [1, 3, *longer(0, 2)])
def test_a_gradient_that_is_set_is_the_one_that_is_taken(stage):
    """Plain SGD shows what gradient a step took; one is set in the middle of a window, and one more added to it."""
    engine = start(stage, accumulation=2, type="SGD", params={"lr": 0.5})
    before = {name: safe_get_full_fp32_param(param) for name, param in named(engine)}
    engine.backward(engine(*share(0)))
    for _, param in named(engine):
        safe_set_full_grad(param, torch.full(param.shape, 2.0))
    said = [all(torch.equal(safe_get_full_grad(p), torch.full(p.shape, 2.0)) for _, p in named(engine))]
    engine.step()
    engine.backward(engine(*share(1)))
    late = {name: safe_get_full_grad(param) for name, param in named(engine)}
    said.append(any(not torch.equal(grad, torch.full(grad.shape, 2.0)) for grad in late.values()))
    safe_update_full_grad_vectorized((param for _, param in named(engine)), lambda grad, param: grad * 2)
    for name, param in named(engine):
        if name == "head.bias":
            safe_set_local_grad(param, safe_get_local_grad(param) * 0)
    engine.step()
    for name, param in named(engine):
        factor = 0.0 if name == "head.bias" else 2.0
        said.append(torch.equal(safe_get_full_fp32_param(param), before[name] - 0.5 * (factor * late[name])))
    assert all(said)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [1, 3, *longer(0, 2)])
def test_what_is_set_is_seen_at_once(stage):
    """A value that is set shows in the 16-bit parameter, in the next forward, and in every rank's copy."""
    engine = start(stage, "bf16 remainder")
    step(engine, 0)
    said = []
    for _, param in named(engine):
        generator = torch.Generator().manual_seed(5)
        value = torch.randn(param.shape, generator=generator)
        safe_set_full_fp32_param(param, value if dist.get_rank() == 0 else value + 1)  # rank 0's counts
        with zero.GatheredParameters(param):
            said.append(torch.equal(param, zero.core.master.rounded(value, torch.bfloat16)))
        said.append(torch.equal(safe_get_full_fp32_param(param), value))
        safe_set_local_fp32_param(param, safe_get_local_fp32_param(param) / 3)
        with zero.GatheredParameters(param):
            said.append(torch.equal(param, zero.core.master.rounded(value / 3, torch.bfloat16)))
            safe_set_full_fp32_param(param, value / 8)
            said.append(torch.equal(param, zero.core.master.rounded(value / 8, torch.bfloat16)))
        safe_set_local_optimizer_state(param, safe_get_local_optimizer_state(param, "exp_avg") + 1, "exp_avg")
        said.append((safe_get_full_optimizer_state(param, "exp_avg") > 0.5).all().item())
        safe_set_local_optimizer_state(param, 7, "step")
        said.append(safe_get_full_optimizer_state(param, "step") == 7)
    first = engine(*share(1)).item()
    with torch.no_grad():
        said.append(first == engine(*share(1)).item())
    step(engine, 1)
    said.append(engine.was_step_applied())
    assert all(said)


def errors(stage: int) -> list[str]:
    """What both ranks hear when one or both go wrong; afterwards all is as it was and works."""
    net = make_net(blocks=1)
    net.embed.weight.requires_grad_(False)
    engine = zero.initialize(model=net, config=config(stage, 2))[0]
    rank, head = dist.get_rank(), engine.module.head.bias
    before = safe_get_full_fp32_param(head)
    good, bad = torch.zeros(17), torch.zeros(16)
    calls = [
        lambda: safe_set_full_fp32_param(head, bad if rank else good),
        lambda: safe_set_full_fp32_param(head, [0.0]),
        lambda: safe_set_full_optimizer_state(head, good, "exp_average"),
        lambda: safe_get_full_optimizer_state(head, "exp_average"),
        lambda: safe_set_full_optimizer_state(head, -1, "step"),
        lambda: safe_set_full_grad(head, good),
        lambda: safe_set_local_grad(head, safe_get_local_fp32_param(head)),
        lambda: safe_set_full_fp32_param(net.embed.weight, good),
        lambda: safe_get_full_fp32_param(head if rank else net.norm.bias),
        lambda: safe_set_full_fp32_param(nn.Parameter(good), good),
    ]
    said = []
    for call in calls:
        try:
            call()
            said.append("nothing")
        except (ValueError, RuntimeError) as error:
            said.append(f"{type(error).__name__}: {error}")
    untouched = torch.equal(before, safe_get_full_fp32_param(head))
    nothing = safe_get_full_fp32_param(net.embed.weight) is None and safe_get_full_grad(nn.Parameter(good)) is None
    return [*said, str(untouched and nothing)]


@pytest.mark.parametrize("stage", [0, 3])
def test_what_is_wrong_is_said_on_all_ranks(pool, stage):
    one, two = pool.run(2, errors, stage)
    starts = [
        "RuntimeError: safe_set_full_fp32_param: another rank cannot do it with parameter 'head.bias'",
        "ValueError: safe_set_full_fp32_param: got a list; wanted a floating-point tensor of shape (17,) for",
        "ValueError: safe_set_full_optimizer_state: unknown key 'exp_average' for parameter 'head.bias'; "
        "known: exp_avg, exp_avg_sq, step",
        "ValueError: safe_get_full_optimizer_state: unknown key 'exp_average'",
        "ValueError: safe_set_full_optimizer_state: got -1 for 'step'",
        "RuntimeError: safe_set_full_grad: parameter 'head.bias' has no gradient",
        "RuntimeError: safe_set_local_grad: parameter 'head.bias' has no gradient",
        "ValueError: safe_set_full_fp32_param: parameter 'embed.weight' (frozen) is trained by no engine",
        "RuntimeError: rank 0 does safe_get_full_fp32_param with parameter 'norm.bias' and another rank something else",
        "ValueError: safe_set_full_fp32_param: parameter of shape (17,) is trained by no engine",
        "True",
    ]
    assert [text[: len(start)] for text, start in zip(one, starts, strict=True)] == starts
    assert two[0].startswith("ValueError: safe_set_full_fp32_param: got shape (16,)")
    assert two[1:8] == one[1:5] + [text.replace("rank 0", "rank 1") for text in one[5:8]]


def test_local_gradients_before_their_reduction_are_refused():
    engine = zero.initialize(model=make_net(), config=config(0, 1, accumulation=2))[0]
    engine.backward(engine(*batch(0, 2)))
    with pytest.raises(RuntimeError, match="is not reduced before the accumulation boundary"):
        safe_get_local_grad(engine.module.head.bias)


def test_a_pickled_parameter_leaves_the_engine_behind():
    engine = zero.initialize(model=make_net(), config=config(0, 1))[0]
    copy = pickle.loads(pickle.dumps(engine.module.head.bias))
    assert torch.equal(copy, engine.module.head.bias)
    assert safe_get_full_fp32_param(copy) is None
