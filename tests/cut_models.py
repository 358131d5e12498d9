"""Tiny models whose layers are cut: of integers, whose sums are exact in any order, and those of Transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from sharing import needs_transformers
from torch import nn
from transformer_models import GPT2, NO_DROPOUT, tiny

import zero
from zero.utils import safe_get_full_fp32_param, safe_get_full_grad

VOCABULARY, WIDTH, HEAD, ROWS, LENGTH = 13, 8, 2, 2, 12


class Attention(nn.Module):
    """Of each position to itself only, so that all its sums are exact."""

    def __init__(self, heads: int, key_heads: int) -> None:
        super().__init__()
        self.head_dim, self.num_heads = HEAD, heads
        self.q_proj = nn.Linear(WIDTH, heads * HEAD)
        self.k_proj, self.v_proj = (nn.Linear(WIDTH, key_heads * HEAD) for _ in range(2))
        self.o_proj = nn.Linear(heads * HEAD, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (each(x).unflatten(-1, (-1, HEAD)) for each in (self.q_proj, self.k_proj, self.v_proj))
        k, v = (each.repeat_interleave(q.shape[-2] // k.shape[-2], -2) for each in (k, v))
        return self.o_proj((torch.relu(q) + k - v).flatten(-2))


class MLP(nn.Module):
    def __init__(self, inner: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(WIDTH, inner), nn.Linear(WIDTH, inner)
        self.down_proj = nn.Linear(inner, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(torch.relu(self.gate_proj(x)) + self.up_proj(x))


class ScaleNorm(nn.Module):
    """In place of a norm, of which some sums would round."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class Block(nn.Module):
    def __init__(self, heads: int, key_heads: int, inner: int) -> None:
        super().__init__()
        self.first, self.attn, self.second, self.mlp = ScaleNorm(), Attention(heads, key_heads), ScaleNorm(), MLP(inner)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.first(x))
        return x + self.mlp(self.second(x))


class Integers(nn.Module):
    """Every kind of layer: columns, rows, biases, heads of keys that several share, an embedding and its tied head."""

    def __init__(self, heads: int = 6, key_heads: int = 6, inner: int = 11, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(heads, key_heads, inner) for _ in range(2))
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.lm_head.weight = self.embed.weight
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randint(-1, 2, param.shape, generator=generator))

    def forward(self, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The mean of the logits, each times an integer."""
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return (self.lm_head(x) * weights).sum() / 1024


def integers(number: int, place: int) -> dict[str, torch.Tensor]:
    """The batch of a micro-batch of a data rank."""
    generator = torch.Generator().manual_seed(100 * place + number)
    ids = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=generator)
    return {"ids": ids, "weights": torch.randint(-1, 2, (ROWS, LENGTH, VOCABULARY), generator=generator).float()}


def words(number: int, place: int, vocabulary: int = 67) -> dict[str, torch.Tensor]:
    ids = torch.randint(vocabulary, (ROWS, LENGTH), generator=torch.Generator().manual_seed(100 * place + number))
    return {"input_ids": ids, "labels": ids}


SIZES = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
_LATENT = {
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_shared_experts": 1,
}
_ROUTED = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", SIZES),
    "qwen3": ("Qwen3ForCausalLM", {**SIZES, "head_dim": 8, "tie_word_embeddings": True}),
    "mixtral": ("MixtralForCausalLM", {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", {**SIZES, **_ROUTED, "head_dim": 8}),
    "qwen2_moe": ("Qwen2MoeForCausalLM", {**SIZES, **_ROUTED, "shared_expert_intermediate_size": 24}),
    "deepseek_v3": ("DeepseekV3ForCausalLM", {**SIZES, **_LATENT}),
    "deepseek_v2": ("DeepseekV2ForCausalLM", {**SIZES, **_LATENT}),
    "gpt_oss": ("GptOssForCausalLM", {**SIZES, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "gpt2": ("GPT2LMHeadModel", {**GPT2, "vocab_size": 67, "eos_token_id": 1, "bos_token_id": 1}),
    "bert": ("BertForMaskedLM", {**{key: SIZES[key] for key in SIZES if key != "num_key_value_heads"}, **NO_DROPOUT}),
}


@needs_transformers
def family(name: str, seed: int = 0, **more: Any) -> nn.Module:
    """A tiny model of Transformers, without dropout."""
    kind, sizes = FAMILIES[name]
    return tiny(kind, seed, **sizes | more)


def json_of(tp: int, stage: int = 0, gas: int = 1, **more: Any) -> dict[str, Any]:
    """Without clipping; `more` replaces what is here."""
    values = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": gas,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.125}},
        "zero_optimization": {"stage": stage},
    }
    values |= {"tensor_parallel": {"autotp_size": tp}} if tp > 1 else {}
    for key, value in more.items():
        values[key] = {**values.get(key, {}), **value} if isinstance(value, dict) and key != "optimizer" else value
    return values


def adam(lr: float = 1e-2) -> dict[str, Any]:
    return {"optimizer": {"type": "AdamW", "params": {"lr": lr}}}


def place_of(tp: int, cp: int = 1) -> int:
    """This rank's among those with other samples."""
    return dist.get_rank() // (tp * cp) if dist.is_initialized() else 0


def trained(
    make: Callable[[], nn.Module],
    json: dict[str, Any],
    batch: Callable[[int, int], Any],
    place: int,
    steps: int = 1,
    compiler: str = "",
) -> dict[str, Any]:
    """Losses, and of the first step the norm and the full gradients, and the full weights at last."""
    model = make()
    engine, *_ = zero.initialize(model=model, config=json)
    if compiler:
        engine.compile(backend=compiler)
    gas, found = json["gradient_accumulation_steps"], {"losses": [], "norms": []}
    for step in range(steps):
        for micro in range(gas):
            out = engine(**batch(step * gas + micro, place))
            loss = getattr(out, "loss", out)
            engine.backward(loss)
            if not step and micro == gas - 1:
                found["grads"] = {name: _grad(param) for name, param in engine.module.named_parameters()}
            engine.step()
            found["losses"].append(loss.item())
        found["norms"].append(engine.get_global_grad_norm())
    found["weights"] = full(engine)
    found["shapes"] = {name: tuple(param.shape) for name, param in engine.module.named_parameters()}
    engine.destroy()
    whole = {name: param.detach() for name, param in model.named_parameters()}
    assert all(torch.equal(value, whole[name].float()) for name, value in found["weights"].items())
    return found


def _grad(param: torch.Tensor) -> torch.Tensor | None:
    grad = safe_get_full_grad(param)
    return None if grad is None else grad.clone()


def full(engine: Any) -> dict[str, torch.Tensor]:
    """Of what is trained."""
    named = [(name, param) for name, param in engine.module.named_parameters() if param.requires_grad]
    return {name: safe_get_full_fp32_param(param).clone() for name, param in named}


def plain(
    make: Callable[[], nn.Module], batch: Callable[[int, int], Any], places: int = 1, gas: int = 1
) -> dict[str, Any]:
    """The mean loss of one step of plain torch, and its gradients."""
    model, losses = make(), []
    for place in range(places):
        for micro in range(gas):
            out = model(**batch(micro, place))
            loss = getattr(out, "loss", out) / places / gas
            loss.backward()
            losses.append(loss.item())
    return {"loss": sum(losses), "grads": {name: param.grad for name, param in model.named_parameters()}}


FEW = {"steps": 2, "stages": (0, 3), "accumulations": (1,)}


def verdicts(model: nn.Module, json: dict[str, Any], batch: Any, **how: Any) -> list[str]:
    """What a check says of each run of an engine; the model is as it was."""
    engine, *_ = zero.initialize(model=model, config=json)
    before = {name: value for module in model.modules() for name, value in vars(module).items() if name[0] != "_"}
    report = engine.check(batch, **{**FEW, **how})
    after = {name: value for module in model.modules() for name, value in vars(module).items() if name[0] != "_"}
    assert before.keys() == after.keys() and all(before[name] is after[name] for name in before)
    found = [row.verdict for row in report.rows]
    assert report.ok == all(verdict in ("same bits", "within rounding") for verdict in found), str(report)
    engine.destroy()
    return found
