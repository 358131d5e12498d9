"""The promise: how the optimizer's state is kept changes no number that it should not, and all stages agree on it.

Masters as remainders give what fp32 masters give, bit by bit. Moments in bf16 and 8bit are rounded, but every stage
rounds them alike, and a run repeats itself.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from closeness import error, ulps
from marks import longer
from models import WIDE, batch, config, make_net
from scenario import Model, Record, run, same

import zero
from zero.utils import safe_get_full_fp32_param

ADAMW = ("AdamW", {"lr": 1e-2, "weight_decay": 0.1})
SAMPLES = 6  # of the global batch, whatever the world size


def some(number: int, part: int) -> tuple[torch.Tensor, ...]:
    each = SAMPLES // dist.get_world_size()
    return tuple(whole[part * each : (part + 1) * each] for whole in batch(number, SAMPLES))


NET = Model(lambda: make_net(blocks=2), some)
LARGE = Model(lambda: make_net(blocks=2, width=WIDE), some)


def trained(
    cases: list[tuple[int, str, str]], optimizer: tuple[str, dict[str, Any]] = ADAMW, precision: str = "bf16"
) -> list[Record]:
    """One training for each stage, form of masters and form of moments."""
    kind, params = optimizer
    json = {"precision": precision, "gradient_clipping": 0.5, "micro": SAMPLES // dist.get_world_size()}
    found = []
    for stage, master, moments in cases:
        states = {"moments": moments} | ({"master": master} if master else {})
        chosen = {"type": kind, "params": {**params, "zero": states}}
        model = NET if moments == "fp32" else LARGE
        found.append(run(model, {"stage": stage, "optimizer": chosen, **json}, 4))
    return found


def masters(moments: str, stages: tuple[int, ...]) -> list[tuple[int, str, str]]:
    return [(stage, master, moments) for master in ("fp32", "remainder") for stage in stages]


def learned_the_same(found: list[Record]) -> bool:
    return all(same(one, found[0]) for one in found[1:]) and found[0].losses[-1] < found[0].losses[0]


@pytest.mark.ranks()
@pytest.mark.parametrize("world", [2, 3, *longer(1)])
def test_remainders_give_what_fp32_masters_give(world):
    assert learned_the_same(trained(masters("fp32", (0, 1, 2, 3))))


def test_ties_are_rounded_away_from_zero_and_masters_keep_every_bit():
    exact = torch.tensor([1 + 2**-8, -1 - 2**-8, 1 + 3 * 2**-8, 1 + 2**-23, 2**-140])  # the first three are ties
    rounded = torch.tensor([1 + 2**-7, -1 - 2**-7, 1 + 2**-6, 1])
    nbytes = []
    for master in ("remainder", "fp32"):
        net = make_net()
        with torch.no_grad():
            net.norm.weight[:5] = exact
        optimizer = {"type": "SGD", "params": {"lr": 0.1, "zero": {"master": master}}}
        engine, *_ = zero.initialize(model=net, config=config(0, 1, bf16={"enabled": True}, optimizer=optimizer))
        assert torch.equal(net.norm.weight[:4].float(), rounded)
        assert torch.equal(safe_get_full_fp32_param(net.norm.weight)[:5], exact)
        nbytes.append(engine.state_nbytes().optimizer)
        engine.destroy()
    assert 0 < 2 * nbytes[0] == nbytes[1]


@pytest.mark.parametrize(
    "optimizer",
    [
        ("Adam", {"lr": 1e-2, "weight_decay": 0.1, "adam_w_mode": False}),
        ("Lion", {"lr": 1e-2, "weight_decay": 0.1}),
        ("SGD", {"lr": 1e-1, "momentum": 0.9, "nesterov": True}),
        ("SGD", {"lr": 1e-1}),
        ("Adagrad", {"lr": 1e-2}),
    ],
    ids=["Adam", "Lion", "momentum", "SGD", "Adagrad"],
)
@pytest.mark.ranks(2)
def test_every_formula_takes_both_masters_and_8bit_moments(optimizer):
    assert learned_the_same(trained(masters("8bit", (0, 3)), optimizer))


@pytest.mark.parametrize("moments", ["bf16", "8bit"])
def test_stages_agree_bitwise_on_rounded_moments(pool, moments):
    mean = {}
    for world, stages in ((1, (3,)), (2, (0, 1, 2, 3, 3)), (3, (0, 3))):  # one once more
        cases = [(stage, "", moments) for stage in stages]
        ranks = pool.run(world, trained, cases, precision="bf16" if moments == "8bit" else "fp32")
        assert all(same(one, found[0]) for found in ranks for one in found[1:])
        losses = torch.tensor([found[0].losses for found in ranks]).mean(0)
        assert losses[-1] < losses[0]
        mean[world] = losses
    # Sums over ranks round differently, and a few moments then fall on the other side of their random bits.
    for world in (2, 3):
        torch.testing.assert_close(mean[world], mean[1], rtol=0.02, atol=0)


def final(moments: str, optimizer: tuple[str, dict] = ADAMW, **more: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    kind, params = optimizer
    chosen = {"type": kind, "params": {**params, **({"zero": {"moments": moments}} if moments else {})}}
    net = make_net(blocks=2, width=WIDE)
    engine, *_ = zero.initialize(model=net, config=config(0, 1, optimizer=chosen, **more))
    for step in range(5):
        engine.backward(engine(*batch(step, 2)))
        engine.step()
    return engine, {name: param.detach().clone() for name, param in net.named_parameters()}


@pytest.mark.parametrize("moments", ["bf16", "8bit"])
def test_large_matrices_have_moments_in_fewer_bits_and_nothing_else_has(moments):
    (engine, params), (_, exact) = final(moments), final("fp32")
    matrices = [value for name, value in params.items() if name.endswith(("up.weight", "down.weight"))]
    large = sum(-(-value.numel() // 256) * 256 for value in matrices)  # each begins a block of its own
    less = {"bf16": 2 * 2, "8bit": 2 * (3 - 4 / 256)}[moments]  # bytes of an element, of two moments
    nbytes = engine.state_nbytes()
    assert nbytes.optimizer == 2 * nbytes.parameters - less * large
    for name, param in params.items():
        assert torch.equal(param, exact[name]) is False, "forward sees the rounded moments everywhere"
        torch.testing.assert_close(param, exact[name], rtol=0, atol=0.02)


@pytest.mark.parametrize(
    "optimizer",
    [
        ("AdamW", {"lr": 1e-2, "weight_decay": 0.1}),
        ("Adam", {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-4, "adam_w_mode": False}),
        ("SGD", {"lr": 1e-1, "weight_decay": 0.1}),
        ("SGD", {"lr": 1e-1, "momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1}),
        ("SGD", {"lr": 1e-1, "momentum": 0.9, "nesterov": True}),
        ("Adagrad", {"lr": 1e-2, "lr_decay": 0.1, "initial_accumulator_value": 0.1, "eps": 1e-6}),
    ],
    ids=["AdamW", "Adam", "SGD", "dampened", "nesterov", "Adagrad"],
)
def test_our_formulas_are_those_of_torch(optimizer, caplog):
    kind, params = optimizer
    with caplog.at_level(logging.INFO, logger="zero"):
        ours = final("", optimizer)
        theirs = final("", (kind, {**params, "foreach": True}))
    said = [record.getMessage() for record in caplog.records if "torch's own class" in record.getMessage()]
    assert said == [f"optimizer {kind} runs as torch's own class, because 'foreach' is true"]
    assert error(ours[1], theirs[1]) <= ulps(8, theirs[1])


def test_hyperparameters_change_while_it_runs():
    engine, optimizer, *_ = zero.initialize(
        model=make_net(), config=config(0, 1, optimizer={"type": "SGD", "params": {"lr": 0.1}})
    )
    (group,) = optimizer.param_groups
    assert engine.state_nbytes().optimizer == 0
    plain = make_net()
    wanted = torch.optim.SGD(plain.parameters(), lr=0.1)
    changes = [{}, {"momentum": 0.9}, {"lr": 0.01, "weight_decay": 0.1}, {"nesterov": True}]
    for step, change in enumerate(changes):
        for groups in (group, wanted.param_groups[0]):
            groups.update(change)
        engine.backward(engine(*batch(step, 2)))
        engine.step()
        plain(*batch(step, 2)).backward()
        wanted.step()
        wanted.zero_grad()
    theirs = list(plain.parameters())
    assert error(engine.parameters(), theirs) <= ulps(8, theirs)
    elements = sum(param.numel() for param in theirs)
    assert 4 * elements <= engine.state_nbytes().optimizer < 4.2 * elements, "one moment"
