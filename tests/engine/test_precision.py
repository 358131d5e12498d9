"""The promise: 16-bit training is as near to the truth as plain torch's own in that precision, on every stage.

The truth is fp64. Plain torch keeps fp32 masters beside a 16-bit copy, or runs under its autocast, and scales the
loss; our error is at most twice the error that it has. Where the order of sums is the same, bits are compared.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import oracle
import pytest
import torch
import torch.distributed as dist
from closeness import error, ulps
from marks import each_once, longer
from models import batch, config, make_net, train
from torch import nn
from torch.utils.checkpoint import checkpoint

import zero
from zero.kernels.remainder import round_bf16
from zero.plan.memory import alive_nbytes

STAGES = (0, 1, 2, 3)
STEPS = 4
SMALL_SCALE = {"enabled": True, "initial_scale_power": 10, "loss_scale_window": 1}  # grows twice in a run
MODES: dict[str, dict[str, Any]] = {
    "fp16": {"fp16": SMALL_SCALE},
    "fp16 fixed": {"fp16": {"enabled": True, "loss_scale": 128}},
    "bf16": {"bf16": {"enabled": True}},
    "autocast": {"torch_autocast": {"enabled": True}},
    "autocast fp16": {
        "torch_autocast": {"enabled": True, "dtype": "fp16"},
        "fp16": {**SMALL_SCALE, "enabled": False},
    },
}


def settings(stage: int, world: int, mode: str, accumulation: int = 2, **more: Any) -> dict[str, Any]:
    return config(stage, world, accumulation=accumulation, gradient_clipping=0.3, **MODES[mode], **more)


def run_stages(world: int, mode: str) -> list[dict[str, Any]]:
    every = {"zero": {"reduce_every_micro_batch": True}}  # one order of sums on all stages
    return [train(make_net(), world, settings(stage, world, mode, **every), STEPS) for stage in STAGES]


def near(params: Any, world: int, mode: str, scale: float) -> bool:
    """As near to the truth as plain torch that multiplies the loss by `scale`."""
    precision = mode if "autocast" in mode else mode[:4]
    training = oracle.Training(world, STEPS, 2, 0.3, scale=scale)
    return oracle.near(params, training, {"autocast": "autocast bf16"}.get(precision, precision))


def same(first: dict[str, Any], second: dict[str, Any]) -> bool:
    return first["losses"] == second["losses"] and all(
        torch.equal(value, second["params"][name]) for name, value in first["params"].items()
    )


@pytest.mark.parametrize(
    ("world", "mode"),
    [
        *((3 if mode == "fp16" else 2, mode) for mode in MODES),
        *longer((2, "fp16"), *((1, mode) for mode in MODES)),
    ],
)
def test_as_near_to_the_truth_as_plain_torch(pool, world, mode):
    ranks = pool.run(world, run_stages, world, mode)
    for stages in ranks:
        for stage in STAGES:
            assert near(stages[stage]["params"], world, mode, 1024.0), f"stage {stage}"
            assert same(stages[stage], stages[0]), f"stage {stage} differs from stage 0"
            assert stages[stage]["norms"] == stages[0]["norms"]
        assert all(torch.equal(stages[0]["params"][name], value) for name, value in ranks[0][0]["params"].items())


# --- however backward is called -------------------------------------------------------------------------------


def by_engine(engine: Any, loss: torch.Tensor) -> None:
    engine.backward(loss)


def by_scale(engine: Any, loss: torch.Tensor) -> None:
    engine.scale(loss).backward()


def by_tensor(engine: Any, loss: torch.Tensor) -> None:
    loss.backward()


def divided_before(engine: Any, loss: torch.Tensor) -> None:
    engine.backward(loss / engine.gradient_accumulation_steps(), scale_wrt_gas=False)


def train_with(ways: list[Callable[[Any, torch.Tensor], None]], stage: int, mode: str) -> dict[str, Any]:
    rank, world, model = dist.get_rank(), dist.get_world_size(), make_net()
    engine = zero.initialize(model=model, config=settings(stage, world, mode))[0]
    norms = []
    for step in range(STEPS * 2):
        tokens, targets = batch(step, 2 * world)
        part = slice(2 * rank, 2 * rank + 2)
        ways[step % len(ways)](engine, engine(tokens[part], targets[part]))
        engine.step()
        norms.append(engine.get_global_grad_norm())
    engine.destroy()
    return {"params": {name: param.detach() for name, param in model.named_parameters()}, "norms": norms[1::2]}


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("stage", "mode"), each_once([3, 1], ["fp16", "autocast fp16"]))
def test_a_backward_that_nobody_scaled_gives_the_right_gradient(stage, mode):
    mixed = [by_engine, by_tensor, by_scale, divided_before, by_tensor]
    found = [train_with(ways, stage, mode) for ways in ([by_engine], [by_scale], [by_tensor], mixed)]
    assert same({**found[0], "losses": []}, {**found[1], "losses": []}), "scale() is what backward() does"
    for run, scale in zip(found, (1024.0, 1024.0, 1.0, 1.0), strict=True):
        assert near(run["params"], 2, mode, scale)
        # The norm has no scale in it: within the rounding of fp16 it is the same.
        assert run["norms"] == pytest.approx(found[0]["norms"], rel=2**-8)


def test_an_unscaled_backward_warns_once(caplog):
    engine = zero.initialize(model=make_net(), config=config(0, 1, fp16=SMALL_SCALE))[0]
    for step in range(3):
        engine(*batch(step, 2)).backward()
        engine.step()
    said = [record.getMessage() for record in caplog.records if "did not multiply" in record.getMessage()]
    assert len(said) == 1
    assert "loss scale 1024" in said[0]


def two_engines(stage: int, together: bool) -> list[list[torch.Tensor]]:
    """Two engines in fp16 with different loss scales, one graph or one each; the second's scale moves."""
    nets = [make_net(7), make_net(8)]
    rules = [{"enabled": True, "loss_scale": 64}, SMALL_SCALE]
    engines = [
        zero.initialize(model=net, config=config(stage, 2, fp16=rule))[0] for net, rule in zip(nets, rules, strict=True)
    ]
    rank = dist.get_rank()
    for step in range(3):
        tokens, targets = batch(step, 4)
        part = slice(2 * rank, 2 * rank + 2)
        losses = [engine.scale(engine(tokens[part], targets[part])) for engine in engines]
        for loss in [sum(losses)] if together else losses:
            loss.backward()
        for engine in engines:
            engine.step()
    for engine in engines:
        engine.destroy()
    return [[param.detach() for param in net.parameters()] for net in nets]


@pytest.mark.parametrize("stage", [0, 3])
def test_each_of_two_engines_keeps_its_own_scale(pool, stage):
    together, apart = (pool.run(2, two_engines, stage, how) for how in (True, False))
    for mine, wanted in zip(together, apart, strict=True):
        assert all(
            torch.equal(a, b) for one, two in zip(mine, wanted, strict=True) for a, b in zip(one, two, strict=True)
        )


class Recomputed(nn.Module):
    """A Net whose loss is the output of a reentrant checkpoint: its backward runs inside another."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_net()
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        inner = checkpoint(lambda gain: self.net(tokens, targets) * gain, self.gain * 1.0, use_reentrant=True)
        return inner * self.gain


def recomputed(stage: int, scale: float) -> list[float]:
    world, rank = dist.get_world_size(), dist.get_rank()
    fp16 = {"enabled": True, "loss_scale": scale}
    engine = zero.initialize(model=Recomputed(), config=config(stage, world, fp16=fp16))[0]
    norms = []
    for step in range(2):
        tokens, targets = batch(step, 2 * world)
        engine.backward(engine(tokens[2 * rank : 2 * rank + 2], targets[2 * rank : 2 * rank + 2]))
        engine.step()
        norms.append(engine.get_global_grad_norm())
    return norms


@pytest.mark.parametrize("stage", [1, 3])
def test_a_backward_inside_a_backward_has_the_scale_of_the_outer(pool, stage):
    scaled, fixed = (pool.run(2, recomputed, stage, scale)[0] for scale in (512.0, 2.0))
    assert scaled == pytest.approx(fixed, rel=2**-8)


# --- dtypes of gradients --------------------------------------------------------------------------------------

SGD = {"type": "SGD", "params": {"lr": 1.0}}


def own_gradients(model: nn.Module, step: int) -> list[torch.Tensor]:
    """The gradients of this rank's micro-batch in plain torch, in the dtype of the model."""
    rank, world = dist.get_rank(), dist.get_world_size()
    tokens, targets = batch(step, 2 * world)
    model(tokens[2 * rank : 2 * rank + 2], targets[2 * rank : 2 * rank + 2]).backward()
    grads = [param.grad for param in model.parameters()]
    model.zero_grad()
    return grads


def one_step(stage: int, accumulation: int = 1, **more: Any) -> tuple[list[torch.Tensor], Any]:
    """The parameters after one step of SGD with rate 1, and the engine."""
    world, rank, model = dist.get_world_size(), dist.get_rank(), make_net()
    engine = zero.initialize(
        model=model, config=config(stage, world, accumulation=accumulation, **{"optimizer": SGD, **more})
    )[0]
    for step in range(accumulation):
        tokens, targets = batch(step, 2 * world)
        engine.backward(engine(tokens[2 * rank : 2 * rank + 2], targets[2 * rank : 2 * rank + 2]))
        engine.step()
    engine.destroy()
    return [param.detach().clone() for param in model.parameters()], engine


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_what_travels_is_rounded_and_sums_are_not(dtype):
    """Each stage gives the bits of: round each rank's gradient to `dtype`, add in fp32, halve, subtract."""
    model, low = make_net(), {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    wanted = []
    for param, grad in zip(model.parameters(), own_gradients(model, 0), strict=True):
        every = [torch.empty_like(grad) for _ in range(dist.get_world_size())]
        dist.all_gather(every, grad.to(low).float())
        total = every[0] + every[1]
        wanted.append(param.detach() - total * 0.5)
    found = [one_step(stage, communication_data_type=dtype)[0] for stage in STAGES]
    exact = one_step(0)[0]
    assert not all(torch.equal(a, b) for a, b in zip(exact, wanted, strict=True)), "rounding must be seen"
    assert [all(torch.equal(a, b) for a, b in zip(params, wanted, strict=True)) for params in found] == [True] * 4


def run_communicated(world: int, dtype: str) -> list[dict[str, Any]]:
    more = {"communication_data_type": dtype, "zero": {"reduce_every_micro_batch": True}}
    return [train(make_net(), world, config(stage, world, accumulation=3, **more), 2) for stage in STAGES]


@pytest.mark.parametrize(("world", "dtype"), [(3, "bf16"), (2, "fp32"), *longer((2, "bf16"))])
def test_stages_agree_bitwise_whatever_travels(pool, world, dtype):
    for stages in pool.run(world, run_communicated, world, dtype):
        assert all(same(stages[stage], stages[0]) for stage in STAGES[1:])


@pytest.mark.ranks(1)
@pytest.mark.parametrize("dtype", [None, "bf16", "fp16"])
def test_gradients_add_up_in_the_dtype_that_was_asked_for(dtype):
    """One rank, bf16 parameters, 4 micro-batches: whether each stage adds up as plain torch does in that dtype."""
    low = {None: torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    masters = make_net()
    model = copy.deepcopy(masters).bfloat16()
    sums = [torch.zeros_like(param, dtype=low) for param in masters.parameters()]
    for step in range(4):
        for total, grad in zip(sums, own_gradients(model, step), strict=True):
            total.add_(grad)
    wanted = [
        round_bf16(param.detach() - total.float() * 0.25)
        for param, total in zip(masters.parameters(), sums, strict=True)
    ]
    more = {"bf16": {"enabled": True}, "data_types": {} if dtype is None else {"grad_accum_dtype": dtype}}
    found = [one_step(stage, 4, **more)[0] for stage in STAGES]
    assert [all(torch.equal(a, b) for a, b in zip(params, wanted, strict=True)) for params in found] == [True] * 4


@pytest.mark.ranks(1)
def test_gradients_add_up_in_fp32_under_a_boundary_set_by_hand():
    """The same with the boundary set by hand: buffers made for one backward widen when a second one adds to them."""
    masters = make_net()
    model = copy.deepcopy(masters).bfloat16()
    sums = [torch.zeros_like(param) for param in masters.parameters()]
    for step in range(3):
        for total, grad in zip(sums, own_gradients(model, step), strict=True):
            total.add_(grad)
    wanted = [round_bf16(param.detach() - total) for param, total in zip(masters.parameters(), sums, strict=True)]
    results = []
    for stage in STAGES:
        net = make_net()
        engine = zero.initialize(model=net, config=config(stage, 1, optimizer=SGD, bf16={"enabled": True}))[0]
        for step in range(3):
            engine.set_gradient_accumulation_boundary(step == 2)
            engine.backward(engine(*batch(step, 2)))
            engine.step()
        results.append(all(torch.equal(a, b) for a, b in zip(net.parameters(), wanted, strict=True)))
        engine.destroy()
    assert results == [True] * 4


def accumulated_bytes(stage: int, dtype: str) -> tuple[int, int]:
    """Bytes of gradients after the first of two backwards: held, and as planned."""
    world, rank = dist.get_world_size(), dist.get_rank()
    more = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": dtype}}
    engine = zero.initialize(model=make_net(), config=config(stage, world, accumulation=2, **more))[0]
    tokens, targets = batch(0, 2 * world)
    engine.backward(engine(tokens[2 * rank : 2 * rank + 2], targets[2 * rank : 2 * rank + 2]))
    units = [unit.plan for unit in engine._sharded.units]
    names = [unit.name for unit in units]
    where = {"reduced_gradients": names} if stage >= 2 else {"local_gradients": names}
    parts = world if stage else 1
    planned = alive_nbytes(units, engine._sharded.sharding, parts, accumulation=2, accumulate=dtype, **where)
    return engine.state_nbytes().gradients, planned.gradients


@pytest.mark.parametrize("stage", [1, 3, *longer(0, 2)])
def test_the_plan_counts_gradients_in_their_dtype(pool, stage):
    counted = {dtype: pool.run(2, accumulated_bytes, stage, dtype) for dtype in ("fp32", "bf16")}
    for dtype in counted:
        assert all(held == planned for held, planned in counted[dtype]), dtype
    assert counted["fp32"][0][0] == 2 * counted["bf16"][0][0]


def stages_in_bf16() -> list[dict[str, Any]]:
    more = {
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "bf16"},
        "zero": {"reduce_every_micro_batch": True},
    }
    return [train(make_net(), 2, config(stage, 2, accumulation=3, **more), 2) for stage in STAGES]


def test_stages_agree_bitwise_where_shards_are_kept_in_bf16(pool):
    for stages in pool.run(2, stages_in_bf16):
        assert all(same(stages[stage], stages[0]) for stage in STAGES[1:])


# --- what the sum is divided by, and what is divided before it travels --------------------------------------


def divided(stage: int) -> list[bool]:
    free = one_step(stage)[0]
    results = []
    # Powers of two round nothing; three rounds each gradient twice.
    for keys in ({"gradient_predivide_factor": 4}, {"prescale_gradients": True}, {"gradient_predivide_factor": 3}):
        found = one_step(stage, **keys)[0]
        exactly = all(torch.equal(a, b) for a, b in zip(found, free, strict=True))
        nearly = error(found, free) <= ulps(4, free)
        results.append(exactly if keys.get("gradient_predivide_factor") != 3 else nearly and not exactly)
    return results


@pytest.mark.parametrize("stage", [1, 3, *longer(0, 2)])
def test_dividing_before_changes_nothing_but_rounding(pool, stage):
    assert pool.run(2, divided, stage) == [[True] * 3] * 2


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [1, 3, *longer(0, 2)])
def test_a_sum_over_the_ranks_is_the_mean_times_the_ranks(stage):
    """Half the rate makes up for a sum over two ranks in place of their mean, which rounds nothing."""
    half = {"optimizer": {"type": "SGD", "params": {"lr": 0.5}}}
    mean = one_step(stage, 2)[0]
    found = one_step(stage, 2, gradient_allreduce_op="Sum", **half)[0]
    assert all(torch.equal(a, b) for a, b in zip(found, mean, strict=True))


class Steep(nn.Module):
    """One weight whose gradient is 1e5: too much for fp16, a quarter of it is not."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self) -> torch.Tensor:
        return 1e5 * self.weight.sum()


def steep(stage: int, factor: float) -> tuple[bool, float | None]:
    keys = {"communication_data_type": "fp16", "gradient_predivide_factor": factor}
    engine = zero.initialize(model=Steep(), config=config(stage, 2, **keys))[0]
    engine.backward(engine())
    engine.step()
    return engine.was_step_applied(), engine.get_global_grad_norm()


@pytest.mark.parametrize("stage", [0, 2])
def test_dividing_before_keeps_what_travels_in_range(pool, stage):
    assert [applied for applied, _ in pool.run(2, steep, stage, 1)] == [False] * 2
    for applied, norm in pool.run(2, steep, stage, 4):
        assert applied
        assert norm == pytest.approx(3**0.5 * 1e5, rel=2**-11)
