"""The promise: `from_pretrained` under zero.Init, and the division of experts after it, hold one whole stack at a time.

Transformers' files have experts one by one. Rank 0 alone reads them, a stack at a time, and makes it of its experts;
what is read is cut over all ranks at once, and `initialize` gathers one stack after the other to divide it anew.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_cases import filled, opened
from ranks import Pool
from sampled_memory import MIB, SLACK, Sampled
from transformer_models import tiny as made

from zero.core.owner import cut_of, owner_of

SIZES: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": 2}
SMALL = SIZES | {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
LARGE = SIZES | {"vocab_size": 128, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6}
KINDS: dict[str, dict[str, Any]] = {
    "MixtralForCausalLM": {"num_local_experts": 4},
    "Qwen3MoeForCausalLM": {"num_experts": 4, "moe_intermediate_size": 32},
}
STACK = 8 * 2 * 2048 * 512 * 4  # bytes of the largest one of LARGE

pytestmark = pytest.mark.long


def read(folder: str, ep: int) -> tuple[int, int, Any]:
    """Growth by reading the model, and then by dividing it; its engine."""
    import deepspeed
    from transformers import AutoModelForCausalLM
    from transformers.integrations import HfDeepSpeedConfig

    config = filled(3) | {"expert_parallel": {"enabled": ep > 1, "autoep_size": ep}}
    said = HfDeepSpeedConfig(config)
    with Sampled() as reading:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert all(owner_of(param) is not None for param in model.parameters()), "it is not whole on any rank"
    with Sampled() as dividing:
        engine, *_ = deepspeed.initialize(model=model, config=config)
    cut = {name.split(".")[-2] for name, each in model.named_parameters() if cut_of(each) is not None}
    assert cut == ({"experts"} if ep > 1 else set())
    del said
    return reading.growth, dividing.growth, engine


def born_cut(folder: str, ep: int) -> dict[str, torch.Tensor]:
    with opened():
        *_, engine = read(folder, ep)
        return {name: value.clone() for name, value in engine.module_state_dict().items()}


@pytest.mark.parametrize(("kind", "ep"), [("MixtralForCausalLM", 2), ("Qwen3MoeForCausalLM", 2)])
def test_what_stores_experts_one_by_one_is_read_bit_for_bit(door: Pool, tmp_path: Path, kind: str, ep: int) -> None:
    from safetensors import safe_open
    from transformers import AutoModelForCausalLM

    made(kind, **SMALL, **KINDS[kind]).save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert any(".experts.3." in name for name in file.keys())  # noqa: SIM118 (it is no dict)
    one = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    for found in door.run(2, born_cut, str(tmp_path), ep):
        assert found.keys() == one.keys()
        assert all(torch.equal(found[name].cpu(), value) for name, value in one.items())


def grown(small: str, large: str, ep: int) -> tuple[int, int]:
    with opened():
        *_, engine = read(small, ep)  # once everything that a small one takes is imported
        engine.destroy()
        reading, dividing, engine = read(large, ep)
        engine.destroy()
        return reading, dividing


def test_no_rank_holds_more_than_its_shard_and_a_stack(door: Pool, tmp_path: Path) -> None:
    made("MixtralForCausalLM", **SMALL, num_local_experts=4).save_pretrained(tmp_path / "small")
    model = made("MixtralForCausalLM", **LARGE, num_local_experts=8)
    size = sum(param.nbytes for param in model.parameters())
    model.save_pretrained(tmp_path / "large", max_shard_size="200MB")
    del model
    ranks = Pool(4)  # of new processes: what others have given back to themselves would not be seen to grow
    found = ranks.run(4, grown, str(tmp_path / "small"), str(tmp_path / "large"), 4)
    ranks.close()
    print(size // MIB, STACK // MIB, [(reading // MIB, dividing // MIB) for reading, dividing in found])
    shard = size // 4
    for rank, (reading, dividing) in enumerate(found):
        # The stack; rank 0 makes it of parts. The engine's own shards come while those of zero.Init go.
        assert shard < reading <= shard + (1 if rank else 3) * STACK + SLACK < 0.8 * size
        assert dividing <= shard + 2 * STACK + SLACK < 0.8 * size
