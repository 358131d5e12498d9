"""The promise: layers that are cut give the bits of one process, at any number of ranks, stage, and with cut sequences.

The numbers are integers and powers of two, so that no sum rounds in any order: each missing or double factor shows.
"""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from cut_models import MLP, Integers, integers, json_of, place_of, plain, trained
from ranks import Pool
from torch import nn


def one(heads: int, key_heads: int, tied: bool, tp: int, stage: int, sequences: bool) -> None:
    def make() -> Integers:
        return Integers(heads, key_heads, tied=tied)

    dp = dist.get_world_size() // tp
    json = json_of(tp, stage, 2, tensor_parallel={"sequence_parallel": sequences})
    found, wanted = trained(make, json, integers, place_of(tp)), plain(make, integers, dp, 2)
    cut = [name for name, shape in found["shapes"].items() if shape != tuple(wanted["grads"][name].shape)]
    keys = 4 if key_heads > 1 else 0  # one head is whole on all ranks
    assert len(cut) == 1 + 2 * (2 + keys + 1 + 2 * 2 + 1)
    for name, grad in wanted["grads"].items():
        assert torch.equal(found["grads"][name], grad), name
        assert torch.equal(found["weights"][name], dict(make().named_parameters())[name] - 0.125 * grad), name
    total = sum(float(grad.double().square().sum()) for grad in wanted["grads"].values()) ** 0.5
    assert found["norms"][0] == pytest.approx(total, rel=1e-12)
    losses = torch.tensor(found["losses"], dtype=torch.float64)
    dist.all_reduce(losses)
    assert losses.sum().item() / dist.get_world_size() / 2 == wanted["loss"]


CASES = {
    2: list(itertools.product([(6, 6), (6, 3), (4, 1)], [2], range(4), [False, True])),
    3: list(itertools.product([(6, 3), (5, 5), (6, 1)], [3], range(4), [False, True])),
    4: list(itertools.product([(4, 2), (5, 5), (8, 1)], [4], range(4), [False, True]))
    + list(itertools.product([(6, 3)], [2], range(4), [False, True])),
}


@pytest.mark.ranks(2)
def test_two_ranks_at_stage_3_with_cut_sequences_and_at_stage_0_without() -> None:
    one(6, 3, True, 2, 3, True)
    one(4, 1, False, 2, 0, False)


class Twice(nn.Module):
    """A part of a block that has two sums over ranks, of which the first is read by what makes the second."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = MLP(4), MLP(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def twice() -> Integers:
    model = Integers()
    generator = torch.Generator().manual_seed(6)
    for block in model.blocks:
        block.mlp = Twice()
        with torch.no_grad():
            for param in block.mlp.parameters():
                param.copy_(torch.randint(-1, 2, param.shape, generator=generator))
    return model


@pytest.mark.ranks(2)
def test_two_sums_in_one_part_of_a_block_with_cut_sequences() -> None:
    """From the second step on one sum that a part gives is split at once: not so the first of two."""
    json = json_of(2, 0, tensor_parallel={"sequence_parallel": True})
    json["optimizer"]["params"]["lr"] = 2.0**-9
    found = trained(twice, json, integers, 0, steps=2)
    alone = trained(twice, json | {"tensor_parallel": {"autotp_size": 2}}, integers, 0, steps=2)
    assert found["losses"] == pytest.approx(alone["losses"], rel=1e-6)  # of the second step sums round
    assert found["losses"][0] == plain(twice, integers)["loss"]


@pytest.mark.long
@pytest.mark.parametrize("world", CASES)
def test_every_layer_at_every_size_and_stage(pool: Pool, world: int) -> None:
    pool.run(world, every, world)


def every(world: int) -> None:
    for number, ((heads, key_heads), tp, stage, sequences) in enumerate(CASES[world]):
        one(heads, key_heads, bool(number % 2), tp, stage, sequences)
