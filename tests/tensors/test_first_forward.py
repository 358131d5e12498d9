"""The promise: a plan that does not fit the code of a model is an error at the first forward, never another loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cut_models import json_of
from marks import longer
from ranks import said_by
from torch import nn

import zero

pytestmark = pytest.mark.ranks(2)
WIDTH, HEADS = 16, 4


class Attention(nn.Module):
    """Counts its heads by an attribute, whatever that is called."""

    counted = "n_heads"

    def __init__(self) -> None:
        super().__init__()
        setattr(self, self.counted, HEADS)
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layers, heads = (self.q_proj, self.k_proj, self.v_proj), getattr(self, self.counted)
        query, key, value = (layer(x).unflatten(-1, (heads, -1)).transpose(1, 2) for layer in layers)
        return self.out_proj(F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))


class Otherwise(Attention):
    counted = "h"


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.between(self.fc1(x)))

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x.unflatten(-1, (self.fc2.in_features, 1))).flatten(-2)  # of this rank, or of all


class Chosen(Gated):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x, -1)


class Normed(Gated):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return F.normalize(x, dim=-1)


class Mixed(Gated):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x.flip(-1)


class Reading(Gated):
    """Reads the weight of a layer itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(torch.relu(F.linear(x, self.fc1.weight, self.fc1.bias)))


class Block(nn.Module):
    def __init__(self, part: type[nn.Module]) -> None:
        super().__init__()
        self.part = part()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.part(x)


class Model(nn.Module):
    def __init__(self, part: type[nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.blocks = nn.Linear(WIDTH, WIDTH), nn.ModuleList(Block(part) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def first_loss(part: type[nn.Module], stage: int, **section: Any) -> float:
    engine, *_ = zero.initialize(model=Model(part), config=json_of(2, stage, tensor_parallel=section))
    try:
        return engine(batch()).item()
    finally:
        engine.destroy()


def batch() -> torch.Tensor:
    return torch.randn(2, 6, WIDTH, generator=torch.Generator().manual_seed(1))


WAYS = [(0, False), *longer((3, False), (1, True), (3, True))]


@pytest.mark.parametrize(("stage", "sequences"), WAYS)
@pytest.mark.parametrize("part", [Attention, Gated])
def test_heads_and_widths_are_those_of_a_rank_where_modules_say_them(part: Any, stage: int, sequences: bool) -> None:
    wanted = Model(part)(batch()).item()
    assert first_loss(part, stage, sequence_parallel=sequences) == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize(("stage", "sequences"), WAYS)
@pytest.mark.parametrize("part", [Otherwise, Chosen, Normed, Mixed])
def test_what_needs_all_features_between_two_layers(part: Any, stage: int, sequences: bool) -> None:
    error = said_by(lambda: first_loss(part, stage, sequence_parallel=sequences))
    start = f"RuntimeError: tensor_parallel: 'blocks.0.part' ({part.__name__}), whose layers blocks.0.part."
    assert error.startswith(start), error
    assert "gives something else on 2 ranks than whole" in error and "Say 'skip' of them" in error
    skipped = {"layer_specs": [{"patterns": [".*weight$"], "partition_type": "skip"}], "use_default_specs": False}
    assert first_loss(part, stage, partition_config=skipped) == pytest.approx(Model(part)(batch()).item(), rel=1e-6)


def test_a_loss_of_what_each_rank_has_a_part_of() -> None:
    """With cut sequences that is what a block inside gives, as `output_hidden_states` of Transformers."""
    model = Model(Gated)
    engine, *_ = zero.initialize(model=model, config=json_of(2, 1, tensor_parallel={"sequence_parallel": True}))
    inside: list[torch.Tensor] = []
    model.blocks[0].register_forward_hook(lambda module, args, output: inside.append(output))
    engine(batch())
    engine.backward(inside[0].square().mean())
    assert "the first loss is not the same on the 2 ranks" in said_by(engine.step)
    engine.destroy()


@pytest.mark.parametrize("stage", [0, *longer(3)])
def test_what_reads_a_weight_itself(stage: int) -> None:
    error = said_by(lambda: first_loss(Reading, stage))
    assert "'blocks.0.part.fc2' was given 16 features in place of 32" in error
