"""The promise: for each layer it is said how it can be cut over tensor-parallel ranks, or why not."""

from __future__ import annotations

import torch
from torch import nn

from zero.tools.plan.shardable import largest, shardable


class Attention(nn.Module):
    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.num_heads, self.num_key_value_heads = 8, 4
        if fused:
            self.qkv = nn.Linear(64, 128)
        else:
            self.q_proj, self.k_proj, self.v_proj = nn.Linear(64, 64), nn.Linear(64, 32), nn.Linear(64, 32)
        self.o_proj = nn.Linear(64, 64)


class Block(nn.Module):
    def __init__(self, fused: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.attention = Attention(fused)
        self.gate, self.up, self.down = nn.Linear(64, 96), nn.Linear(64, 96), nn.Linear(96, 64)


class Net(nn.Module):
    def __init__(self, tied: bool, fused: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, 64)
        self.blocks = nn.ModuleList(Block(fused) for _ in range(3))
        self.mix, self.scan = nn.Linear(64, 64), nn.Conv1d(64, 64, 3)
        self.head = nn.Linear(64, 1000, bias=False)
        if tied:
            self.head.weight = self.embed.weight


def found(tied: bool = False, fused: bool = False) -> dict[str, tuple[str, int, int]]:
    with torch.device("meta"):
        layers = shardable(Net(tied, fused))
    return {layer.name: (layer.how, layer.divides, layer.count) for layer in layers}


def reasons(model: nn.Module) -> dict[str, str]:
    return {layer.name: layer.why for layer in shardable(model)}


def test_each_layer_is_cut_by_its_place_in_the_block():
    assert found() == {
        "embed": ("vocabulary", 1000, 1),
        "blocks.*.norm": ("", 1, 3),
        "blocks.*.attention.q_proj": ("column", 8, 3),
        "blocks.*.attention.k_proj": ("column", 4, 3),
        "blocks.*.attention.v_proj": ("column", 4, 3),
        "blocks.*.attention.o_proj": ("row", 8, 3),
        "blocks.*.gate": ("column", 96, 3),
        "blocks.*.up": ("column", 96, 3),
        "blocks.*.down": ("row", 96, 3),
        "mix": ("", 1, 1),
        "scan": ("", 1, 1),
        "head": ("vocabulary", 1000, 1),
    }
    assert largest(shardable(Net(False))) == 4


def test_what_stays_whole_says_why():
    model = Net(tied=True, fused=True)
    model.more = nn.Linear(64, 64)
    model.more.weight = model.mix.weight
    why = reasons(model)
    assert "which of its rows belong to which head" in why["blocks.*.attention.qkv"]
    assert "behind 'qkv'" in why["blocks.*.attention.o_proj"]
    assert "shares a weight with more" in why["mix"] and "convolution" in why["scan"]
    assert "in the same slices as head" in why["embed"] and "in the same slices as embed" in why["head"]
    for block in model.blocks:
        del block.attention.num_heads, block.attention.num_key_value_heads
        block.attention.q_proj = nn.Linear(64, 64)
    assert "number of heads is not known" in reasons(model)["blocks.*.attention.q_proj"]
