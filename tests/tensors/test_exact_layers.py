"""The promise: layers that are cut give the bits of one process, at any number of ranks, stage, and with cut sequences.

The numbers are integers and powers of two, so that no sum rounds in any order: each missing or double factor shows.
"""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from cut_models import MLP, WIDTH, Integers, family, integers, json_of, place_of, plain, trained
from marks import longer
from ranks import Pool
from sharing import needs_transformers
from torch import nn

from zero.config.tensor_parallel import TensorParallel
from zero.parallel.tensor.plan import tensor_plan


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


class Turned(nn.Module):
    """Gives each position what stands before it: wrong, if it sees a part of a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x.roll(1, 1))


def turned(direct: bool = False) -> Integers:
    model = Integers()
    generator = torch.Generator().manual_seed(7)
    for block in model.blocks:
        block.attn = Turned().inner if direct else Turned()
        with torch.no_grad():
            for param in block.attn.parameters():
                param.copy_(torch.randint(-1, 2, param.shape, generator=generator))
    return model


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [0, *longer(1, 2, 3)])
def test_what_is_not_cut_sees_whole_sequences(stage: int) -> None:
    """As attention that no plan names: it is between parts of sequences, and mixes tokens."""
    found = trained(turned, json_of(2, stage, tensor_parallel={"sequence_parallel": True}), integers, 0)
    wanted = plain(turned, integers)
    assert found["losses"][0] == wanted["loss"]
    for name, grad in wanted["grads"].items():
        assert torch.equal(found["grads"][name], grad), name


@pytest.mark.long
@pytest.mark.ranks(2)
@pytest.mark.parametrize(("stage", "sequences"), [(3, True), (0, False)])
def test_compiled_blocks(stage: int, sequences: bool) -> None:
    json = json_of(2, stage, tensor_parallel={"sequence_parallel": sequences})
    found, wanted = trained(Integers, json, integers, 0, compiler="eager"), plain(Integers, integers)
    assert found["losses"][0] == wanted["loss"]
    for name, grad in wanted["grads"].items():
        assert torch.equal(found["grads"][name], grad), name


def test_blocks_of_which_nobody_knows_what_sees_which_tokens() -> None:
    """A block that calls a layer itself may mix tokens itself; one that drops itself would drop the same of all."""
    section = TensorParallel(autotp_size=2, sequence_parallel=True)
    with pytest.raises(ValueError, match=r"'blocks\.0' calls its layer 'attn' itself, and may mix tokens"):
        tensor_plan(turned(direct=True), section, 0, 2)
    model = Integers()
    model.blocks[1].hidden_dropout = 0.1
    with pytest.raises(ValueError, match=r"'blocks\.1' drops in its own forward"):
        tensor_plan(model, section, 0, 2)


@needs_transformers
def test_layers_of_one_block_in_several_modules() -> None:
    with pytest.raises(ValueError, match=r"layer\.0\.intermediate\.dense, \S+ are cut together, and no module"):
        tensor_plan(family("bert"), TensorParallel(autotp_size=2, sequence_parallel=True), 0, 2)


@pytest.mark.long
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("world", CASES)
def test_every_layer_at_every_size_and_stage(pool: Pool, world: int, stage: int) -> None:
    pool.run(world, every, world, stage)


def every(world: int, stage: int) -> None:
    for number, ((heads, key_heads), tp, at, sequences) in enumerate(CASES[world]):
        if at == stage:
            one(heads, key_heads, bool(number % 2), tp, stage, sequences)
