"""The promise: what a layer says of itself counts where the plan of its model does not say it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from zero.parallel.tensor.layers import Layer, set_shares
from zero.parallel.tensor.plan import _blocks


class Experts(nn.Module):
    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.is_concatenated = fused
        self.gate_up_proj = nn.Parameter(torch.empty(4, 12, 8))


@pytest.mark.parametrize(
    ("style", "fused", "packs"), [("colwise", True, 2), ("colwise", False, 1), ("packed_colwise", True, 2)]
)
def test_experts_say_themselves_that_gates_are_fused(style: str, fused: bool, packs: int) -> None:
    layer = Layer("experts.gate_up_proj", Experts(fused), style, "gate_up_proj")
    assert layer.packs == (12 // packs,) * packs


class Normed(nn.Embedding):
    def __init__(self) -> None:
        super().__init__(10, 4)
        self.norm = nn.LayerNorm(4)


def test_a_norm_in_an_embedding_cut_by_rows_sees_the_tokens_of_each_rank() -> None:
    layer = Layer("embed", Normed(), "embedding_rowwise")
    assert [(slot.name, slot.dim, slot.sums) for slot in layer.slots] == [
        ("weight", 0, False),
        ("weight", None, True),
        ("bias", None, True),
    ]


def linear(name: str, style: str) -> Layer:
    return Layer(name, nn.Linear(8, 8), style)


def test_a_block_around_a_block_is_one() -> None:
    inner = [linear("attn.out.gate", "colwise"), linear("attn.out.o", "rowwise")]
    (block,) = _blocks([linear("attn.q", "colwise"), *inner])
    assert (block.scope, len(block.layers)) == ("attn", 3)


def test_columns_beside_several_blocks_belong_to_none() -> None:
    pairs = [linear(f"mlp.{name}.{kind}", f"{kind}wise") for name in "ab" for kind in ("col", "row")]
    with pytest.raises(ValueError, match=r"'mlp\.q' is cut along its outputs, and no layer behind it"):
        _blocks([linear("mlp.q", "colwise"), *pairs])


class Mixed:
    """A configuration that differs by layer."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"'{name}' may vary across layers")


class Attention(nn.Module):
    head_dim = 4


def test_heads_are_counted_by_their_width_where_the_configuration_differs_by_layer() -> None:
    block = [linear("attn.q_proj", "colwise"), linear("attn.o_proj", "rowwise")]
    set_shares(block, [Attention()], Mixed(), 1, 2)
    assert [(layer.share.start, layer.share.count, layer.share.groups) for layer in block] == [(1, 1, 2)] * 2
