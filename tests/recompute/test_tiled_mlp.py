"""The promise: an MLP in slices of the sequence trains as the plain loop over slices does, to the bit, on every stage
and in every precision, with dropout and inside other recomputation; and one slice of its activations is alive at once.
"""

from __future__ import annotations

import copy
import pickle
import sys
import weakref
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from marks import each_once
from models import WIDTH, share
from oracle import Training, near
from scenario import Json, Model, Record, differences, run
from torch import Tensor, nn

import zero
from zero.core import comm
from zero.recompute.call import recomputed
from zero.recompute.selective import Selective

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from live import LiveBytes

POSITIONS = 2  # of five: slices of 2 and 3, because the last would be shorter
LONG, SLICE, WIDE = 1024, 64, 128


class MLP(nn.Module):
    """With dropout between its matrices, and the plain loop over slices where `loop` is set."""

    def __init__(self, dropout: float = 0.0, width: int = WIDTH) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)
        self.loop: list[int] = []

    def forward(self, x: Tensor, scale: Tensor | float = 1.0) -> Tensor:
        if self.loop:
            return torch.cat([self.one(part.contiguous(), scale) for part in x.split(self.loop, dim=1)], dim=1)
        return self.one(x, scale)

    def one(self, x: Tensor, scale: Tensor | float) -> Tensor:
        return self.down(self.dropout(self.act(self.up(x)))) * scale


class Block(nn.Module):
    """Positions meet, then each is on its own."""

    def __init__(self, dropout: float, width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.mix, self.mlp = nn.LayerNorm(width), nn.Linear(width, width), MLP(dropout, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x + self.mix(x).cumsum(1)))


class Net(nn.Module):
    """Blocks, of which one is frozen, between embedding and loss."""

    def __init__(self, dropout: float, frozen: bool = True) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(17, WIDTH), nn.Linear(WIDTH, 17)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(3))
        self.blocks[1].requires_grad_(not frozen)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1).float(), targets.flatten())


def tiled(model: nn.Module) -> nn.Module:
    return zero.tile_mlp(model, "MLP", positions=POSITIONS)


def looped(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, MLP):
            module.loop = [2, 3]
    return model


def trained(change: Callable[[nn.Module], nn.Module], json: Json, dropout: float = 0.3, **more: Any) -> Record:
    def make() -> nn.Module:
        torch.manual_seed(3)
        return change(Net(dropout, **more))

    return run(Model(make, lambda number, part: share(number)), json)


# Exactness.


def results(module: nn.Module, x: Tensor) -> list[Tensor]:
    leaf = x.clone().requires_grad_()
    out = module(leaf)
    out.square().sum().backward()
    return [out.detach(), leaf.grad, *(param.grad for param in module.parameters())]


def every_mlp() -> list[nn.Module]:
    """That of this file, and those of models that others use."""
    found: list[nn.Module] = [MLP(width=24)]
    if find_spec("transformers"):
        from transformers import BertConfig, GPT2Config, LlamaConfig
        from transformers.models.bert.modeling_bert import BertIntermediate
        from transformers.models.gpt2.modeling_gpt2 import GPT2MLP
        from transformers.models.llama.modeling_llama import LlamaMLP

        found += [
            LlamaMLP(LlamaConfig(hidden_size=24, intermediate_size=64, num_attention_heads=2)),
            GPT2MLP(96, GPT2Config(n_embd=24)).eval(),
            BertIntermediate(BertConfig(hidden_size=24, intermediate_size=96)),
        ]
    return found


def test_slices_are_the_whole_in_double_precision() -> None:
    torch.manual_seed(1)
    for mlp in every_mlp():
        mlp.double()
        for shape in ((2, 100, 24), (100, 24)):
            x = torch.randn(shape, dtype=torch.float64)
            plain = results(mlp, x)
            mlp.zero_grad()
            sliced = copy.deepcopy(mlp)
            for positions in (7, 33, 100, 1000):
                for ours, theirs in zip(results(zero.tile_mlp(sliced, positions=positions), x), plain, strict=True):
                    limit = 1e-14 * theirs.abs().max().item()
                    torch.testing.assert_close(ours, theirs, rtol=0, atol=limit)
                sliced.zero_grad()


OUTER = [{}, *({"modules": ["Block"], "policy": policy} for policy in ("full", "selective"))]
OUTER += [{"modules": ["Block"], "policy": "auto", "budget": "4 KB"}]


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("stage", "precision", "outer"),
    each_once([0, 1, 2, 3], [{}, {"bf16": {"enabled": True}}, {"torch_autocast": {"enabled": True}}], OUTER),
)
def test_training_has_the_bits_of_a_loop_over_slices(stage: int, precision: dict[str, Any], outer: Any) -> None:
    json = {"stage": stage, "cut": True, **precision}
    recompute = {"zero": {"recompute": outer}} if outer else {}
    assert differences(trained(tiled, {**json, **recompute}), trained(looped, json)) == []


@pytest.mark.ranks(2)
def test_training_is_as_exact_as_that_of_the_whole() -> None:
    def build() -> nn.Module:
        torch.manual_seed(3)
        return Net(0.0, frozen=False)

    training = Training(2, 3, build=build)
    stages = [trained(tiled, {"stage": stage, "cut": True}, 0.0, frozen=False) for stage in range(4)]
    assert all(near(found.weights, training) for found in stages)


def gathers(change: Callable[[nn.Module], nn.Module]) -> list[int]:
    """Tags of the gathers of a training, which tell units."""
    tags, plain = [], comm.gather
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comm, "gather", lambda full, axis, tag: (tags.append(tag), plain(full, axis, tag))[1])
        trained(change, {"stage": 3, "cut": True, "zero": {"units": ["MLP"]}})
    return sorted(tags)


@pytest.mark.ranks(2)
def test_a_unit_is_gathered_once_for_all_slices() -> None:
    whole = gathers(lambda model: model)
    assert whole
    assert gathers(tiled) == whole


# Memory.


class Watched(nn.Module):
    """An activation that remembers how much of what it has returned is alive each time that it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, int] = {}
        self.most = 0

    def forward(self, x: Tensor) -> Tensor:
        out = nn.functional.gelu(x)
        self.alive[key := len(self.alive)] = out.nbytes
        weakref.finalize(out.untyped_storage(), self.alive.__setitem__, key, 0).atexit = False
        self.most = max(self.most, sum(self.alive.values()))
        return out


def long_net() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(1)
    return nn.Sequential(*(Block(0.0, WIDE) for _ in range(3))), torch.randn(1, LONG, WIDE, requires_grad=True)


def watched(change: Callable[[nn.Module], nn.Module]) -> int:
    """The most bytes between matrices of MLPs that were alive at once, forward and backward."""
    (net, x), act = long_net(), Watched()
    for block in net:
        block.mlp.act = act
    change(net)(x).sum().backward()
    return act.most


def test_one_slice_is_alive_at_a_time() -> None:
    whole = 4 * LONG * 4 * WIDE
    assert watched(lambda net: net) >= 3 * whole, "the count of the plain one misses something"
    assert watched(lambda net: zero.tile_mlp(net, "MLP", positions=SLICE)) <= 2 * whole * SLICE // LONG


def live(policy: str, change: Callable[[nn.Module], nn.Module]) -> tuple[int, int]:
    """Bytes after a forward, and the most in forward and backward, of blocks that are recomputed so."""
    net, x = long_net()
    change(net)
    rules = [Selective().contexts if policy == "selective" else None for _ in net]
    with LiveBytes([x, *net.parameters()]) as seen:
        y = x
        for block, rule in zip(net, rules, strict=True):
            y = block(y) if policy == "none" else recomputed(block, (y,), {}, contexts=rule, module=block)
        kept = seen.now
        y.sum().backward()
    return kept, seen.peak


@pytest.mark.parametrize("policy", ["none", "full", "selective"])
def test_memory_is_that_of_the_rest(policy: str) -> None:
    """Under "selective", too, which keeps products, nothing of the slices is kept."""
    position = 4 * LONG * WIDE  # bytes of one tensor as wide as the stream
    (kept, peak), (whole, highest) = (
        live(policy, lambda net: zero.tile_mlp(net, "MLP", positions=SLICE)),
        live(policy, lambda net: net),
    )
    assert peak < highest - 6 * position
    assert kept == whole if policy == "full" else kept <= whole - 3 * 4 * position


# What it takes.


def test_copies_pickles_signatures_and_a_second_call(tmp_path: Path) -> None:
    mlp, x = zero.tile_mlp(MLP(), positions=16), torch.randn(2, 40, WIDTH)
    for other in (copy.deepcopy(mlp), pickle.loads(pickle.dumps(mlp))):
        assert other.forward.args[0] is other
        assert torch.equal(other(x), mlp(x))
    inner = mlp.forward.args[1]
    assert zero.tile_mlp(mlp, positions=8).forward.args[1] == inner
    assert list(mlp.state_dict()) == list(MLP().state_dict())


def test_other_arguments_are_cut_where_they_have_positions() -> None:
    mlp, x = MLP().double(), torch.randn(2, 50, WIDTH, dtype=torch.float64)
    for scale in (2.0, torch.tensor(2.0), torch.rand(2, 50, 1).double(), torch.rand(WIDTH).double()):
        whole = mlp(x, scale=scale)
        sliced = zero.tile_mlp(copy.deepcopy(mlp), positions=16)
        torch.testing.assert_close(sliced(x, scale=scale), whole, rtol=1e-14, atol=1e-14)
    with torch.no_grad():
        assert torch.equal(sliced(x[:, :0], 1.0), mlp(x[:, :0], 1.0))


class Sums(nn.Module):
    """Does not treat each position by itself."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sum(1)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: zero.tile_mlp(Net(0.0), "MPL"), r"tile_mlp.*\['MPL'\] match no module.*did you mean 'MLP'"),
        (lambda: zero.tile_mlp(Net(0.0), "blocks"), "'blocks' is a ModuleList, which has no forward"),
        (lambda: zero.tile_mlp(MLP(), positions=0), "positions=.*got 0; wanted a whole number from 1 on"),
        (lambda: zero.tile_mlp(MLP(), positions=True), "positions=.*got True"),
        (lambda: zero.tile_mlp(Sums())(torch.ones(2, 50, 4)), r"a Sums returned \(2, 4\); wanted \(2, 50\)"),
        (lambda: zero.tile_mlp(nn.LSTM(4, 4))(torch.ones(2, 50, 4)), "a LSTM returned tuple"),
    ],
)
def test_what_cannot_be_cut_is_named(call: Callable[[], Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        call()
