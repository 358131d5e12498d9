"""The promise: exact values, gradients and optimizer state can be read and written on every stage.

And what a user writes into a parameter is its exact value from then on.
"""

from __future__ import annotations

import functools
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from closeness import error, ulps
from marks import each_once, longer
from models import WIDE, batch, config, make_net, share, step
from ranks import said_by
from scenario import Record, differences, run, settings
from torch import nn

import zero
from zero.core.master import rounded
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

KINDS: dict[str, tuple[dict[str, Any], str]] = {
    "fp32": ({}, "fp32"),
    "bf16 remainder": ({"zero": {"master": "remainder"}}, "bf16"),
    "bf16 fp32 moments in 8bit": ({"zero": {"master": "fp32", "moments": "8bit"}}, "bf16"),
    "bf16 moments in bf16": ({"zero": {"moments": "bf16"}}, "bf16"),
}
Values = dict[str, list[Any]]


def start(stage: int, kind: str = "fp32", seed: int = 7, accumulation: int = 1, **optimizer: Any) -> Any:
    """An engine; the net is wide enough for moments in 8 bit, and its sizes divide by nothing."""
    extra, precision = KINDS[kind]
    chosen = optimizer or {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1, **extra}}
    json = {"stage": stage, "precision": precision, "accumulation": accumulation, "optimizer": chosen}
    model = make_net(seed, blocks=1, width=WIDE)
    return zero.initialize(model=model, config=settings(json, dist.get_world_size()))[0]


def named(engine: Any) -> list[tuple[str, nn.Parameter]]:
    return list(engine.module.named_parameters())


def read(engine: Any, keys: tuple[str, ...]) -> Values:
    """Everything that makes up the run, by parameter."""
    return {
        name: [safe_get_full_fp32_param(param), *(safe_get_full_optimizer_state(param, key) for key in keys)]
        for name, param in named(engine)
    }


def write(engine: Any, values: Values, keys: tuple[str, ...]) -> None:
    for name, param in named(engine):
        value, *states = values[name]
        safe_set_full_fp32_param(param, value)
        for key, state in zip(keys, states, strict=True):
            safe_set_full_optimizer_state(param, state, key)


def same(one: Values, two: Values) -> bool:
    pairs = [pair for name in one for pair in zip(one[name], two[name], strict=True)]
    return one.keys() == two.keys() and all(torch.equal(*map(torch.as_tensor, pair)) for pair in pairs)


ADAM = ("exp_avg", "exp_avg_sq", "step")


MOVED = [
    ("bf16 remainder", ADAM, {}),
    *longer(
        ("bf16 fp32 moments in 8bit", ADAM, {}),
        ("Lion", ("exp_avg", "step"), {}),
        ("Adagrad", ("sum", "step"), {"initial_accumulator_value": 0.1}),
        ("NAdam", ("exp_avg", "exp_avg_sq", "mu_product", "step"), {}),
        ("RMSprop", ("square_avg", "momentum_buffer", "grad_avg", "step"), {"momentum": 0.5, "centered": True}),
        ("SGD", ("momentum_buffer",), {"momentum": 0.9, "foreach": True}),
    ),
]


@pytest.mark.ranks(3)
@pytest.mark.parametrize(("kind", "keys", "params"), MOVED)
def test_a_run_moved_by_hand_goes_on_bit_by_bit(kind, keys, params):
    """Two steps on one stage; then all is read there and written to fresh engines, and each goes on alone."""
    chosen = {"kind": kind} if kind in KINDS else {"type": kind, "params": {"lr": 1e-3, **params}}
    source = start(1, **chosen)
    read(source, keys)  # before the first step: must not change it
    for index in range(2):
        step(source, index)
    values = read(source, keys)
    assert "step" not in keys or all(state[-1] == 2 for state in values.values())
    copies = [start(stage, seed=8, **chosen) for stage in (0, 3)]
    for engine in copies:
        write(engine, values, keys)
        assert same(read(engine, keys), values)
    for engine in [source, *copies]:
        for index in (2, 3):
            step(engine, index)
    wanted = read(source, keys)
    assert all(same(read(engine, keys), wanted) for engine in copies)
    assert not same(values, wanted)


def plain_gradients(steps: int) -> dict[str, torch.Tensor]:
    """Averaged over two ranks and micro-batches, in the engine's order: micro-batches of a rank, then ranks."""
    rows = []
    for rank in range(2):
        net = make_net(blocks=1, width=WIDE)
        for index in range(steps):
            net(*(each[2 * rank : 2 * rank + 2] for each in batch(index, 4))).backward()
        rows.append([param.grad for param in net.parameters()])
    return {name: (one + two) / 4 for (name, _), one, two in zip(net.named_parameters(), *rows, strict=True)}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [1, 3, *longer(0, 2)])
def test_gradients_are_the_average_so_far(stage):
    """Against plain torch after each of two micro-batches; none before and after; local pieces fit together."""
    engine = start(stage, accumulation=2)
    assert all(safe_get_full_grad(param) is None for _, param in named(engine))
    for index in range(2):
        engine.backward(engine(*share(index)))
        wanted = plain_gradients(index + 1)
        for name, param in named(engine):
            found = safe_get_full_grad(param)
            # Where every micro-batch is reduced on its own, the order of the sum is another.
            limit = 0.0 if index == 0 or stage < 2 else ulps(8, [wanted[name]])
            assert error([found], [wanted[name]]) <= limit, name
            if index == 1:
                pieces: list[Any] = [None, None]
                dist.all_gather_object(pieces, safe_get_local_grad(param))
                assert torch.equal(torch.cat(pieces[: 1 if stage == 0 else 2]), found.flatten()), name
        engine.step()
    assert all(safe_get_full_grad(param) is None for _, param in named(engine))
    assert all(safe_get_local_grad(param) is None for _, param in named(engine))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [1, 3, *longer(0, 2)])
def test_a_gradient_that_is_set_is_the_one_that_is_taken(stage):
    """Plain SGD shows what gradient a step took; one is set in the middle of a window, and one more added to it."""
    engine = start(stage, accumulation=2, type="SGD", params={"lr": 0.5})
    before = {name: safe_get_full_fp32_param(param) for name, param in named(engine)}
    engine.backward(engine(*share(0)))
    for _, param in named(engine):
        safe_set_full_grad(param, torch.full(param.shape, 2.0))
        assert torch.equal(safe_get_full_grad(param), torch.full(param.shape, 2.0))
    engine.step()
    engine.backward(engine(*share(1)))
    late = {name: safe_get_full_grad(param) for name, param in named(engine)}
    assert any(not torch.equal(grad, torch.full(grad.shape, 2.0)) for grad in late.values())
    safe_update_full_grad_vectorized((param for _, param in named(engine)), lambda grad, param: grad * 2)
    bias = engine.module.head.bias
    safe_set_local_grad(bias, safe_get_local_grad(bias) * 0)
    engine.step()
    for name, param in named(engine):
        factor = 0.0 if name == "head.bias" else 2.0
        assert torch.equal(safe_get_full_fp32_param(param), before[name] - 0.5 * (factor * late[name])), name


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [1, 3, *longer(0, 2)])
def test_what_is_set_is_seen_at_once(stage):
    """A value that is set shows in the 16-bit parameter, in the next forward, and in every rank's copy."""
    engine = start(stage, "bf16 remainder")
    step(engine, 0)
    for _, param in named(engine):
        value = torch.randn(param.shape, generator=torch.Generator().manual_seed(5))
        safe_set_full_fp32_param(param, value + dist.get_rank())  # rank 0's counts
        with zero.GatheredParameters(param):
            assert torch.equal(param, rounded(value, torch.bfloat16))
        assert torch.equal(safe_get_full_fp32_param(param), value)
        safe_set_local_fp32_param(param, safe_get_local_fp32_param(param) / 3)
        with zero.GatheredParameters(param):
            assert torch.equal(param, rounded(value / 3, torch.bfloat16))
            safe_set_full_fp32_param(param, value / 8)
            assert torch.equal(param, rounded(value / 8, torch.bfloat16))
        safe_set_local_optimizer_state(param, safe_get_local_optimizer_state(param, "exp_avg") + 1, "exp_avg")
        assert (safe_get_full_optimizer_state(param, "exp_avg") > 0.5).all()
        safe_set_local_optimizer_state(param, 7, "step")
        assert safe_get_full_optimizer_state(param, "step") == 7
    first = engine(*share(1)).item()
    with torch.no_grad():
        assert first == engine(*share(1)).item()
    step(engine, 1)
    assert engine.was_step_applied()


def errors(stage: int) -> list[str]:
    """What both ranks hear when one or both go wrong; afterwards all is as it was and works."""
    net = make_net(blocks=1)
    net.embed.weight.requires_grad_(False)
    engine = zero.initialize(model=net, config=settings(stage, 2))[0]
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
    said = [said_by(call) for call in calls]
    untouched = torch.equal(before, safe_get_full_fp32_param(head))
    nothing = safe_get_full_fp32_param(net.embed.weight) is None and safe_get_full_grad(nn.Parameter(good)) is None
    return [*said, str(untouched and nothing)]


@pytest.mark.parametrize("stage", [0, 3])
def test_what_is_wrong_is_said_on_all_ranks(pool, stage):
    one, two = pool.run(2, errors, stage)
    starts = [
        "RuntimeError: rank 1: safe_set_full_fp32_param: got shape (16,)",
        "ValueError: safe_set_full_fp32_param: got a list; wanted a floating-point tensor of shape (17,) for",
        "ValueError: safe_set_full_optimizer_state: unknown key 'exp_average' for parameter 'head.bias'; "
        "known: exp_avg, exp_avg_sq, step",
        "ValueError: safe_get_full_optimizer_state: unknown key 'exp_average'",
        "ValueError: safe_set_full_optimizer_state: got -1 for 'step'",
        "RuntimeError: safe_set_full_grad: parameter 'head.bias' has no gradient",
        "RuntimeError: safe_set_local_grad: parameter 'head.bias' has no gradient",
        "ValueError: safe_set_full_fp32_param: parameter 'embed.weight' (frozen) is trained by no engine",
        "RuntimeError: rank 0 does safe_get_full_fp32_param with parameter 'norm.bias' and rank 1",
        "ValueError: safe_set_full_fp32_param: parameter of shape (17,) is trained by no engine",
        "True",
    ]
    assert [text[: len(start)] for text, start in zip(one, starts, strict=True)] == starts
    assert two[0].startswith("ValueError: safe_set_full_fp32_param: got shape (16,)")
    assert two[1:8] == one[1:5] + [text.replace("rank 0", "rank 1") for text in one[5:8]]


def test_local_gradients_before_their_reduction_are_refused():
    engine = zero.initialize(model=make_net(), config=settings({"accumulation": 2}, 1))[0]
    engine.backward(engine(*batch(0, 2)))
    with pytest.raises(RuntimeError, match="is not reduced before the accumulation boundary"):
        safe_get_local_grad(engine.module.head.bias)


# --- what a script writes itself -------------------------------------------------------------------------------------


FILLED, COPIED, LATE = "blocks.1.up.weight", "embed.weight", "head.bias"


def trained(stage: int, master: str, **more: Any) -> Record:
    """After two steps no master is what its parameter says any more. `master` "" computes in fp32."""
    params = {"lr": 1e-2, "weight_decay": 0.1, "zero": {"master": master or "fp32"}}
    json = {"stage": stage, "precision": "bf16" if master else "fp32", "optimizer": {"type": "AdamW", "params": params}}
    return run("net", json, **{"steps": 2, **more})


def exact(engine: Any) -> dict[str, torch.Tensor]:
    return {name: safe_get_full_fp32_param(param) for name, param in engine.module.named_parameters()}


def edit(engine: Any) -> dict[str, torch.Tensor]:
    """Edit three parameters as users do, where they are cut inside of a block; the values that must be exact."""
    params = {name: engine.module.get_parameter(name) for name in (FILLED, COPIED, LATE)}
    filled, copied, late = params.values()
    cut = engine.zero_optimization_stage() == 3
    with torch.no_grad(), zero.GatheredParameters(params.values(), modifier_rank=0, enabled=cut):
        nn.init.normal_(filled, generator=torch.Generator(filled.device).manual_seed(3))
        copied[1:3].copy_(torch.full_like(copied[1:3], 0.3))
        late.add_(0.1)
    with zero.GatheredParameters(params.values()):
        return {name: param.detach().float().clone() for name, param in params.items()}


def edited_before_the_third(look: bool, engine: Any, number: int, args: Any) -> torch.Tensor:
    """With `look`, masters are read around the edits, which must not matter."""
    if number == 2:
        before = exact(engine) if look else {}
        wanted = before | edit(engine)
        assert not look or all(torch.equal(value, wanted[name]) for name, value in exact(engine).items())
    engine.backward(loss := engine(*args))
    return loss


@pytest.mark.ranks
@pytest.mark.parametrize(("world", "masters"), each_once([2, 1], [("fp32", "remainder"), ("",)]))
def test_an_edit_is_exact_and_the_next_step_begins_there(world, masters):
    loops = [functools.partial(edited_before_the_third, look) for look in (True, False)]
    first, *others = [
        trained(stage, master, steps=3, loop=loop) for stage in (0, 2, 3) for master in masters for loop in loops
    ]
    assert not any(differences(found, first, "weights") for found in others)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("stage", "master"), each_once([0, 1, 2], ["fp32", "remainder"]))
def test_a_loaded_state_dict_is_exact(stage, master):
    values = {name: value.bfloat16() for name, value in make_net(seed=9).state_dict().items()}

    def loaded(engine: Any) -> bool:
        engine.module.load_state_dict(values)
        return all(torch.equal(value, values[name].float()) for name, value in exact(engine).items())

    assert trained(stage, master, keep=loaded).seen == [True]


def through_data(engine: Any) -> tuple[float, float]:
    """How far the master is from what was written through `.data`, and from what it was before."""
    before = exact(engine)[LATE]
    engine.module.get_parameter(LATE).data.fill_(3.0)
    now = exact(engine)[LATE]
    return (now - 3.0).abs().max().item(), (now - before).abs().max().item()


@pytest.mark.ranks(1)
def test_writes_through_data_are_seen_by_remainders_only():
    """As the documentation says: `.data` goes around the counters that we look at."""
    (near, _), (_, moved) = (trained(1, master, keep=through_data).seen[0] for master in ("remainder", "fp32"))
    assert near <= 2**-7  # half a bf16 step at 3
    assert moved == 0.0


def test_a_frozen_parameter_that_got_other_data_is_saved_with_it(tmp_path):
    found = []
    for value in (4.0, None):
        model = torch.nn.Linear(2, 2)
        model.bias.requires_grad_(False)
        engine = zero.initialize(model=model, config=config(1, 1))[0]
        if value is not None:
            model.bias.data = torch.full((2,), value)
            engine.save_checkpoint(tmp_path)
        else:
            engine.load_checkpoint(tmp_path)
        engine.destroy()
        found.append(model.bias.tolist())
    assert found == [[4.0, 4.0]] * 2


def test_a_pickled_parameter_leaves_the_engine_behind():
    engine = zero.initialize(model=make_net(), config=settings(0, 1))[0]
    copy = pickle.loads(pickle.dumps(engine.module.head.bias))
    assert torch.equal(copy, engine.module.head.bias)
    assert safe_get_full_fp32_param(copy) is None
