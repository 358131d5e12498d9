"""The promise: a mean over tokens is one process's where the graph of a loss crosses ranks, whatever each rank counts.

What lands on a rank then holds parts of other ranks' losses, each of which has the weight of its own rank. The oracle
is plain torch in one process in fp64: the sum of all losses over the number of all counted tokens.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from closeness import error
from marks import each_once, longer
from torch import nn
from torch.distributed.nn.functional import all_gather
from torch.nn import functional as F

import zero
from zero.core.owner import set_cut
from zero.plan.cut import Box, Cut
from zero.utils import cut_sequence, safe_get_full_grad

pytestmark = pytest.mark.ranks(2)
LENGTH, WORDS, WIDTH, MICRO_BATCHES = 32, 17, 16, 2
PLACES = torch.arange(LENGTH)
COUNTED = {  # per micro-batch
    "prompt": [PLACES >= 12, PLACES >= 12],
    "nearly even": [PLACES >= 0, PLACES >= 3],
    "none on a rank": [PLACES >= 26, PLACES >= 26],
    "none in a micro-batch": [PLACES >= LENGTH, PLACES >= 20],
}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.place = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids) + self.place(position_ids)
        for layer in self.layers:
            q, k, v = layer(x).unflatten(-1, (3, 2, WIDTH // 2)).permute(2, 0, 3, 1, 4)
            x = x + zero.attention(q, k, v, position_ids=position_ids).transpose(1, 2).flatten(2)
        return self.head(x)


def batch(number: int, counted: str) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(WORDS, (2, LENGTH), generator=torch.Generator().manual_seed(number))
    return ids, ids.where(COUNTED[counted][number], -100)


def loss_of(logits: torch.Tensor, labels: torch.Tensor, form: str) -> torch.Tensor:
    """A mean, a sum, or a mean by a division that makes NaN of nothing, forward and backward."""
    reduction = {"mean": "mean", "sum": "sum", "divided": "none"}[form]
    found = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction=reduction)
    mask = (labels.flatten() != -100).to(found.dtype)
    return (found * mask).sum() / mask.sum() if form == "divided" else found


def grads_in_one_process(counted: str, dtype: torch.dtype, scale: float = 1.0) -> dict[str, torch.Tensor]:
    model, count = Model().to(dtype), 0
    for number in range(MICRO_BATCHES):
        ids, labels = batch(number, counted)
        labels = F.pad(labels[:, 1:], (0, 1), value=-100)
        logits = model(ids, PLACES[None].expand_as(ids))
        (loss_of(logits.to(torch.float64), labels, "sum") * scale).backward()
        count += int((labels != -100).sum())
    return {name: param.grad.double() / (count * scale) for name, param in model.named_parameters()}


def settings(micro: int, stage: int = 0, accumulation: int = 1, **more: Any) -> dict[str, Any]:
    sgd = {"type": "SGD", "params": {"lr": 0.1}}
    sizes = {"train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": accumulation}
    return {**sizes, "zero_optimization": {"stage": stage}, "optimizer": sgd, "zero": {"mean": "tokens"}, **more}


def shared(mode: str, stage: int, counted: str, form: str, way: str, more: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Gradients of one step on ranks that share each sequence, of a loss outside of the model."""
    config = settings(2, stage, MICRO_BATCHES, sequence_parallel_size=dist.get_world_size()) | more
    config["zero"] = {"mean": "tokens", "context": {"mode": mode}, **more.get("zero", {})}
    engine, *_ = zero.initialize(model=Model(), config=config)
    for number in range(MICRO_BATCHES):
        ids, labels = batch(number, counted)
        logits = engine(input_ids=ids, position_ids=PLACES[None].expand_as(ids))
        labels = cut_sequence(engine, labels, shift=True)
        loss, told = loss_of(logits.float(), labels, form), int((labels != -100).sum())
        said = {"tokens": told, "reduction": "sum" if form == "sum" else "mean"}
        if way == "scale":
            engine.scale(loss, **said).backward()
        else:
            engine.backward(loss, **said)
        if number + 1 < MICRO_BATCHES:
            engine.step()
    found = {name: safe_get_full_grad(param) for name, param in engine.module.named_parameters()}
    engine.step()
    assert engine.was_step_applied()
    engine.destroy()
    return found


MODES, FORMS, WAYS = ["ring", "ulysses"], ["mean", "divided", "sum"], ["backward", "scale"]


@pytest.mark.parametrize(
    ("counted", "mode", "stage", "form", "way"),
    [
        *each_once(list(COUNTED), MODES, range(4), FORMS, WAYS),
        *longer(*((c, m, s, f, WAYS[s % 2]) for c in COUNTED for m in MODES for s in range(4) for f in FORMS)),
    ],
    ids=str,
)
def test_a_loss_outside_of_a_model_that_shares_sequences(
    counted: str, mode: str, stage: int, form: str, way: str
) -> None:
    exact = grads_in_one_process(counted, torch.float64)
    assert error(shared(mode, stage, counted, form, way, {}), exact) < 1e-6


@pytest.mark.ranks(4)
@pytest.mark.long
@pytest.mark.parametrize("counted", COUNTED)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("other", [{}, {"shard_size": 2}, {"reduce": "tree"}], ids=str)
def test_four_pieces_of_a_sequence(other: dict[str, Any], mode: str, counted: str) -> None:
    sharing = 2 if mode == "ulysses" or other else 4  # two heads: pairs of ranks, and both pairs have the same
    found = shared(mode, 3, counted, "divided", "backward", {"sequence_parallel_size": sharing, "zero": other})
    assert error(found, grads_in_one_process(counted, torch.float64)) < 1e-6


@pytest.mark.ranks(4)
@pytest.mark.parametrize("stage", [3, *longer(1)])
@pytest.mark.parametrize(("counts", "reduction"), [([8, 0], "mean"), *longer(([3, 5], "sum"))], ids=str)
def test_ranks_that_have_parts_of_a_layer(counts: list[int], reduction: str, stage: int) -> None:
    """Two have its halves, cut by hand, and the same samples. All numbers are small integers, so no sum is rounded."""
    torch.manual_seed(0)
    weight, rows = torch.randint(-3, 4, (8, 6)).float(), torch.randint(-3, 4, (2, 8, 6)).float()
    data, part = divmod(dist.get_rank(), 2)
    half = slice(4 * part, 4 * part + 4)
    model = nn.Linear(6, 4, bias=False)
    model.weight.data.copy_(weight[half])
    set_cut(model.weight, Cut((8, 6), (Box((4 * part, 0), (4, 6)),)))
    engine, *_ = zero.initialize(model=model, config=settings(8, stage), mesh_param={"dp_shard": 2, "tp": 2})
    losses = engine(rows[data])[: counts[data]].square().sum(1)
    engine.backward(getattr(losses, reduction)(), tokens=counts[data], reduction=reduction)
    found = safe_get_full_grad(model.weight)
    engine.step()
    exact = sum(2 * (row[:n] @ weight.T).T @ row[:n] for row, n in zip(rows, counts, strict=True)) / sum(counts)
    assert torch.equal(found, exact)
    assert engine.get_global_grad_norm() == math.sqrt(exact.square().sum().item())
    engine.destroy()


@pytest.mark.parametrize(
    ("counted", "mode", "stage", "scale"),
    [
        ("prompt", "ring", 2, 0),
        *longer(*((c, m, s, f) for c in COUNTED for m in MODES for s, f in ((0, 0), (3, 64)))),
    ],
)
def test_fp16_keeps_its_range_and_its_precision(counted: str, mode: str, stage: int, scale: float) -> None:
    exact = grads_in_one_process(counted, torch.float64)
    plain = grads_in_one_process(counted, torch.float16, 64.0 / 16)
    section = {"enabled": True, "loss_scale": scale, "initial_scale_power": 12}
    found = shared(mode, stage, counted, "mean", "backward", {"fp16": section})
    assert error(found, exact) <= 2 * error(plain, exact)


def contrastive(embeds: torch.Tensor, keys: torch.Tensor, first: int, counted: torch.Tensor) -> torch.Tensor:
    """Each row of `embeds` is to find its own key; those that count are summed."""
    own = first + torch.arange(len(embeds))
    return F.cross_entropy(embeds @ keys.T, own.where(counted, -100), reduction="sum")


@pytest.mark.parametrize("stage", [0, 3, *longer(1, 2)])
@pytest.mark.parametrize("counts", [[1, 7], [0, 8], *longer([8, 8], [3, 0])], ids=str)
def test_keys_that_are_gathered_from_all_ranks(counts: list[int], stage: int) -> None:
    """Without shared sequences: a contrastive loss sends gradients to the keys of other ranks."""

    def net() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 8))

    rows = torch.randn(16, 12, generator=torch.Generator().manual_seed(1))
    counted = torch.cat([torch.arange(8) < count for count in counts])
    plain = net().double()
    embeds = plain(rows.double())
    (contrastive(embeds, embeds, 0, counted) / sum(counts)).backward()
    exact = {name: param.grad for name, param in plain.named_parameters()}

    engine, *_ = zero.initialize(model=net(), config=settings(8, stage))
    first = 8 * dist.get_rank()
    mine = slice(first, first + 8)
    embeds = engine(rows[mine])
    total = contrastive(embeds, torch.cat(all_gather(embeds)), first, counted[mine])
    engine.backward(total / counted[mine].sum(), tokens=counted[mine].sum())  # NaN where nothing counts
    assert error({name: safe_get_full_grad(param) for name, param in engine.module.named_parameters()}, exact) < 1e-6
    engine.destroy()


def test_a_nan_of_another_loss_is_not_hidden() -> None:
    """Of two losses of one graph one counts nothing; the other is not finite, and the step is skipped."""
    engine, *_ = zero.initialize(model=nn.Linear(4, 4), config=settings(1, accumulation=2))
    output = engine(torch.ones(1, 4))
    engine.backward((output * 0).sum() / torch.zeros(()), retain_graph=True, tokens=0)
    engine.step()
    engine.backward(output.sum() * (torch.nan if dist.get_rank() else 1.0), tokens=3)
    engine.step()
    assert not engine.was_step_applied()
    engine.destroy()
