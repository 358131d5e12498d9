"""A tiny model with adapters of PEFT, and its training in plain torch and under an engine."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformer_models import tiny

import zero

STEPS, PARTS, LAYERS = 3, 4, 2  # micro-batches of a step, whatever the ranks
TARGETS = ["q_proj", "v_proj"]


def llama(dtype: torch.dtype = torch.bfloat16, tied: bool = False) -> Any:
    """A tiny base with the same weights each time."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": LAYERS, "vocab_size": 24}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": tied}
    return tiny("LlamaForCausalLM", 0, **sizes, **heads).to(dtype)


def lora(**more: Any) -> Any:
    import peft

    return peft.LoraConfig(**{"r": 4, "target_modules": TARGETS, "task_type": "CAUSAL_LM"} | more)


def with_lora(base: Any, **more: Any) -> Any:
    """With adapters, in fp32 as PEFT makes them on a base of 16 bits."""
    import peft

    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tied weights
        return peft.get_peft_model(base, lora(**more))


def tokens(number: int, vocabulary: int = 24) -> torch.Tensor:
    return torch.randint(0, vocabulary, (2, 6), generator=torch.Generator().manual_seed(100 + number))


def loss_of(model: Any, number: int) -> torch.Tensor:
    return model(input_ids=tokens(number), labels=tokens(number)).loss


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2)


def trained_params(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.requires_grad]


def plain(model: Any, steps: int = STEPS) -> tuple[list[float], Any]:
    """Losses by micro-batch, and the model, of plain torch and PEFT; gradients are added in the order of the tree."""
    params, losses = trained_params(model), []
    optimizer = adamw(params)
    for step in range(steps):
        grads = []
        for part in range(PARTS):
            loss = loss_of(model, PARTS * step + part)
            loss.backward()
            losses.append(loss.item())
            grads.append([param.grad for param in params])
            optimizer.zero_grad()
        for param, (a, b, c, d) in zip(params, zip(*grads, strict=True), strict=True):
            param.grad = ((a + b) + (c + d)) * 0.25
        optimizer.step()
        optimizer.zero_grad()
    return losses, model


def settings(stage: int, **more: Any) -> dict[str, Any]:
    world = dist.get_world_size()
    section = {"stage": stage, "stage3_param_persistence_threshold": 0}
    sizes = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": PARTS // world, "gradient_clipping": 0}
    log = {"comms_logger": {"enabled": True}}
    return {**sizes, **log, "zero_optimization": section, "zero": {"reduce": "tree"}, **more}


def engine_of(model: Any, stage: int, **more: Any) -> Any:
    return zero.initialize(model=model, optimizer=adamw(trained_params(model)), config=settings(stage, **more))[0]


def train(engine: Any, steps: int = STEPS, first: int = 0) -> dict[int, float]:
    """Losses of this rank's micro-batches, by number."""
    rank, world, losses = dist.get_rank(), dist.get_world_size(), {}
    for step in range(first, first + steps):
        for number in range(PARTS * step + rank, PARTS * (step + 1), world):
            loss = loss_of(engine, number)
            engine.backward(loss)
            engine.step()
            losses[number] = loss.item()
    return losses


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    with zero.GatheredParameters(model.parameters()):
        return {name: value.detach().clone() for name, value in model.state_dict(keep_vars=True).items()}


def differing(model: nn.Module, wanted: nn.Module) -> list[str]:
    """Names of values that are not the same bits."""
    return differing_of(whole(model), wanted)


def differing_of(found: dict[str, torch.Tensor], wanted: nn.Module) -> list[str]:
    other = wanted.state_dict()
    assert found.keys() == other.keys()
    return [name for name, value in found.items() if value.dtype != other[name].dtype or not value.equal(other[name])]


def sent(engine: Any) -> dict[str, tuple[int, int]]:
    """How often this rank has sent so far, and the bytes, by operation."""
    return {name: (each.count, each.sent) for name, each in engine.log_comms_summary().items()}


def nbytes(params: Any) -> int:
    return sum(param.numel() * param.element_size() for param in params)
