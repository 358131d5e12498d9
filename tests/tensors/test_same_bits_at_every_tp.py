"""The promise: with `"tensor_parallel": {"reduce": "tree"}` the bits do not depend on how many ranks cut the layers.

Nor, with `"zero": {"reduce": "tree"}`, on how many have samples of their own: losses, norms and all weights.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import said_by
from sharing import needs_transformers
from states import weights_of
from transformer_models import tiny

import zero
from zero.core.world import world_of_one
from zero.parallel.tensor.tree import _Blocks, _Product

PARTS, ROWS, LENGTH, VOCABULARY = 4, 2, 12, 96
GRIDS = ((1, 1), (2, 1), (4, 1), (2, 2), (1, 4))  # tp, dp
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 8, "vocab_size": VOCABULARY}
LLAMA = SIZES | {"num_hidden_layers": 2, "num_key_value_heads": 4, "max_position_embeddings": 64}


BERT = SIZES | {"num_hidden_layers": 2, "max_position_embeddings": 64, "attention_probs_dropout_prob": 0}
GPT2 = {"n_layer": 2, "n_embd": 64, "n_head": 8, "n_positions": 64, "vocab_size": VOCABULARY, "attn_pdrop": 0}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", GPT2),
    "bert": ("BertForMaskedLM", BERT),
    "tied": ("Qwen2ForCausalLM", {**LLAMA, "tie_word_embeddings": True}),
    "llama": ("LlamaForCausalLM", LLAMA),
    "qwen3": ("Qwen3ForCausalLM", LLAMA),
    "mixtral": ("MixtralForCausalLM", LLAMA),
}


def build(kind: str, **more: Any) -> Any:
    """Two layers, whose widths are multiples of a vector at every tp."""
    name, own = MODELS[kind]
    return tiny(name, 3, **own | more)


def settings(tp: int, dp: int, precision: str = "fp32", stage: int = 1, **section: Any) -> dict[str, Any]:
    found = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": PARTS // dp,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
        "zero_optimization": {"stage": stage},
        "zero": {"reduce": "tree"},
        "tensor_parallel": {"autotp_size": tp, "reduce": "tree", "blocks": 8} | section,
    }
    if precision == "autocast":
        return found | {"torch_autocast": {"enabled": True, "dtype": "bf16"}}
    return found | ({"bf16": {"enabled": True}} if precision == "bf16" else {})


def trained(kind: str, tp: int, dp: int, steps: int, how: dict[str, Any]) -> dict[str, Any]:
    """Losses of all micro-batches in their order, norms and whole weights, the same on all ranks."""
    more = how.get("model", {})
    engine = zero.initialize(model=build(kind, **more), config=settings(tp, dp, **how.get("json", {})))[0]
    place, losses, norms = dist.get_rank() // tp, [], []
    for _ in range(steps):
        for turn in range(PARTS // dp):
            generator = torch.Generator().manual_seed(turn * dp + place)
            tokens = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=generator)
            loss = engine(input_ids=tokens, labels=tokens).loss
            engine.backward(loss)
            engine.step()
            every: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(every, loss.item())
            assert all(len({*every[at * tp : (at + 1) * tp]}) == 1 for at in range(dp)), "ranks along tp differ"
            losses += every[::tp]
        norms.append(float(engine.get_global_grad_norm()))
    found = {"losses": losses, "norms": norms} | weights_of(engine)
    engine.destroy()
    return found


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """The names of what has not the same bits."""

    def bits(value: Any) -> torch.Tensor:
        found = value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=torch.float64)
        return found.contiguous().view(torch.int32)

    return [name for name in one if not torch.equal(bits(one[name]), bits(other[name]))]


def alike(pool: Any, kind: str, grids: Any, steps: int, **how: Any) -> None:
    """All grids end alike, having learnt something."""
    first: dict[str, Any] | None = None
    for tp, dp in grids:
        found = pool.run(tp * dp, trained, kind, tp, dp, steps, how)
        for each in found:
            first = first or each
            assert not differences(first, each), (tp, dp)
    assert first is not None
    assert sum(first["losses"][-PARTS:]) < sum(first["losses"][:PARTS])


@needs_transformers
def test_one_rank_and_two_end_alike_and_sums_of_their_own_order_do_not(pool):
    alike(pool, "llama", [(1, 1), (2, 1)], 2)
    alike(pool, "gpt2", [(1, 1), (2, 1)], 2)  # by names: its first forward is compared with that of whole features
    plain = [pool.run(tp, trained, "llama", tp, 1, 1, {"json": {"reduce": "sum"}})[0] for tp in (1, 2)]
    assert len(differences(*plain)) > 10


EVERY = [
    *((kind, {"precision": precision}, 20) for kind in ("llama", "gpt2") for precision in ("fp32", "bf16")),
    ("llama", {"stage": 3, "precision": "bf16"}, 5),
    ("llama", {"stage": 0, "precision": "autocast", "blocks": 4}, 5),
    ("tied", {"stage": 2}, 5),
    ("bert", {"precision": "bf16", "blocks": 16}, 5),
]


@needs_transformers
@pytest.mark.long
@pytest.mark.parametrize(("kind", "json", "steps"), EVERY, ids=str)
def test_every_grid_ends_alike(pool, kind, json, steps):
    alike(pool, kind, GRIDS, steps, json=json)


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize(("rows", "packs"), [(False, (8,)), (False, (8, 4, 4)), (True, (8,)), (True, (4, 8))])
def test_products_of_blocks_are_those_of_the_layer(rows, packs, swapped):
    spans = [[(sum(packs[:at]) + part * size // 4, size // 4) for part in range(4)] for at, size in enumerate(packs)]
    blocks = _Blocks(tuple(zip(*spans, strict=True)), rows, swapped, world_of_one().point())
    ins, outs = (sum(packs), 6) if rows else (6, sum(packs))
    shapes = (3, ins), (ins, outs) if swapped else (outs, ins), (outs,)
    x, weight, bias = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes)
    given = x, weight, None if rows else bias
    whole = x @ (weight if swapped else weight.t()) + (0 if rows else bias)
    assert torch.allclose(_Product.apply(*given, blocks), whole, rtol=1e-12)
    assert torch.autograd.gradcheck(lambda *tensors: _Product.apply(*tensors, blocks), given)


def refused(kind: str, section: dict[str, Any], tp: int = 1, **more: Any) -> str:
    model = build(kind, **more)
    before = {name: module.__dict__.get("forward") for name, module in model.named_modules()}
    said = said_by(lambda: zero.initialize(model=model, config=settings(tp, 1, **section)))
    assert before == {name: module.__dict__.get("forward") for name, module in model.named_modules()}
    return said


@needs_transformers
@pytest.mark.ranks(1)
def test_what_is_not_done_in_blocks_is_named() -> None:
    assert "tensor_parallel.blocks: got 6, wanted a power of two" in refused("llama", {"blocks": 6})
    assert "set sequence_parallel to false" in refused("llama", {"sequence_parallel": True})
    assert "attn_implementation='sdpa'" in refused("llama", {}, attn_implementation="eager")
    assert "'lm_head', and" not in (said := refused("llama", {}, vocab_size=97))
    assert "8 blocks do not divide the 97 features of 'lm_head'; they do 96 and 104" in said
    assert "q_norm' is 'replicated_with_grad_allreduce' in the plan" in refused("qwen3", {}, head_dim=8)
    assert "experts.gate_up_proj' is 'packed_colwise' in the plan" in refused("mixtral", {})


@needs_transformers
@pytest.mark.ranks(2)
def test_heads_that_ranks_would_repeat_are_refused() -> None:
    said = refused("llama", {}, 2, num_key_value_heads=1)
    assert "2 ranks do not divide the 1 heads or features of 'model.layers.0.self_attn.k_proj' that go together" in said
    assert "2 ranks do not divide tensor_parallel.blocks, which is 1" in refused("llama", {"blocks": 1}, 2)


@needs_transformers
@pytest.mark.ranks(1)
def test_dropout_where_ranks_have_parts_is_refused_when_it_draws() -> None:
    engine = zero.initialize(model=build("gpt2", attn_pdrop=0.1), config=settings(1, 1))[0]
    tokens = torch.randint(VOCABULARY, (ROWS, LENGTH))
    assert "set the dropout there, of attention say, to 0" in said_by(lambda: engine(tokens))
    engine.eval()
    engine(tokens)
    engine.destroy()
