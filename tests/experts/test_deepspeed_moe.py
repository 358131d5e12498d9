"""The promise: DeepSpeed's MoE layer routes as it says, and gives the same on ranks that divide its experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from marks import longer
from torch import nn

import zero
from zero.compat.moe import MoE, has_moe_layers

WIDTH, COUNT = 8, 4


class Mixture(nn.Module):
    """Its experts differ, and no number of it depends on how many of them are here."""

    def __init__(self, ep: int, **more: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        expert = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.moe = MoE(WIDTH, expert, COUNT, ep, **more)
        here = COUNT // ep
        place = dist.get_rank() % ep if dist.is_initialized() else 0
        for at, each in enumerate(self.moe.deepspeed_moe.experts.deepspeed_experts, place * here):
            generator = torch.Generator().manual_seed(at)
            for param in each.parameters():
                param.data.copy_(torch.randn(param.shape, generator=generator) / 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out, balance, _ = self.moe(self.first(x))
        return self.last(out).square().mean() + 0.01 * balance


def engine_of(ep: int, stage: int, **more: Any) -> zero.Engine:
    json = {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": stage},
    }
    return zero.initialize(model=Mixture(ep, **more), config=json)[0]


def steps(engine: zero.Engine, *numbers: int, lengths: tuple[int, ...] = (5,)) -> list[tuple[float, float]]:
    found = []
    for number in numbers:
        torch.manual_seed(100 * number + dist.get_rank())
        loss = engine(torch.randn(3, lengths[dist.get_rank() % len(lengths)], WIDTH))
        engine.backward(loss)
        engine.step()
        found.append((loss.item(), engine.get_global_grad_norm()))
    return found


def same(found: list[tuple[float, float]], wanted: list[tuple[float, float]]) -> None:
    assert [each for pair in found for each in pair] == pytest.approx([x for pair in wanted for x in pair], rel=2e-6)


CASES = [(4, 2, 2, {"k": 2}), (2, 2, 0, {}), (4, 4, 1, {"k": 3}), (2, 2, 2, {"use_residual": True})]


@pytest.mark.ranks
@pytest.mark.parametrize(("world", "ep", "stage", "more"), [(2, 2, 3, {"k": 2}), *longer(*CASES)])
def test_ranks_that_divide_experts_train_as_if_each_had_all(
    world: int, ep: int, stage: int, more: dict[str, Any]
) -> None:
    """DeepSpeed's TestExpertWeightGradWithZero compares gradients; norms show the factors of all of them."""
    alone, divided = engine_of(1, stage, **more), engine_of(ep, stage, **more)
    names = [name for name, _ in divided.module.named_parameters() if "deepspeed_experts" in name]
    first = dist.get_rank() % ep * (COUNT // ep)
    assert names[0] == f"moe.deepspeed_moe.experts.deepspeed_experts.{first}.0.weight"
    same(steps(divided, 0, 1, 2), steps(alone, 0, 1, 2))


@pytest.mark.ranks
@pytest.mark.parametrize(("world", "k"), longer((2, 1), (2, 2), (2, 3)))
def test_ranks_with_other_numbers_of_tokens_and_no_capacity(world: int, k: int) -> None:
    """DeepSpeed#6809 and #5794: capacities that differed by rank, and experts without a token, made ranks wait."""
    more = {"k": k, "drop_tokens": False}
    alone, divided = engine_of(1, 2, **more), engine_of(2, 2, **more)
    same(steps(divided, 0, 1, lengths=(5, 1)), steps(alone, 0, 1, lengths=(5, 1)))


@pytest.mark.ranks
@pytest.mark.parametrize(("world", "ep"), [(2, 2), *longer((4, 2), (4, 4))])
def test_checkpoints_with_moments_interchange_between_divisions(world: int, ep: int, tmp_path: Path) -> None:
    divided = engine_of(ep, 1, k=2)
    steps(divided, 0, 1)
    divided.save_checkpoint(tmp_path / "checkpoint")
    wanted = steps(divided, 2, 3)
    for other, stage in ((1, 3), (ep, 2), (2, 0)):
        engine = engine_of(other, stage, k=2)
        engine.load_checkpoint(tmp_path / "checkpoint")
        same(steps(engine, 2, 3), wanted)
        engine.destroy()


def by_hand(moe: MoE, x: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
    """Top-2 without draws, token by token: DeepSpeed's order is all first choices, then all second ones."""
    layer = moe.deepspeed_moe
    gates = layer.gate.wg(x).softmax(1)
    capacity, counts, out = max(moe_least(layer), 0), [0] * COUNT, []
    choices = gates.topk(2, 1).indices
    kept = torch.zeros(len(x), COUNT, dtype=torch.bool)
    for slot in range(2):
        for token in range(len(x)):
            expert = int(choices[token, slot])
            kept[token, expert] = counts[expert] < capacity
            counts[expert] += 1
    for token in range(len(x)):
        weights = gates[token] * kept[token]
        weights = weights / weights.sum().clamp(min=1e-7)
        out.append(sum(weights[at] * layer.experts.deepspeed_experts[at](x[token]) for at in range(COUNT)))
    return torch.stack(out), counts


def moe_least(layer: Any) -> int:
    return layer.gate.capacity[2]


def test_the_second_choice_gets_what_first_choices_leave() -> None:
    moe = Mixture(1, k=2, capacity_factor=0.1, min_capacity=5, top2_2nd_expert_sampling=False).moe
    x = torch.randn(16, WIDTH)
    wanted, counts = by_hand(moe, x)
    found, balance, said = moe(x.view(2, 8, WIDTH))
    assert torch.allclose(found.flatten(0, 1), wanted, atol=1e-6)
    assert said.tolist() == counts
    gates = moe.deepspeed_moe.gate.wg(x).softmax(1)
    share = nn.functional.one_hot(gates.argmax(1), COUNT).float().mean(0)
    assert balance.item() == pytest.approx(float((gates.mean(0) * share).sum().detach() * COUNT))


@pytest.mark.parametrize(("k", "draws"), [(1, False), (1, True), (3, False)])
def test_no_expert_gets_more_than_its_capacity(k: int, draws: bool) -> None:
    """Those that it takes are the first, drawn ones, or those with the largest weights."""
    gate = Mixture(1, k=k, use_rts=draws, min_capacity=1, capacity_factor=0.5).moe.deepspeed_moe.gate
    x = torch.randn(40, WIDTH)
    index, weights, _, counts = gate(x, None)
    gate.capacity = None
    every = gate(x, None)[0]
    capacity = 5 * k
    for expert in range(COUNT):
        took, wanted = (index == expert).any(1), (every == expert).any(1)
        assert int(took.sum()) == min(capacity, int(counts[expert])) and bool((wanted | ~took).all())
        if k == 3:
            gates = gate.wg(x).softmax(1)[:, expert]
            left = wanted & ~took
            assert not left.any() or gates[took].min() >= gates[left].max()
        elif not draws:
            assert torch.equal(took.nonzero(), wanted.nonzero()[:capacity])
    assert bool((weights[index == COUNT] == 0).all()) and bool((index == COUNT).any())


def test_tokens_that_are_not_used_reach_no_expert_and_others_are_drawn_anew() -> None:
    moe = Mixture(1, min_capacity=0, capacity_factor=0.5).moe
    x, used = torch.randn(40, WIDTH), torch.arange(40) % 2
    out, _, counts = moe(x, used)
    assert not out[::2].any() and int(counts.sum()) == 20
    assert not torch.equal(moe(x)[0], moe(x)[0])
    assert has_moe_layers(moe) == (True, COUNT) and has_moe_layers(nn.Linear(2, 2)) == (False, 0)


@pytest.mark.parametrize("noise", ["Jitter", "RSample"])
def test_noise_is_of_training_only(noise: str) -> None:
    gate = Mixture(1, noisy_gate_policy=noise, drop_tokens=False).moe.deepspeed_moe.gate
    x = torch.randn(64, WIDTH)
    seen = {tuple(map(tuple, gate(x, None)[1].tolist())) for _ in range(4)}
    gate.eval()
    assert len(seen) > 1 and torch.equal(gate(x, None)[1], gate(x, None)[1])


def test_what_cannot_be_divided_is_refused() -> None:
    with pytest.raises(ValueError, match="multiple of ep_size 3"):
        MoE(WIDTH, nn.Linear(8, 8), 4, 3)
    model = nn.ModuleList([MoE(WIDTH, nn.Linear(8, 8), 4, 2), MoE(WIDTH, nn.Linear(8, 8), 4, 4)])
    with pytest.raises(ValueError, match=r"ep_size \[2, 4\]"):
        zero.initialize(model=model, config={"train_micro_batch_size_per_gpu": 1})
