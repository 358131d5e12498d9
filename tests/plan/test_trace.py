"""The promise: what a trace says that a model keeps and computes is what a real run keeps and computes."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from alive import only_new
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode
from transformer_models import tiny

import zero
from zero.config import load
from zero.sizes.cost import POLICIES, ModelCost, shape_cost
from zero.sizes.model_trace import trace
from zero.sizes.recorder import FORMULAS
from zero.sizes.shape import Shape as Shapes

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
sys.path.append(str(Path(__file__).parents[2] / "examples" / "gpt"))
from live import LiveBytes
from model import GPT, Shape

BATCH, TOKENS, VOCABULARY = 2, 60, 256
SECTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"zero": {"recompute": {"modules": ["Block"], "policy": "selective"}}},
    "full": {"zero": {"recompute": {"modules": ["Block"]}}},
    "host": {
        "zero": {"recompute": {"modules": ["Block"]}},
        "activation_checkpointing": {"cpu_checkpointing": True},
    },
}


def gpt() -> nn.Module:
    return GPT(Shape(width=48, layers=3, heads=2, context=TOKENS))


def tied() -> nn.Module:
    model = gpt()
    model.head.weight = model.embed.weight
    return model


class Block(nn.Module):
    """What it gives is kept by it, and by the next one, which is given it: one storage."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.down(torch.tanh(self.up(x))))


class Relu(nn.Module):
    """A perceptron between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 32)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def llama() -> nn.Module:
    sizes = {"hidden_size": 48, "intermediate_size": 128, "num_hidden_layers": 3, "vocab_size": VOCABULARY}
    return tiny("LlamaForCausalLM", **sizes, num_attention_heads=4, num_key_value_heads=2, use_cache=False)


def gpt2() -> nn.Module:
    return tiny("GPT2LMHeadModel", n_embd=48, n_layer=3, n_head=4, vocab_size=VOCABULARY, use_cache=False)


def inputs_of(model: nn.Module) -> Any:
    tokens = torch.randint(0, VOCABULARY, (BATCH, TOKENS))
    return {"input_ids": tokens, "labels": tokens} if hasattr(model, "config") else (tokens, tokens)


def loss_of(model: Any, inputs: Any) -> torch.Tensor:
    return model(**inputs).loss if isinstance(inputs, dict) else model(*inputs)


def settings(policy: str, dtype: str, block: str) -> dict[str, Any]:
    section = SECTIONS[policy]
    if "zero" in section:
        section = section | {"zero": {"recompute": section["zero"]["recompute"] | {"modules": [block]}}}
    values = {"train_micro_batch_size_per_gpu": BATCH, "optimizer": {"type": "AdamW"}, **section}
    return values | ({"bf16": {"enabled": True}} if dtype == "bf16" else {})


def kept(model: nn.Module, policy: str, dtype: str, block: str) -> int:
    """Bytes of what lives between the forward and the backward of the second step, and did not before."""
    engine, inputs = zero.initialize(model=model, config=settings(policy, dtype, block))[0], inputs_of(model)
    for _ in range(2):
        with only_new(), LiveBytes(unit.buffer.full for unit in engine._sharded.units) as live:
            loss = loss_of(engine, inputs)
            gc.collect()
            found = live.now
        engine.backward(loss)
        engine.step()
        del loss
    engine.destroy()
    return found


def traced(make: Any, dtype: str = "fp32", device: str = "cpu") -> ModelCost:
    with torch.device("meta"):
        model = make()
    return trace(model, inputs_of(model), load(settings("none", dtype, "Block"), 1), device)


def as_said(make: Any, dtype: str, policies: tuple[str, ...] = POLICIES) -> None:
    """Trace a model, and run it: bytes kept, and FLOPs."""
    cost = traced(make, dtype)
    block = next(unit.kind for unit in cost.units if unit.recomputable)
    for policy in policies:
        real, said = kept(make(), policy, dtype, block), cost.activations(policy, BATCH) + BATCH * cost.logits_saved
        assert abs(said / real - 1) < 0.01, f"{policy}, {dtype}: traced {said:,.0f}, real {real:,}"
    assert cost.activations("none") > cost.activations("full") >= cost.activations("host")
    model = make()
    with FlopCounterMode(display=False, custom_mapping=FORMULAS) as counter:
        loss_of(model, inputs_of(model)).backward()
    assert cost.flops * BATCH == counter.get_total_flops()


@pytest.mark.ranks(1)
def test_the_example_keeps_and_computes_what_a_trace_says():
    as_said(gpt, "fp32")
    as_said(tied, "bf16", ("selective",))
    as_said(Relu, "fp32", ("none",))


@pytest.mark.long
@pytest.mark.ranks(1)
def test_models_of_transformers_keep_and_compute_what_a_trace_says():
    pytest.importorskip("transformers")
    for make in (llama, gpt2):
        for dtype in ("fp32", "bf16"):
            as_said(make, dtype)


def test_a_gpu_keeps_masks_of_dropout_in_bytes_and_no_scores():
    class Dropping(Relu):
        def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            x = F.dropout(self.embed(tokens), 0.5)
            y = F.scaled_dot_product_attention(*[x.unsqueeze(1)] * 3, dropout_p=0.5)
            return F.cross_entropy(self.head(self.blocks[0](y.squeeze(1))).flatten(0, 1), targets.flatten())

    saved = {device: traced(Dropping, "bf16", device).units[-1].saved["none"] for device in ("cpu", "cuda")}
    # On the CPU this has scores, attention's weights beside them.
    assert saved["cuda"] < 10 * TOKENS * 32 and saved["cpu"] > saved["cuda"] + 2 * 2 * TOKENS * TOKENS


class Gated(nn.Module):
    """A block as `shape_cost` has it."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norms = nn.ParameterList(torch.ones(width) for _ in range(2))
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def norm(self, x: torch.Tensor, index: int) -> torch.Tensor:
        return F.rms_norm(x, [x.shape[-1]], self.norms[index])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x, 0)
        parts = [linear(y).unflatten(-1, (-1, 128)).transpose(1, 2) for linear in (self.q, self.k, self.v)]
        attention = F.scaled_dot_product_attention(parts[0] * 2.0, parts[1] * 2.0, parts[2], is_causal=True)
        x = x + self.o(attention.transpose(1, 2).flatten(2))
        y = self.norm(x, 1)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def played(cost: ModelCost, policy: str) -> float:
    """The most bytes alive through a forward and a backward, one unit after the other."""
    kept = [unit.saved[policy] for unit in cost.units]
    moments = [sum(kept) + cost.logits]
    for place, unit in enumerate(cost.units):
        before = cost.units[place - 1].saved["full"] if place and policy == "host" else 0.0
        moments.append(sum(kept[:place]) + before + max(kept[place], unit.saved["none"]) + unit.working)
    return max(moments)


def test_the_formula_of_a_shape_is_what_a_trace_finds():
    width, inner, tokens = 256, 1024, 512

    class Decoder(Relu):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(2000, width)
            self.blocks = nn.ModuleList(Gated(width, inner) for _ in range(3))
            self.norm = nn.LayerNorm(width)
            self.last = nn.Linear(width, 2000, bias=False)

        def head(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.norm(x)).float()

    with torch.device("meta"):
        model, given = Decoder(), torch.zeros(1, tokens, dtype=torch.long)
    found = trace(model, (given, given), load(settings("none", "bf16", "Block"), 1))
    formula = shape_cost(Shapes(3, width, inner, 2000), tokens)
    assert formula.flops == found.flops
    for policy in POLICIES:
        assert formula.activations(policy) == pytest.approx(found.activations(policy), rel=0.01)
        again = [sum(unit.recompute_flops[policy] for unit in cost.units) for cost in (formula, found)]
        assert again[0] == again[1]
        assert formula.peak(policy) == pytest.approx(found.peak(policy), rel=0.05)
        assert formula.peak(policy, 3) == pytest.approx(3 * played(formula, policy))
        assert found.peak(policy) == pytest.approx(played(found, policy))
    assert formula.logits == pytest.approx(found.logits, rel=0.01)


def test_errors_say_what_to_do():
    with pytest.raises(ValueError, match=r"'embed\.weight' is not on the meta device"):
        trace(Relu(), (torch.zeros(1, 2, dtype=torch.int64),) * 2, load({"train_batch_size": 1}, 1))

    class Asking(Relu):
        def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return super().forward(tokens, targets) if tokens.max().item() > 3 else self.embed(tokens).sum()

    with pytest.raises(ValueError, match=r"Asking asks for values while it runs.*give --params"):
        traced(Asking)
    with torch.device("meta"):
        model = Relu()
    with pytest.raises(ValueError, match="no tensor among them"):
        trace(model, (1, 2), load({"train_batch_size": 1}, 1))


def test_a_model_is_left_as_it_was():
    with torch.device("meta"):
        model = Relu()
    model.blocks[0].forward = own = model.blocks[0].forward
    costs = [trace(model, inputs_of(model), load(settings("none", dtype, "Block"), 1)) for dtype in ("bf16", "fp32")]
    assert 1.9 < costs[1].activations() / costs[0].activations() < 2.1
    assert model.blocks[0].forward is own and "forward" not in vars(model.blocks[1])
    assert all(param.dtype is torch.float32 and param.grad is None for param in model.parameters())
