"""Models, batches and settings of tests in which ranks share sequences, and the training of one process."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from marks import needs
from models import config
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformer_models import GPT2, NO_DROPOUT, tiny

import zero
from zero.utils import safe_get_full_grad

ROWS, LENGTH, VOCABULARY = 2, 30, 64
DOCUMENTS = (13, 2, 15)
needs_transformers = needs("transformers")


NONE = ("dropout", "attention_dropout", "residual_dropout")
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12}
SIZES = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
SIZES |= {"max_position_embeddings": 64}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {"num_key_value_heads": 2}),
    "gpt2": ("GPT2LMHeadModel", GPT2),
    "bert": ("BertForMaskedLM", NO_DROPOUT),
    "qwen": (
        "Qwen2ForCausalLM",
        {"num_key_value_heads": 1, "sliding_window": 7, "use_sliding_window": True, "max_window_layers": 1},
    ),
}
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {  # which count positions or turn them in ways of their own
    "roberta": ("RobertaForMaskedLM", NO_DROPOUT),
    "opt": ("OPTForCausalLM", {"word_embed_proj_dim": 32, "ffn_dim": 48, **dict.fromkeys(NONE[:2], 0.0)}),
    "latent": (
        "DeepseekV2ForCausalLM",
        {**LATENT, "head_dim": 8, "num_key_value_heads": 4, "first_k_dense_replace": 2},
    ),
    "seed": ("SeedOssForCausalLM", {"head_dim": 8, "num_key_value_heads": 2, **dict.fromkeys(NONE[1:], 0.0)}),
    "both ways": ("LlamaForCausalLM", {"is_causal": False}),
    "dynamic": (
        "LlamaForCausalLM",
        {"max_position_embeddings": 16, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
    ),
    "longrope": (
        "Phi3ForCausalLM",
        {
            "original_max_position_embeddings": 16,
            "pad_token_id": 0,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "original_max_position_embeddings": 16,
                "short_factor": [1.0] * 4,
                "long_factor": [1.0, 2.0, 4.0, 8.0],
            },
        },
    ),
}


def build(kind: str, **more: Any) -> Any:
    """Two layers of width 32, seeded and without dropout."""
    name, own = (KINDS | OTHERS)[kind]
    sizes = {} if kind == "gpt2" else SIZES
    return tiny(name, **sizes | {"vocab_size": VOCABULARY, "use_cache": False} | own | more)


def inputs(number: int, form: str, kind: str = "llama") -> dict[str, torch.Tensor]:
    """One micro-batch: plain, "packed", "padded" behind or "left"; some labels do not count."""
    generator = torch.Generator().manual_seed(100 + number)
    tokens = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=generator)
    found = {"input_ids": tokens, "labels": tokens.clone()}
    found["labels"][:, : 3 + number % 5] = -100
    if form == "packed" and kind != "bert":  # which attends to all, whatever its positions
        found["position_ids"] = torch.cat([torch.arange(size) for size in DOCUMENTS]).expand(ROWS, -1)
    if form == "padded":
        found["attention_mask"] = (torch.arange(LENGTH) < torch.tensor([[LENGTH], [21]])).long()
    if form == "left":  # its last place of padding tells the first token
        found["attention_mask"] = (torch.arange(LENGTH) >= torch.tensor([[0], [11]])).long()
    if "attention_mask" in found:
        found["labels"][found["attention_mask"] == 0] = -100
        found["input_ids"][found["attention_mask"] == 0] = 1
    return found


def plain(kind: str, form: str, data_ranks: int, steps: int = 2) -> tuple[list[float], list[dict[str, torch.Tensor]]]:
    """Losses and gradients of one process; a step is the mean over the micro-batches of all data ranks."""
    model = build(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, grads = [], []
    for step in range(steps):
        optimizer.zero_grad()
        batches = [inputs(step * data_ranks + rank, form, kind) for rank in range(data_ranks)]
        loss = sum(model(**each).loss for each in batches) / data_ranks
        loss.backward()
        losses.append(loss.item())
        grads.append({name: param.grad.clone() for name, param in model.named_parameters()})
        optimizer.step()
    return losses, grads


def settings(stage: int, cp: int, mode: str, **more: Any) -> dict[str, Any]:
    data_ranks = dist.get_world_size() // cp
    made = config(stage, data_ranks, micro=ROWS)
    made["optimizer"] = {"type": "SGD", "params": {"lr": 0.1}}
    made |= {"gradient_clipping": 0, "sequence_parallel_size": cp, "zero": {"context": {"mode": mode}}}
    for key, value in more.items():
        made[key] = {**made.get(key, {}), **value}
    return made


def check(kind: str, cp: int, mode: str, stage: int, form: str, more: dict[str, Any]) -> None:
    """Losses and gradients on this rank beside those of one process."""
    data_ranks = dist.get_world_size() // cp
    losses, grads = plain(kind, form, data_ranks)
    engine, *_ = zero.initialize(model=build(kind), config=settings(stage, cp, mode, **more))
    for step, (loss, whole) in enumerate(zip(losses, grads, strict=True)):
        found = engine(**inputs(step * data_ranks + dist.get_rank() // cp, form, kind)).loss
        engine.backward(found)
        mean = found.detach().clone()
        dist.all_reduce(mean)
        assert abs(mean.item() / dist.get_world_size() - loss) <= 1e-6 * loss, (mode, stage, form, more)
        for name, param in engine.module.named_parameters():
            mine = safe_get_full_grad(param)
            assert (mine - whole[name]).abs().max() <= 1e-6, (name, mode, stage, form, more)
        engine.step()
    engine.destroy()


class Lines(nn.Module):
    """A model of the user's own: positions, attention, a head; the loss outside of it, or of `targets`."""

    def __init__(self, own: str = "own") -> None:
        super().__init__()
        torch.manual_seed(2)
        self.embed, self.place = nn.Embedding(VOCABULARY, 16), nn.Embedding(64, 16)
        self.mix, self.head, self.own = nn.Linear(16, 48), nn.Linear(16, VOCABULARY), own

    def forward(self, tokens: torch.Tensor, targets: Any = None, position_ids: Any = None) -> torch.Tensor:
        places = torch.arange(tokens.shape[1])[None] if position_ids is None else position_ids
        hidden = self.embed(tokens) + self.place(places)
        query, key, value = self.mix(hidden).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        if self.own == "own":
            seen = zero.attention(query, key, value)
        elif self.own == "checkpointed":
            seen = checkpoint(zero.attention, query, key, value, use_reentrant=False)
        else:
            with zero.shared_attention():
                seen = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        logits = self.head(hidden + seen.transpose(1, 2).flatten(2))
        return logits if targets is None else nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
