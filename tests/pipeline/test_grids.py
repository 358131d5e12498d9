"""The promise: stages go together with layers that are cut by hand, experts, and replicas, to the bits of one process.

The numbers are integers and powers of two, so that no sum rounds in any order.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from marks import longer
from pipelines import Found, compare, ended, json_of, stepped
from ranks import Pool
from sharing import VOCABULARY, build, needs_transformers
from states import weights_of
from torch import nn

import zero
from zero.plan.grid import PARTS, Grid

SIZE, ROWS, MICRO_BATCHES = 8, 4, 4


class Gathered(torch.autograd.Function):
    """All parts of the outputs, from one rank's part; the gradient of that part is the own part of theirs."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: Any) -> torch.Tensor:
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, part.contiguous(), group=group)
        ctx.group = group
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad.chunk(dist.get_world_size(ctx.group), -1)[dist.get_rank(ctx.group)], None


class Summed(torch.autograd.Function):
    """The inputs as they are; their gradient is the sum of those of all parts."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Cut(nn.Module):
    """Rows of a matrix of integers, of which the ranks along tp have some each."""

    def __init__(self, number: int, sizes: dict[str, int]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(number)
        whole = torch.randint(-1, 2, (SIZE, SIZE), generator=generator).float()
        self.group = None
        if sizes.get("tp", 1) > 1:
            grid, rank = Grid(dist.get_world_size(), sizes), dist.get_rank()
            groups = {ranks: dist.new_group(list(ranks)) for ranks in grid.lists("tp")}
            ranks = grid.ranks("tp", rank)
            self.group, rows, part = groups[ranks], SIZE // len(ranks), ranks.index(rank)
            self.weight = nn.Parameter(whole[part * rows : (part + 1) * rows].clone())
            cut = zero.Cut((SIZE, SIZE), (zero.Box((part * rows, 0), (rows, SIZE)),))
            zero.set_cut(self.weight, cut, PARTS, module=self)
        else:
            self.weight = nn.Parameter(whole)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.group is None:
            return torch.relu(x @ self.weight.t())
        return torch.relu(Gathered.apply(Summed.apply(x, self.group) @ self.weight.t(), self.group))


def trained(sizes: dict[str, int], json: dict[str, Any]) -> Found:
    model = nn.Sequential(*(Cut(number, sizes) for number in range(4)))
    json = json | {"optimizer": {"type": "SGD", "params": {"lr": 2**-8}}, "gradient_clipping": 0}
    tp = {"tensor_parallel": {"autotp_size": sizes["tp"]}} if "tp" in sizes else {}
    engine = zero.initialize(model=model, config=json | tp, loss_fn=lambda output, target: output.sum() / len(output))[
        0
    ]

    def samples(number: int) -> tuple[torch.Tensor, int]:
        x = torch.randint(-1, 2, (ROWS, SIZE), generator=torch.Generator().manual_seed(number)).float()
        return x.chunk(engine.dp_world_size)[engine.get_data_parallel_rank()], 0

    # The weights of a second step would be fractions, of which sums round.
    return ended(engine, *stepped(engine, map(samples, itertools.count()), 1), weights_of)


def check(pool: Pool, one: Pool, sizes: dict[str, int], ranks: int, stage: int, schedule: str) -> None:
    data = ranks // (sizes["pp"] * sizes["tp"])
    json = json_of(stage, data, MICRO_BATCHES)
    (wanted,) = one.run(1, trained, {}, json_of(stage, 1, MICRO_BATCHES))
    section: dict[str, Any] = {"stages": sizes["pp"], "schedule": schedule}
    if schedule == "zero_bubble":
        section["stages_per_rank"] = 1
    for found in pool.run(ranks, trained, sizes, json | {"pipeline": section}):
        assert found.losses == wanted.losses
        assert found.state and all(torch.equal(value, wanted.state[name]) for name, value in found.state.items())
        assert found.norms == wanted.norms


@pytest.mark.parametrize("stage", [3, *longer(0, 1, 2)])
@pytest.mark.parametrize("schedule", ["1f1b", *longer("zero_bubble")])
def test_stages_of_layers_that_are_cut(pool, stage, schedule):
    check(pool, pool, {"pp": 2, "tp": 2}, 4, stage, schedule)


@pytest.mark.long
def test_on_eight_ranks(pool):
    eight = Pool(8)
    try:
        for sizes in ({"pp": 2, "tp": 2}, {"pp": 4, "tp": 2}, {"pp": 2, "tp": 4}):
            for stage, schedule in ((3, "1f1b"), (2, "gpipe"), (0, "zero_bubble")):
                check(eight, pool, sizes, 8, stage, schedule)
    finally:
        eight.close()


def shared(json: dict[str, Any], mode: str) -> Found:
    """A Llama on sequences that two ranks share, in stages or in one piece."""
    json = json | {"sequence_parallel_size": 2, "zero": {"context": {"mode": mode}}}
    engine = zero.initialize(model=build("llama", num_hidden_layers=4), config=json)[0]

    def texts(number: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(1000 * engine.get_data_parallel_rank() + number)
        ids = torch.randint(VOCABULARY, (2, 12 + 4 * (number % 2)), generator=generator)
        return {"input_ids": ids, "labels": ids}

    loss_of = None if "pipeline" in json else lambda engine, batch: engine(**batch).loss
    return ended(engine, *stepped(engine, map(texts, itertools.count()), 2, loss_of), weights_of)


@needs_transformers
@pytest.mark.parametrize("mode", ["ulysses", *longer("ring")])
@pytest.mark.parametrize("stage", [3, *longer(1)])
def test_stages_of_sequences_that_ranks_share(pool, stage, mode):
    json = json_of(stage, 1, MICRO_BATCHES)
    found = pool.run(4, shared, json | {"pipeline": {"stages": 2}}, mode)
    compare(found, pool.run(2, shared, json_of(min(stage, 1), 1, MICRO_BATCHES), mode)[0])
