"""The promise: what says how a model is cut is obeyed, or refused by name; the first step finds what is wrong in it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from cut_models import HEAD, WIDTH, Integers, family, json_of, place_of, plain, trained, words
from ranks import said_by
from sharing import needs_transformers
from torch import nn

import zero

pytestmark = pytest.mark.ranks(2)
HEADS = 4


class Fused(nn.Module):
    """Queries, keys and values in one weight, gates and their inputs in another; of integers."""

    def __init__(self, keys: int = HEADS) -> None:
        super().__init__()
        self.head_dim, self.keys = HEAD, keys
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * keys) * HEAD)
        self.out = nn.Linear(HEADS * HEAD, WIDTH)
        self.gated = nn.Linear(WIDTH, 12)
        self.back = nn.Linear(6, WIDTH, bias=False)
        self.last = nn.Linear(WIDTH, 5)
        generator = torch.Generator().manual_seed(4)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randint(-1, 2, param.shape, generator=generator))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(x).unflatten(-1, (-1, HEAD))
        q, k, v = heads.split([len(part) for part in self._parts(heads.shape[-2])], -2)
        k, v = (each.repeat_interleave(q.shape[-2] // k.shape[-2], -2) for each in (k, v))
        x = x + self.out((torch.relu(q) + k - v).flatten(-2))
        gate, up = self.gated(x).chunk(2, -1)
        x = x + self.back(torch.relu(gate) - up)
        return self.last(x).sum() / 256

    def _parts(self, heads: int) -> list[range]:
        ours = heads * HEADS // (HEADS + 2 * self.keys)
        return [range(ours), *[range((heads - ours) // 2)] * 2]


def rows(number: int, place: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(10 * number + place)
    return {"x": torch.randint(-1, 2, (2, 6, WIDTH), generator=generator).float()}


def specs(keys: int) -> dict[str, Any]:
    sizes = [HEADS * HEAD, keys * HEAD, keys * HEAD]
    return {
        "use_default_specs": False,
        "layer_specs": [
            {"patterns": ["qkv.weight$"], "partition_type": "column", "shape": [3 if keys == HEADS else sizes, -1]},
            {"patterns": ["out.weight"], "partition_type": "row"},
            {"patterns": ["gated.weight"], "shape": [2, -1]},
            {"patterns": ["back.weight"], "partition_type": "row"},
            {"patterns": ["last.weight"], "partition_type": "column", "gather_output": True},
        ],
    }


@pytest.mark.parametrize("keys", [HEADS, 2])
def test_fused_weights_by_the_words_of_deepspeed(keys: int) -> None:
    json = json_of(2, 2, tensor_parallel={"partition_config": specs(keys)})
    found, wanted = trained(lambda: Fused(keys), json, rows, place_of(2)), plain(lambda: Fused(keys), rows)
    assert found["losses"] == [wanted["loss"]]
    for name, grad in wanted["grads"].items():
        assert torch.equal(found["grads"][name], grad), name
    assert found["shapes"]["last.weight"] == (3 - dist.get_rank(), WIDTH)


def test_what_nothing_tells_how_to_cut_is_listed() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 4)
            self.mixing = nn.MultiheadAttention(4, 2)

    said = said_by(lambda: zero.initialize(model=Own(), config=json_of(2)))
    assert "nothing tells how Own is cut; its layers are first 6x4, second 4x6" in said
    assert "mixing, whose forward reads its weights itself and which stay whole" in said
    strict = json_of(2, tensor_parallel={"partition_config": {"strict_mode": True}})
    assert "no pattern matches 'first', 'second'" in said_by(lambda: zero.initialize(model=Own(), config=strict))


def test_ranks_that_do_not_divide_what_belongs_together_are_refused_with_those_that_do() -> None:
    said = said_by(lambda: zero.initialize(model=Integers(3, 3, inner=1), config=json_of(2)))
    assert "2 ranks do not divide the features that belong together: 'blocks.0.mlp" in said and "do: 1" in said
    own = {"layer_specs": [{"patterns": ["0.weight"]}, {"patterns": ["1.weight"], "partition_type": "row"}]}
    model = nn.Sequential(nn.Linear(4, 12), nn.Linear(6, 4))  # gates and their inputs, perhaps, or pairs of both
    said = said_by(lambda: zero.initialize(model=model, config=json_of(2, tensor_parallel={"partition_config": own})))
    assert "layers that are cut alike have other numbers of features: '0' 12, '1' 6" in said


class Scaled(nn.Module):
    """A scale of the features that a rank has, or of all of them."""

    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.inside = inside
        self.up_proj, self.down_proj = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)
        self.scale = nn.Linear(1, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.scale.weight[0, 0]
        middle = torch.relu(self.up_proj(x if self.inside else scale * x))
        return self.down_proj(scale * middle if self.inside else middle).square().mean()


def scaled(sums: bool, inside: bool) -> str:
    rule = {"patterns": ["scale"], "partition_type": "skip", "grad_allreduce": sums}
    torch.manual_seed(0)
    json = json_of(2, tensor_parallel={"partition_config": {"layer_specs": [rule]}})
    engine, *_ = zero.initialize(model=Scaled(inside), config=json)
    engine.backward(engine(**rows(0, 0)))
    said = said_by(engine.step)
    engine.destroy()
    return said


def test_megatron_7452_11_and_torchtitan_1373_gradients_of_what_is_whole_are_compared() -> None:
    """Of a weight that is repeated but fed a part they are a part of a sum."""
    assert scaled(True, True) == scaled(False, False) == "nothing"
    assert "parameter 'scale.weight' is whole on 2 ranks, and its gradient is not the same" in scaled(False, True)
    assert "ranks see different parts of what parameter 'scale.weight'" in scaled(True, False)


@needs_transformers
def test_batches_of_ranks_that_share_layers_are_the_same_or_are_sent() -> None:
    engine, *_ = zero.initialize(model=family("llama"), config=json_of(2))
    said = said_by(lambda: engine(**words(0, dist.get_rank())))
    assert "tensor_parallel: ranks 0 and 1 were given different batches; give all 2 the same one" in said
    engine.destroy()
    sent = json_of(2, tensor_parallel={"broadcast_batch": True})
    engine, *_ = zero.initialize(model=family("llama"), config=sent)
    losses = [engine(**words(step, dist.get_rank())).loss.item() for step in range(2)]
    model = family("llama")
    assert losses == pytest.approx([model(**words(step, 0)).loss.item() for step in range(2)], rel=1e-6)
    engine.destroy()


@needs_transformers
def test_models_that_others_have_cut_and_graphs_that_are_kept_are_refused() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    model = family("llama")
    head = model.lm_head
    head.weight = nn.Parameter(distribute_tensor(head.weight.detach(), init_device_mesh("cpu", (2,))))
    assert "the model has DTensors, cut by another library" in said_by(
        lambda: zero.initialize(model=model, config=json_of(2))
    )
    model = family("llama")
    loss = model(**words(0, 0)).loss
    assert "a graph of an earlier forward knows parameter" in said_by(
        lambda: zero.initialize(model=model, config=json_of(2))
    )
    loss.detach_()
    del loss
    zero.initialize(model=model, config=json_of(2))[0].destroy()


@needs_transformers
def test_a_style_that_divides_experts_is_refused_by_name() -> None:
    model = family("mixtral")
    model.tp_plan = {"model.layers.*.mlp.experts.down_proj": "grouped_gemm"}
    said = said_by(lambda: zero.initialize(model=model, config=json_of(2)))
    assert "says 'grouped_gemm', which divides experts among ranks; that is expert_parallel" in said
