"""What was wrong elsewhere where ranks divide experts, under the name of the report: here it is right.

Others stand beside what they are about: those of checkpoints and of adapters in test_kept_experts.py, of ranks without
tokens in test_empty_ranks.py, and Megatron#6660 by hand in test_grid_seams.py.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cut_models import adam, family, integers, place_of, plain, trained, words
from expert_models import Experts, Floats, json_with, one_process
from marks import longer
from ranks import Pool
from sharing import needs_transformers
from torch import nn

import zero
from zero.core import comm
from zero.utils import safe_get_full_grad
from zero.watchdog.watchdog import Watchdog

pytestmark = pytest.mark.ranks
CLOSE = 1e-6
CUT = {"stage3_param_persistence_threshold": 0}
IMPLEMENTATIONS = ["eager", "batched_mm", "grouped_mm"]  # of Transformers, on a CPU
MIXTURES = ["mixtral", "deepseek_v3", "gpt_oss"]


def chosen(name: str, implementation: str, **more: Any) -> nn.Module:
    model = family(name, **more)
    model.set_experts_implementation(implementation)
    return model


def norm_of(grads: dict[str, torch.Tensor]) -> float:
    return math.sqrt(sum(float(grad.double().square().sum()) for grad in grads.values() if grad is not None))


def exact(ep: int, stage: int, gas: int = 1, make: Callable[[], nn.Module] = Experts, **more: Any) -> dict[str, Any]:
    """Train a step on integers, which must have the gradients and weights of one process to the bit."""
    tp = more.get("tensor_parallel", {}).get("autotp_size", 1)
    found = trained(make, json_with(ep, stage, gas, **more), integers, place_of(tp))
    wanted = plain(make, integers, dist.get_world_size() // tp, gas)
    for name, param in make().named_parameters():
        grad = wanted["grads"][name]
        assert torch.equal(found["grads"][name], grad), name
        assert torch.equal(found["weights"][name], param - 0.125 * grad), name
    return found | {"wanted": wanted}


# -- what routers and experts compute


def is_router(name: str) -> bool:
    return name.endswith(("gate.weight", "router.weight"))


@needs_transformers
@pytest.mark.parametrize(
    ("world", "name", "implementation", "stage"),
    [
        (2, "mixtral", "batched_mm", 1),
        *longer(*((2, name, each, stage) for name in MIXTURES for each in IMPLEMENTATIONS for stage in (0, 3))),
        *longer(*((4, "mixtral", each, 2) for each in IMPLEMENTATIONS)),
    ],
)
def test_transformers_48687_routers_have_the_gradient_of_one_process(
    world: int, name: str, implementation: str, stage: int
) -> None:
    """The loss was right; slots of other ranks' experts, whose weights were zeros, added to the gradient."""
    make = functools.partial(chosen, name, implementation)
    found, wanted = trained(make, json_with(world, stage), words, place_of(1)), plain(make, words, world)
    seen = [each for each in wanted["grads"] if is_router(each)]
    assert seen
    for each in seen:
        assert wanted["grads"][each].abs().max() > 1e-4
        assert (found["grads"][each] - wanted["grads"][each]).abs().max() <= CLOSE, each
    losses = torch.tensor(found["losses"])
    dist.all_reduce(losses)
    assert losses.item() / world == pytest.approx(wanted["loss"], abs=CLOSE)


@needs_transformers
@pytest.mark.parametrize(
    ("world", "name", "implementation"),
    longer(*((world, name, each) for world in (2, 4) for name in MIXTURES for each in IMPLEMENTATIONS)),
)
def test_transformers_45473_logits_are_those_of_one_process(world: int, name: str, implementation: str) -> None:
    """Weights were paired with other experts, slots of others' experts were computed, and another plan was read."""
    make = functools.partial(chosen, name, implementation)
    engine, *_ = zero.initialize(model=make(), config=json_with(world, 3, zero_optimization=CUT))
    engine.eval()
    ids = words(0, place_of(1))["input_ids"]
    with torch.no_grad():
        found, wanted = engine(input_ids=ids).logits, make().eval()(input_ids=ids).logits
    engine.destroy()
    assert (found - wanted).abs().max() <= CLOSE and wanted.std() > 1e-3


class Sink:
    def __init__(self) -> None:
        self.told: dict[str, float] = {}

    def write_events(self, events: Any) -> None:
        self.told |= {name: value for name, value, _ in events}


def reported(ep: int, tp: int) -> tuple[float | None, dict[str, torch.Tensor]]:
    """The reported loss and the gradients of a step whose micro-batches count 1 + 2 x place tokens."""
    json = json_with(ep, 1, 2, zero={"mean": "tokens"}, tensor_parallel={"autotp_size": tp}, steps_per_print=1)
    engine, *_ = zero.initialize(model=Experts(), config=json)
    place, sink = place_of(tp), Sink()
    if not dist.get_rank():
        engine.monitor.add(sink)
    for micro in range(2):
        engine.backward(engine(**integers(micro, place)), tokens=1 + 2 * place)
        if micro:
            grads = {name: safe_get_full_grad(param).clone() for name, param in engine.module.named_parameters()}
        engine.step()
    engine.destroy()
    return sink.told.get("Train/Samples/train_loss"), grads


@pytest.mark.parametrize(("ep", "tp"), longer((4, 2), (2, 2), (4, 1), (2, 1)))
def test_transformers_45994_loss_and_gradients_count_no_token_twice(pool: Pool, ep: int, tp: int) -> None:
    """A loss over the tokens of all was multiplied by the ranks that share them: 47.88 for 11.97 at 2 x 4."""
    model, total, dp = Experts(), 0.0, 4 // tp
    tokens = 2 * sum(1 + 2 * place for place in range(dp))
    for place in range(dp):
        for micro in range(2):
            loss = model(**integers(micro, place)) * (1 + 2 * place) / tokens
            loss.backward()
            total += loss.item()
    found = pool.run(4, reported, ep, tp)
    assert found[0][0] == pytest.approx(total, rel=CLOSE)
    for _, grads in found:
        for name, param in model.named_parameters():
            assert torch.allclose(grads[name], param.grad, rtol=CLOSE, atol=CLOSE), name


@pytest.mark.parametrize(
    ("world", "tp", "stage"), longer(*((w, tp, s) for w, tp in ((2, 1), (4, 2)) for s in range(4)))
)
def test_transformers_48208_one_norm_and_optimizer_of_stacks_and_the_rest(world: int, tp: int, stage: int) -> None:
    """Some were DTensors of one mesh, others of another or none, and neither the norm nor the optimizer took both."""
    more = {"gradient_clipping": 0.5, "tensor_parallel": {"autotp_size": tp}, **adam(0.125)}
    found = trained(Experts, json_with(2, stage, **more), integers, place_of(tp))
    batches = [[integers(0, place) for place in range(world // tp)]]
    wanted = one_process(Experts, batches, functools.partial(torch.optim.AdamW, lr=0.125, weight_decay=0.0), 0.5)
    assert wanted.norms[0] > 0.5 and found["norms"][0] == pytest.approx(wanted.norms[0], rel=CLOSE)
    for name, param in wanted.model.named_parameters():
        assert (found["weights"][name] - param.detach()).abs().max() <= CLOSE, name


# -- gradients and their norm


@pytest.mark.parametrize(
    ("world", "ep", "stage"), longer(*((w, ep, s) for w, ep in ((2, 2), (4, 2), (4, 4)) for s in range(3)))
)
def test_deepspeed_5618_gradients_of_experts_are_those_without_expert_parallelism(
    world: int, ep: int, stage: int
) -> None:
    """They were divided by the ranks that share an expert, not by all that have samples: ep times too large."""
    found, without = exact(ep, stage), exact(1, stage)
    for name, grad in without["grads"].items():
        assert torch.equal(found["grads"][name], grad), name


@pytest.mark.parametrize(("ep", "gas"), longer((4, 1), (2, 1), (2, 3)))
@pytest.mark.parametrize("world", [4])
def test_megatron_5956_experts_that_few_ranks_shard_are_divided_by_all_ranks(world: int, ep: int, gas: int) -> None:
    """Where parameters are sharded, too, the gradient of an expert was the mean over its own ranks."""
    found = exact(ep, 3, gas, zero_optimization=CUT) if gas != 3 else exact(ep, 3, 4, zero_optimization=CUT)
    grads = found["grads"]
    assert all(grads[f"blocks.{at}.mix.experts.{name}"].any() for at in range(2) for name in ("up", "down"))


@pytest.mark.parametrize(("world", "stage"), longer(*((w, s) for w in (2, 4) for s in range(4))))
def test_megatron_6660_gradients_of_experts_of_one_rank_each_are_added_once(world: int, stage: int) -> None:
    """The gradient of a buffer whose group has one rank was doubled at every micro-batch."""
    exact(world, stage, 4)


@pytest.mark.parametrize(("world", "ep", "stage"), longer(*((4, ep, s) for ep in (2, 4) for s in range(4))))
def test_megatron_5916_all_experts_count_in_the_norm_beside_cut_layers(world: int, ep: int, stage: int) -> None:
    """With tensor parallelism some were left out, and clipping was too weak."""
    found = exact(ep, stage, tensor_parallel={"autotp_size": 2})
    grads = found["wanted"]["grads"]
    halves = {name: grad[: len(grad) // 2] if "experts" in name else grad for name, grad in grads.items()}
    assert found["norms"][0] == pytest.approx(norm_of(grads), rel=1e-12)
    assert norm_of(halves) < 0.99 * norm_of(grads)


# -- ranks that wait for each other


def idle_at_last() -> Experts:
    model = Experts()
    model.blocks[-1].mix.only = (0,)
    return model


@pytest.mark.parametrize(("world", "stage"), [(2, 2), *longer((2, 0), (2, 1), (2, 3), (4, 2), (4, 3))])
def test_deepspeed_5794_experts_of_the_last_block_that_get_no_token(world: int, stage: int) -> None:
    """At stage 2 a run hung at the last layer of experts."""
    exact(world, stage, make=idle_at_last)


def cut_short(number: int, place: int) -> dict[str, torch.Tensor]:
    """Each rank has another number of tokens."""
    return {name: value[:, : (12, 1, 7, 4)[place]] for name, value in integers(number, place).items()}


@pytest.mark.parametrize(("world", "stage"), longer((2, 2), (4, 0), (4, 1), (4, 2), (4, 3)))
def test_deepspeed_6809_ranks_with_unequal_numbers_of_tokens(world: int, stage: int) -> None:
    """Each had room for as many tokens of an expert as its own batch said, and waited for ranks that had other."""
    engine, *_ = zero.initialize(model=Experts(), config=json_with(world, stage, zero_optimization=CUT))
    engine.eval()
    with torch.no_grad():
        for number in range(3):
            batch = cut_short(number, dist.get_rank())
            assert torch.equal(engine(**batch), Experts()(**batch))
    engine.destroy()
    found, wanted = (
        trained(Experts, json_with(world, stage), cut_short, dist.get_rank()),
        plain(Experts, cut_short, world),
    )
    for name, grad in wanted["grads"].items():
        assert torch.equal(found["grads"][name], grad), name


def issued(stage: int, only: Sequence[int] | None) -> list[tuple[str, str]]:
    """What the rank begins in three steps, in order; all exchanges go over a group that nothing else is sent over."""
    json = json_with(2, stage, 2, zero={"check_order": True}, zero_optimization=CUT)
    model = Experts(only=only)
    engine, *_ = zero.initialize(model=model, config=json)
    begun: list[tuple[str, str]] = []
    groups: dict[str, set[int]] = {"exchanges": set(), "others": set()}
    begin = Watchdog.begin

    def noted(self: Watchdog, direction: str, unit: str = "", *args: Any, **kwargs: Any) -> Any:
        begun.append((direction, unit))
        return begin(self, direction, unit, *args, **kwargs)

    def watched(module: Any, name: str, patch: pytest.MonkeyPatch) -> None:
        call = getattr(module, name)

        def seen(*args: Any, **kwargs: Any) -> Any:
            axis = next((each for each in args if isinstance(each, comm.Axis)), None)
            group = kwargs.get("group") if axis is None else axis.group
            groups["exchanges" if "expert" in begun[-1][0] else "others"].add(id(group))
            return call(*args, **kwargs)

        patch.setattr(module, name, seen)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Watchdog, "begin", noted)
        for name in ("isend", "irecv", "all_to_all_single", "all_reduce", "broadcast"):
            watched(dist, name, patch)
        for name in ("all_gather_single", "reduce_scatter_single", "start"):
            watched(comm, name, patch)
        for number in range(6):
            engine.backward(engine(**integers(number, dist.get_rank())))
            engine.step()
    engine.destroy()
    assert len(groups["exchanges"]) == 1 and not groups["exchanges"] & groups["others"]
    return begun


@pytest.mark.parametrize(
    ("world", "stage", "only"),
    [
        (2, 3, (0, 1)),
        *longer(*((2, stage, only) for stage in range(4) for only in (None, (0,)))),
        *longer(*((4, stage, only) for stage in range(4) for only in (None, (0, 1), (3,)))),
    ],
)
def test_megatron_5749_all_ranks_begin_exchanges_gathers_and_sums_in_one_order(
    pool: Pool, world: int, stage: int, only: Sequence[int] | None
) -> None:
    """Exchanges and sums of gradients met in other orders on other ranks: a hang after 92 to 852 steps."""
    first, *others = pool.run(world, issued, stage, only)
    exchanges = [each for each in first if each[0].startswith("expert ")]
    assert len(exchanges) == 6 * 2 * (3 + 2), "two blocks: counts, tokens there and back; both back in the backward"
    assert len({*first}) > (1 if stage or world > 2 else 0)
    for other in others:
        assert other == first


# -- auxiliary losses


def padded(number: int, place: int) -> dict[str, torch.Tensor]:
    """Of the first row two thirds are padding."""
    batch = words(number, place)
    mask = torch.ones_like(batch["input_ids"])
    mask[0, 4:] = 0
    return batch | {"attention_mask": mask, "labels": batch["labels"].masked_fill(mask == 0, -100)}


@needs_transformers
@pytest.mark.parametrize(
    ("world", "ep", "tp", "stage"), longer((2, 2, 2, 1), (4, 2, 2, 0), (4, 2, 2, 3), (4, 4, 2, 1), (2, 2, 1, 2))
)
def test_megatron_7452_05_padding_is_not_counted_by_the_auxiliary_loss(
    world: int, ep: int, tp: int, stage: int
) -> None:
    """The mask was cut along another group than the tokens: the loss counted padding, and left tokens out."""
    make = functools.partial(family, "mixtral", output_router_logits=True, router_aux_loss_coef=1.0)
    found = trained(make, json_with(ep, stage, tensor_parallel={"autotp_size": tp}), padded, place_of(tp))
    wanted = plain(make, padded, world // tp)
    losses = torch.tensor(found["losses"])
    dist.all_reduce(losses)
    assert losses.item() / world == pytest.approx(wanted["loss"], abs=CLOSE)
    for name, grad in wanted["grads"].items():
        assert (found["grads"][name] - grad).abs().max() <= CLOSE, name
    all_tokens = plain(make, lambda *at: padded(*at) | {"attention_mask": None}, world // tp)
    assert any((all_tokens["grads"][name] - grad).abs().max() > 1e-4 for name, grad in wanted["grads"].items())


# -- what the optimizer does


def decayed(make: Callable[[], nn.Module]) -> dict[str, torch.Tensor]:
    """The weights of plain torch after three steps of AdamW."""
    steps = [[integers(step, place) for place in range(dist.get_world_size())] for step in range(3)]
    wanted = one_process(make, steps, functools.partial(torch.optim.AdamW, lr=2**-7, weight_decay=0.5))
    return {name: param.detach() for name, param in wanted.model.named_parameters()}


@pytest.mark.parametrize(("world", "stage"), longer(*((w, s) for w in (2, 4) for s in range(4))))
def test_automodel_2995_weights_of_experts_without_tokens_decay(world: int, stage: int) -> None:
    """Some of a rank without tokens had no gradient: neither decay nor momentum; and routers had none of the loss."""
    make = functools.partial(Floats, only=(0,))
    optimizer = {"optimizer": {"type": "AdamW", "params": {"lr": 2**-7, "weight_decay": 0.5}}}
    found, wanted = (
        trained(make, json_with(world, stage, **optimizer), integers, dist.get_rank(), steps=3),
        decayed(make),
    )
    for name, before in make().named_parameters():
        assert (found["weights"][name] - wanted[name]).abs().max() <= CLOSE, name
        if "experts" in name:
            assert not found["grads"][name][1:].any() and found["grads"][name][0].any()
            assert (found["weights"][name][1:] - before[1:] * (1 - 2**-8) ** 3).abs().max() <= CLOSE
        if "router" in name:
            assert found["grads"][name].any()
