"""The promise: 16-bit training is as near to the truth as plain torch's own in that precision, on every stage.

The truth is fp64. Plain torch keeps fp32 masters beside a 16-bit copy, or runs under its autocast, and scales the
loss; our error is at most twice the error that it has. Where the order of sums is the same, bits are compared.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import oracle
import pytest
import torch
import torch.distributed as dist
from closeness import error, ulps
from marks import each_once, longer
from models import batch, config, make_net, share
from scenario import Model, Record, differences, run, runs, same, scenario
from torch import nn
from torch.utils.checkpoint import checkpoint

import zero
from zero.kernels.remainder import round_bf16

pytestmark = pytest.mark.ranks(2)


def gradient_bytes(engine: Any, number: int) -> int:
    return engine.state_nbytes().gradients


STAGES = (0, 1, 2, 3)
STEPS = 4
EVERY = {"zero": {"reduce_every_micro_batch": True}}  # one order of sums on all stages
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
LOW = {None: torch.float32, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def of_mode(mode: str) -> dict[str, Any]:
    return {"accumulation": 2, "gradient_clipping": 0.3, **MODES[mode]}


def each_stage(pool: Any, world: int, steps: int = STEPS, **json: Any) -> list[list[Record]]:
    """The records of all stages, by rank."""
    return pool.run(world, runs, [(("dealt", {"stage": stage, **json}, steps), {}) for stage in STAGES])


def near(record: Record, world: int, mode: str, scale: float) -> bool:
    """As near to the truth as plain torch that multiplies the loss by `scale`."""
    precision = mode if "autocast" in mode else mode[:4]
    training = oracle.Training(world, STEPS, 2, 0.3, scale=scale)
    return oracle.near(record.weights, training, {"autocast": "autocast bf16"}.get(precision, precision))


@pytest.mark.parametrize(
    ("world", "mode"),
    [
        *((3 if mode == "fp16" else 2, mode) for mode in MODES if mode != "autocast fp16"),
        *longer((2, "autocast fp16")),
    ],
)
def test_as_near_to_the_truth_as_plain_torch(pool, world, mode):
    ranks = each_stage(pool, world, **of_mode(mode), **EVERY)
    for stages in ranks:
        for stage, record in enumerate(stages):
            assert near(record, world, mode, 1024.0), f"stage {stage}"
            assert differences(record, stages[0]) == [], f"stage {stage} differs from stage 0"
        assert same(stages[0], ranks[0][0], "weights")


# --- however backward is called -------------------------------------------------------------------------------


@pytest.mark.parametrize(("stage", "mode"), each_once([3, 1], ["fp16", "autocast fp16"]))
def test_a_backward_that_nobody_scaled_gives_the_right_gradient(stage, mode):
    calls = {
        "engine": lambda engine, loss: engine.backward(loss),
        "scale": lambda engine, loss: engine.scale(loss).backward(),
        "tensor": lambda engine, loss: loss.backward(),
        "divided": lambda engine, loss: engine.backward(loss / 2, scale_wrt_gas=False),
    }
    found = []
    for ways in (["engine"], ["scale"], ["tensor"], ["engine", "tensor", "scale", "divided", "tensor"]):

        def loop(engine: Any, number: int, inputs: Any, ways: list[str] = ways) -> torch.Tensor:
            loss = engine(*inputs)
            calls[ways[number % len(ways)]](engine, loss)
            return loss

        found.append(run("dealt", stage, STEPS, loop=loop, **of_mode(mode)))
    assert same(found[0], found[1]), "scale() is what backward() does"
    for record, scale in zip(found, (1024.0, 1024.0, 1.0, 1.0), strict=True):
        assert near(record, 2, mode, scale)
        # The norm has no scale in it: within the rounding of fp16 it is the same.
        assert record.norms == pytest.approx(found[0].norms, rel=2**-8)


@pytest.mark.ranks(0)
def test_an_unscaled_backward_warns_once(caplog):
    engine = zero.initialize(model=make_net(), config=config(0, 1, fp16=SMALL_SCALE))[0]
    for step in range(3):
        engine(*batch(step, 2)).backward()
        engine.step()
    said = [record.getMessage() for record in caplog.records if "did not multiply" in record.getMessage()]
    assert len(said) == 1
    assert "loss scale 1024" in said[0]


@pytest.mark.parametrize("stage", [0, 3])
def test_each_of_two_engines_in_one_graph_keeps_its_own_scale(stage):
    """The second's moves. Each trains as it does alone."""
    rules = {7: {"enabled": True, "loss_scale": 64}, 8: SMALL_SCALE}
    engines = [
        zero.initialize(model=make_net(seed), config=config(stage, 2, fp16=rule))[0] for seed, rule in rules.items()
    ]
    for step in range(3):
        sum(engine.scale(engine(*share(step))) for engine in engines).backward()
        for engine in engines:
            engine.step()
    for engine, (seed, rule) in zip(engines, rules.items(), strict=True):
        engine.destroy()
        alone = run(Model(lambda seed=seed: make_net(seed), lambda number, _: share(number)), stage, fp16=rule)
        assert all(torch.equal(param, alone.weights[name]) for name, param in engine.module.named_parameters())


class Recomputed(nn.Module):
    """A Net whose loss is the output of a reentrant checkpoint: its backward runs inside another."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_net()
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        inner = checkpoint(lambda gain: self.net(tokens, targets) * gain, self.gain * 1.0, use_reentrant=True)
        return inner * self.gain


@pytest.mark.parametrize("stage", [1, 3])
def test_a_backward_inside_a_backward_has_the_scale_of_the_outer(pool, stage):
    rules = [{"enabled": True, "loss_scale": scale} for scale in (512.0, 2.0)]
    scaled, fixed = (scenario(pool, Recomputed, stage, steps=2, fp16=rule)[0].norms for rule in rules)
    assert scaled == pytest.approx(fixed, rel=2**-8)


# --- dtypes of gradients --------------------------------------------------------------------------------------


def one_step(stage: int, accumulation: int = 1, lr: float = 1.0, **more: Any) -> dict[str, torch.Tensor]:
    """The parameters after one step of SGD."""
    sgd = {"type": "SGD", "params": {"lr": lr}}
    return run("dealt", stage, 1, accumulation=accumulation, optimizer=sgd, **more).weights


def exactly(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(found[name], value) for name, value in wanted.items())


def own_gradients(model: nn.Module, step: int) -> dict[str, torch.Tensor]:
    """The gradients of this rank's micro-batch in plain torch, in the dtype of the model."""
    model.zero_grad()
    model(*share(step)).backward()
    return {name: param.grad for name, param in model.named_parameters()}


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_what_travels_is_rounded_and_sums_are_not(dtype):
    """Each stage gives the bits of: round each rank's gradient to `dtype`, add in fp32, halve, subtract."""
    model, wanted = make_net(), {}
    for name, grad in own_gradients(model, 0).items():
        every = [torch.empty_like(grad) for _ in range(2)]
        dist.all_gather(every, grad.to(LOW[dtype]).float())
        wanted[name] = model.get_parameter(name).detach() - (every[0] + every[1]) * 0.5
    assert not exactly(one_step(0), wanted), "rounding must be seen"
    assert [exactly(one_step(stage, communication_data_type=dtype), wanted) for stage in STAGES] == [True] * 4


KEPT_IN_BF16 = {**MODES["bf16"], "data_types": {"grad_accum_dtype": "bf16"}}


@pytest.mark.parametrize(
    ("world", "more"),
    [
        (3, {"communication_data_type": "bf16"}),
        (2, KEPT_IN_BF16),
        *longer((2, {"communication_data_type": "fp32"}), (2, {"communication_data_type": "bf16"})),
    ],
)
def test_stages_agree_bitwise_whatever_travels_or_is_kept(pool, world, more):
    for stages in each_stage(pool, world, 2, accumulation=3, **more, **EVERY):
        assert [differences(record, stages[0]) for record in stages] == [[]] * 4


@pytest.mark.ranks(1)
@pytest.mark.parametrize("dtype", [None, "bf16", "fp16"])
def test_gradients_add_up_in_the_dtype_that_was_asked_for(dtype):
    """One rank, bf16 parameters, 4 micro-batches: whether each stage adds up as plain torch does in that dtype."""
    wanted = added_up(4, LOW[dtype], 0.25)
    more = {**MODES["bf16"], "data_types": {} if dtype is None else {"grad_accum_dtype": dtype}}
    assert [exactly(one_step(stage, 4, **more), wanted) for stage in STAGES] == [True] * 4


def added_up(count: int, dtype: torch.dtype, factor: float) -> dict[str, torch.Tensor]:
    """What a step of SGD in bf16 gives, whose gradient is `factor` times the sum of `count` micro-batches."""
    masters = make_net()
    model = copy.deepcopy(masters).bfloat16()
    sums = {name: torch.zeros_like(param, dtype=dtype) for name, param in masters.named_parameters()}
    for step in range(count):
        for name, grad in own_gradients(model, step).items():
            sums[name].add_(grad)
    return {name: round_bf16(masters.get_parameter(name).detach() - sums[name].float() * factor) for name in sums}


@pytest.mark.ranks(1)
def test_gradients_add_up_in_fp32_under_a_boundary_set_by_hand():
    """Buffers made for one backward widen when a second one adds to them."""

    def loop(engine: Any, number: int, inputs: Any) -> torch.Tensor:
        engine.set_gradient_accumulation_boundary(number == 2)
        loss = engine(*inputs)
        engine.backward(loss)
        return loss

    wanted, sgd = added_up(3, torch.float32, 1), {"type": "SGD", "params": {"lr": 1.0}}
    found = [run("dealt", stage, 3, loop=loop, optimizer=sgd, **MODES["bf16"]).weights for stage in STAGES]
    assert [exactly(weights, wanted) for weights in found] == [True] * 4


# --- what the sum is divided by, and what is divided before it travels ----------------------------------------


@pytest.mark.parametrize("stage", [1, 3, *longer(0, 2)])
def test_dividing_before_and_summing_change_nothing_but_rounding(stage):
    free = one_step(stage)
    for keys in ({"gradient_predivide_factor": 4}, {"prescale_gradients": True}):  # powers of two round nothing
        assert exactly(one_step(stage, **keys), free)
    found = one_step(stage, gradient_predivide_factor=3)  # rounds each gradient twice
    assert error(found, free) <= ulps(4, free) and not exactly(found, free)
    # Half the rate makes up for a sum over two ranks in place of their mean.
    assert exactly(one_step(stage, 2, 0.5, gradient_allreduce_op="Sum"), one_step(stage, 2))


class Steep(nn.Module):
    """One weight whose gradient is 1e5: too much for fp16, a quarter of it is not."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, *_: torch.Tensor) -> torch.Tensor:
        return 1e5 * self.weight.sum()


@pytest.mark.parametrize("stage", [0, 2])
def test_dividing_before_keeps_what_travels_in_range(pool, stage):
    train = functools.partial(scenario, pool, Steep, stage, steps=1, communication_data_type="fp16")
    assert [record.skipped for record in train(gradient_predivide_factor=1)] == [1, 1]
    for record in train(gradient_predivide_factor=4):
        assert record.skipped == 0
        assert record.norms == [pytest.approx(3**0.5 * 1e5, rel=2**-11)]


@pytest.mark.parametrize("stage", [1, 3, *longer(0, 2)])
def test_gradients_that_add_up_in_bf16_take_half_the_memory(pool, stage):
    whole, half = (
        scenario(pool, "net", stage, steps=1, accumulation=2, watch=gradient_bytes, **more)[0].seen[0]
        for more in (MODES["bf16"], KEPT_IN_BF16)
    )
    assert whole == 2 * half > 0
