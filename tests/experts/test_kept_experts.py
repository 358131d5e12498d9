"""The promise: what is kept of divided experts is whole: in checkpoints, in adapters, and as it is read and written."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cut_models import WIDTH, adam, family, full, integers, plain, trained, words
from expert_models import INNER, Experts, Floats, Stacks, json_with, one_process
from marks import longer, needs
from ranks import Pool
from safetensors.torch import load_file
from sharing import needs_transformers
from torch import nn

import zero
from zero.utils import safe_get_full_optimizer_state
from zero.watchdog.watchdog import Watchdog

CLOSE = 1e-6
STATES = ("exp_avg", "exp_avg_sq")
STACKS = [f"blocks.{at}.mix.experts.{name}" for at in range(2) for name in ("up", "down")]


# -- checkpoints


def kept(ep: int, stage: int, folder: Path, steps: Sequence[int], load: str = "", save: bool = True) -> dict[str, Any]:
    """Masters and moments after steps of four batches each, of which a checkpoint is saved after every one."""
    gas = 4 // dist.get_world_size()
    engine, *_ = zero.initialize(model=Floats(), config=json_with(ep, stage, gas, **adam(2**-7)))
    if load:
        engine.load_checkpoint(folder, tag=load)
    for step in steps:
        for micro in range(gas):
            engine.backward(engine(**integers(step, dist.get_rank() * gas + micro)))
            engine.step()
        if save:
            engine.save_checkpoint(folder, tag=f"step {step}")
    found = full(engine)
    for name, param in engine.module.named_parameters():
        found |= {f"{key} of {name}": safe_get_full_optimizer_state(param, key).clone() for key in STATES}
    if save:
        engine.save_16bit_model(folder, "model.safetensors")
    engine.destroy()
    return found


def after(steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Plain torch, and its optimizer."""
    made: list[torch.optim.Optimizer] = []

    def optimizer(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        made.append(torch.optim.AdamW(params, lr=2**-7, weight_decay=0.0))
        return made[0]

    batches = [[integers(step, place) for place in range(4)] for step in range(steps)]
    return one_process(Floats, batches, optimizer).model, made[0]


FROM_TO = [(2, 2, 1, 1), (2, 2, 4, 4), (4, 4, 2, 2), (1, 1, 2, 2), (4, 2, 2, 2), (2, 2, 4, 2), (4, 4, 4, 1)]


@pytest.mark.parametrize(
    ("before", "then", "stage"),
    longer(*((case[:2], case[2:], stage) for case in FROM_TO for stage in (1, 3))),
)
def test_deepspeed_8147_moments_of_experts_are_those_of_the_last_step(
    pool: Pool, tmp_path: Path, before: tuple[int, int], then: tuple[int, int], stage: int
) -> None:
    """After a conversion for other ranks they were those of an earlier step, or mixed between ranks."""
    saved = pool.run(before[0], kept, before[1], stage, tmp_path, range(3))[0]
    for found in pool.run(then[0], kept, then[1], stage, tmp_path, (), "step 2", False):
        assert all(torch.equal(found[name], value) for name, value in saved.items())
    model, optimizer = after(4)
    for found in pool.run(then[0], kept, then[1], stage, tmp_path, (3,), "step 2", False):
        for name, param in model.named_parameters():
            assert (found[name] - param.detach()).abs().max() <= CLOSE, name
            for key in STATES:
                assert (found[f"{key} of {name}"] - optimizer.state[param][key]).abs().max() <= CLOSE, name


@pytest.mark.parametrize(("world", "ep", "stage"), [(2, 2, 1), *longer((2, 2, 3), (4, 4, 0), (4, 2, 2), (4, 4, 3))])
def test_kempner_forge_202_a_checkpoint_has_the_experts_of_all_ranks(
    pool: Pool, tmp_path: Path, world: int, ep: int, stage: int
) -> None:
    """All ranks wrote theirs by the same names; a resume gave each those of one."""
    saved = pool.run(world, kept, ep, stage, tmp_path, (0,))
    assert all(torch.equal(each[name], saved[0][name]) for each in saved for name in saved[0])
    model, _ = after(1)
    file = load_file(tmp_path / "model.safetensors")
    for name, param in model.named_parameters():
        assert (file[name] - param.detach()).abs().max() <= CLOSE, name
        assert torch.equal(file[name].float(), saved[0][name])
    for name in STACKS:
        assert len({tuple(each.flatten().tolist()) for each in file[name]}) == 4, "no expert is another's"
    for found in pool.run(world, kept, ep, stage, tmp_path, (), "step 0", False):
        assert all(torch.equal(found[name], value) for name, value in saved[0].items())


# -- adapters


class Shared(Stacks):
    """All experts have one adapter."""

    def __init__(self, stacks: Stacks) -> None:
        super().__init__(stacks.num_experts)
        self.up, self.down = stacks.up, stacks.down
        generator = torch.Generator().manual_seed(6)
        self.a = nn.Parameter(torch.randint(-1, 2, (2, WIDTH), generator=generator).float())
        self.b = nn.Parameter(torch.randint(-1, 2, (INNER, 2), generator=generator).float())

    def forward(self, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for expert in range(self.num_experts):
            token, slot = torch.where(index == expert)
            inner = torch.relu(x[token] @ self.up[expert].t() + (x[token] @ self.a.t()) @ self.b.t())
            out.index_add_(0, token, inner @ self.down[expert].t() * weights[token, slot, None])
        return out


def shared(kind: type[Experts], only: tuple[int, ...] | None) -> Experts:
    model = kind(only=only, blocks=1)
    model.requires_grad_(False)
    for block in model.blocks:
        block.mix.experts = Shared(block.mix.experts)
    return model


def drifted(ep: int, stage: int, tp: int, only: tuple[int, ...] | None) -> dict[str, torch.Tensor]:
    """Of the first step on integers the bits are compared; returns the weights after six steps of AdamW."""
    place, places = dist.get_rank() // tp, dist.get_world_size() // tp
    more = {"tensor_parallel": {"autotp_size": tp}}
    make = functools.partial(shared, Experts, only)
    found, wanted = trained(make, json_with(ep, stage, **more), integers, place), plain(make, integers, places)
    names = [name for name, grad in wanted["grads"].items() if grad is not None]
    assert len(names) == 2 and all(torch.equal(found["grads"][name], wanted["grads"][name]) for name in names)
    make = functools.partial(shared, Floats, only)
    found = trained(make, json_with(ep, stage, **more, **adam(2**-5)), integers, place, steps=6)
    batches = [[integers(step, each) for each in range(places)] for step in range(6)]
    then = one_process(make, batches, functools.partial(torch.optim.AdamW, lr=2**-5, weight_decay=0.0)).model
    for name in names:
        assert (found["weights"][name] - then.get_parameter(name).detach()).abs().max() <= 5 * CLOSE, name
    return {name: found["weights"][name] for name in names}


@pytest.mark.parametrize(
    ("world", "ep", "stage", "tp"),
    longer(
        *((w, ep, s, tp) for w, ep, tp in ((2, 2, 1), (4, 4, 1), (4, 2, 1), (2, 2, 2), (4, 4, 2)) for s in (0, 1, 3))
    ),
)
@pytest.mark.parametrize("only", [None, (0,)])
def test_megatron_bridge_6009_an_adapter_that_all_experts_share_is_the_same_on_all_ranks(
    pool: Pool, world: int, ep: int, stage: int, tp: int, only: tuple[int, ...] | None
) -> None:
    """Its gradient was of the own experts: after six steps ranks were 0.09 apart."""
    first, *others = pool.run(world, drifted, ep, stage, tp, only)
    assert all(torch.equal(other[name], first[name]) for other in others for name in first)


TARGETS = ["experts.gate_up_proj", "experts.down_proj"]


def on_stacks(name: str) -> Any:
    from peft import LoraConfig, get_peft_model

    model = family(name)
    model = get_peft_model(model, LoraConfig(r=4, target_modules=[], target_parameters=TARGETS, lora_dropout=0.0))
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for each, param in model.named_parameters():
            if "lora_" in each:  # B is zero at first, and A has no gradient then
                param.copy_(0.1 * torch.randn(param.shape, generator=generator))
    return model


@needs_transformers
@needs("peft")
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("world", "name", "stage"),
    longer(*((w, n, s) for w, n in ((2, "mixtral"), (4, "mixtral"), (2, "gpt_oss")) for s in (1, 3))),
)
def test_unsloth_11014_and_agilerl_658_all_stacks_are_trained_and_gathered_by_no_rank(
    world: int, name: str, stage: int
) -> None:
    """Two of three stacks had no adapter; and to attach them, one rank gathered all experts."""
    make, begun = functools.partial(on_stacks, name), list[tuple[str, int]]()
    begin = Watchdog.begin

    def noted(self: Watchdog, direction: str, unit: str = "", sent: int = 0, *args: Any, **kwargs: Any) -> Any:
        begun.append((direction, sent))
        return begin(self, direction, unit, sent, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Watchdog, "begin", noted)
        engine, *_ = zero.initialize(model=make(), config=json_with(world, stage))
        held = {each: param.shape[0] for each, param in engine.module.named_parameters() if "experts" in each}
        engine.backward(engine(**words(0, dist.get_rank())).loss)
        engine.step()
        during = len(begun)
        trained_ones = full(engine)
    stack = min(param.nbytes for each, param in make().named_parameters() if "experts" in each and param.ndim == 3)
    layers = [sent for direction, sent in begun[:during] if direction in ("gather", "layer gather")]
    assert all(held[each] == 4 // world for each in held if "lora" not in each)
    assert max(layers, default=0) < stack
    engine.destroy()
    batches = [[words(0, place) for place in range(world)]]
    wanted = one_process(make, batches, functools.partial(torch.optim.SGD, lr=0.125)).model
    before, seen = dict(make().named_parameters()), 0
    for each, param in wanted.named_parameters():
        if param.requires_grad:
            seen += 1
            assert (param - before[each]).abs().max() > 1e-6, "it is trained"
            assert (trained_ones[each] - param.detach()).abs().max() <= CLOSE, each
    assert seen == 2 * 2 * 2, "two layers of two stacks, with A and B"


@needs_transformers
@needs("peft")
@pytest.mark.ranks
@pytest.mark.parametrize("world", longer(4))
def test_one_expert_a_rank_that_peft_would_take_for_a_plain_layer(world: int) -> None:
    """Where its matrices are not square, they would not even fit."""
    model = on_stacks("gpt_oss")
    before = {name: param.shape for name, param in model.named_parameters()}
    with pytest.raises(ValueError, match=r"one expert of .*\[experts, in, out\] and have LoRA.*at least two a rank"):
        zero.initialize(model=model, config=json_with(world, 3))
    assert {name: param.shape for name, param in model.named_parameters()} == before


# -- read and written


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("world", "ep", "stage"), longer(*((w, ep, s) for w, ep in ((2, 2), (4, 2)) for s in range(4)))
)
def test_a_stack_is_read_and_written_under_gathered_parameters(world: int, ep: int, stage: int) -> None:
    """Each rank has its own experts inside, and each writes its own; training goes on with what they wrote."""
    make = functools.partial(Experts, blocks=1)
    cut = {"stage3_param_persistence_threshold": 0}
    engine, *_ = zero.initialize(model=make(), config=json_with(ep, stage, zero_optimization=cut))
    before, here, each = dict(make().named_parameters()), dist.get_rank() % ep, 4 // ep
    for name in STACKS[:2]:
        param = engine.module.get_parameter(name)
        with zero.GatheredParameters(param):
            assert torch.equal(param, before[name][here * each : (here + 1) * each])
        with zero.GatheredParameters(param, modifier_rank=0), torch.no_grad():
            param.mul_(2)
    doubled = make()
    with torch.no_grad():
        for name in STACKS[:2]:
            doubled.get_parameter(name).mul_(2)
    assert all(torch.equal(value, doubled.get_parameter(name)) for name, value in full(engine).items())
    batches = [[integers(0, place) for place in range(world)]]
    engine.backward(engine(**integers(0, dist.get_rank())))
    engine.step()
    wanted = one_process(lambda: doubled, batches, functools.partial(torch.optim.SGD, lr=0.125)).model
    assert all(torch.equal(value, wanted.get_parameter(name)) for name, value in full(engine).items())
    engine.destroy()
