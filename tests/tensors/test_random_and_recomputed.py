"""The promise: dropout is one mask where ranks see the same, their own where each has a part; so it is recomputed."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cut_models import family, json_of, words
from marks import longer
from sharing import needs_transformers
from states import weights_of
from torch import nn

import zero

pytestmark = pytest.mark.ranks(2)
ROWS, WIDTH = 64, 32


class Dropped(nn.Module):
    """Keeps what its two dropouts gave: one of all features, one of those of this rank."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Inner()
        self.outside = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = self.outside(torch.ones_like(x))
        return (x + self.mlp(x) * self.seen).square().mean()


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.inside, self.behind = nn.Dropout(0.5), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.up_proj(x)
        self.parts = self.inside(torch.ones_like(x))
        x = self.down_proj(x * self.parts)
        self.wholes = self.behind(torch.ones_like(x))
        return x * self.wholes


def everyone(values: torch.Tensor) -> list[torch.Tensor]:
    found = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(found, values.detach().contiguous())
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("world", [2, 4])
def test_tt_metal_55947_masks_of_ranks_that_share_layers(world: int) -> None:
    """One mask for the ranks that share layers, another one for each data rank."""
    torch.manual_seed(dist.get_rank())  # a script may seed its ranks as it likes
    model = Dropped()
    engine, *_ = zero.initialize(model=model, config=json_of(2, 1))
    before = None
    for _ in range(2):
        engine.backward(engine(torch.ones(ROWS, WIDTH)))
        engine.step()
        outside, parts, wholes = map(everyone, (model.seen, model.mlp.parts, model.mlp.wholes))
        for rank in range(dist.get_world_size()):
            first = rank // 2 * 2
            assert torch.equal(outside[rank], outside[first]) and torch.equal(wholes[rank], wholes[first])
            assert rank == first or not torch.equal(parts[rank], parts[first])
            assert first == 0 or not torch.equal(outside[first], outside[0])  # other samples, other places
        assert before is None or not torch.equal(before, outside[0])
        before = outside[0]
    engine.destroy()


class Between(nn.Module):
    """A block with a dropout of its own, of which it keeps what that gave."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp, self.outside = Inner(), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = self.outside(torch.ones_like(x))
        return x + self.mlp(x) * self.seen


def test_masks_between_layers_where_each_rank_has_a_part_of_the_sequence() -> None:
    """Each rank has other tokens, and drops in other places; inside of the parts that are cut they drop alike."""
    torch.manual_seed(0)
    model = nn.Sequential(Between(), Between())
    engine, *_ = zero.initialize(model=model, config=json_of(2, 1, tensor_parallel={"sequence_parallel": True}))
    engine.backward(engine(torch.ones(1, 2 * ROWS, WIDTH)).square().mean())
    for block in model:
        seen, parts, wholes = map(everyone, (block.seen, block.mlp.parts, block.mlp.wholes))
        assert seen[0].shape == (1, ROWS, WIDTH) and not torch.equal(*seen) and not torch.equal(*parts)
        assert torch.equal(*wholes)
    engine.destroy()


def losses(recomputed: bool, sequences: bool, name: str, drops: dict[str, float]) -> tuple[list[float], Any]:
    torch.manual_seed(5)
    more = {"zero": {"recompute": {"modules": ["*.layers.*" if name != "gpt2" else "*.h.*"]}}} if recomputed else {}
    json = json_of(2, 1, tensor_parallel={"sequence_parallel": sequences}, **more)
    engine, *_ = zero.initialize(model=family(name, **drops), config=json)
    engine.train()
    found = []
    for step in range(3):
        loss = engine(**words(step, 0)).loss
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    weights = weights_of(engine)
    engine.destroy()
    return found, weights


DROPS = {"gpt2": {"resid_pdrop": 0.2, "attn_pdrop": 0.2}}


@needs_transformers
@pytest.mark.parametrize(
    ("name", "sequences"), [("gpt2", False), *longer(*itertools.product(("llama", "qwen3"), (False, True)))]
)
def test_recomputed_blocks_drop_the_same_places(name: str, sequences: bool) -> None:
    drops = DROPS.get(name, {"attention_dropout": 0.3})
    make = functools.partial(losses, sequences=sequences, name=name, drops=drops)
    (plain, weights), (again, others) = make(False), make(True)
    assert plain == pytest.approx(again, rel=1e-6)
    # Torch's own attention with dropout rounds otherwise when it is recomputed; other masks would be apart by far more.
    assert max(float((weights[key] - others[key]).abs().max()) for key in weights) <= 1e-6
