"""A cache of the Hugging Face hub without the hub: the small models that suites ask for by name, made at random."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

COMMIT = "0" * 40


def gpt2(width: int, heads: int = 2) -> Callable[[Path], None]:
    """What writes a GPT-2 of two layers into a folder."""

    def write(folder: Path) -> None:
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(vocab_size=1000, n_positions=128, n_embd=width, n_layer=2, n_head=heads)
        GPT2LMHeadModel(config).save_pretrained(folder)

    return write


def mobilevit(folder: Path) -> None:
    """Only the configuration, which has hidden_sizes."""
    from transformers import MobileViTConfig

    config = MobileViTConfig()
    config.hidden_sizes = [64, 80, 96]
    config.save_pretrained(folder)


def qwen_moe(folder: Path) -> None:
    """A mixture of experts of two layers."""
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 2}
    experts = {"shared_expert_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    Qwen2MoeForCausalLM(Qwen2MoeConfig(vocab_size=1000, **sizes, **experts, **heads)).save_pretrained(folder)


MODELS: dict[str, Callable[[Path], None]] = {
    "sshleifer/tiny-gpt2": gpt2(2),
    "hf-internal-testing/tiny-random-gpt2": gpt2(32),
    "gpt2": gpt2(64),
    "apple/mobilevit-xx-small": mobilevit,
    "peft-internal-testing/tiny-random-qwen-1.5-MoE": qwen_moe,
}


def make(cache: Path) -> None:
    """Write all of MODELS into the folder `cache`, as the hub's own library lays them out."""
    for name, write in MODELS.items():
        folder = cache / f"models--{name.replace('/', '--')}"
        (folder / "refs").mkdir(parents=True)
        (folder / "refs" / "main").write_text(COMMIT)
        write(folder / "snapshots" / COMMIT)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
