"""The promise: TRL's trainers with a reference model and with generation have the same losses on every stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from huggingface_cases import opened, settings
from ranks import Pool

CONFIG = {"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}, "zero": {"reduce_every_micro_batch": True}}


def trainer(kind: str, model: str, common: dict[str, Any]) -> Any:
    """DPO on pairs, or GRPO, which generates and rewards long answers."""
    from datasets import Dataset
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = [f"{a}+1=" for a in range(32)]
    if kind == "DPO":
        from trl import DPOConfig, DPOTrainer

        pairs = {"chosen": [str(a + 1) for a in range(32)], "rejected": [str(a) for a in range(32)]}
        data = Dataset.from_dict({"prompt": prompts, **pairs})
        return DPOTrainer(model, args=DPOConfig(**common), train_dataset=data, processing_class=tokenizer)
    from trl import GRPOConfig, GRPOTrainer

    args = GRPOConfig(num_generations=4, max_completion_length=4, beta=0.1, **common)
    data = Dataset.from_dict({"prompt": prompts})
    reward = [lambda completions, **more: [float(len(each)) for each in completions]]
    return GRPOTrainer(model, reward_funcs=reward, args=args, train_dataset=data, processing_class=tokenizer)


def losses(kind: str, model: str, out: str) -> list[Any]:
    """By stage, those of four steps, and the norms of the weights that they end with."""
    found = []
    for number in (1, 2, 3):
        with opened():
            how = {"max_steps": 4, "logging_steps": 1, "save_strategy": "no", "learning_rate": 1e-2, "bf16": False}
            quiet = {"report_to": [], "disable_tqdm": True, "per_device_train_batch_size": 4}
            config = {"output_dir": out, "deepspeed": {**settings(number), **CONFIG}}
            made = trainer(kind, model, {**how, **quiet, **config})
            made.train()
            weights = made.accelerator.get_state_dict(made.model_wrapped)
            norms = {name: value.double().norm().item() for name, value in (weights or {}).items()}
            found.append(([entry["loss"] for entry in made.state.log_history if "loss" in entry], norms))
            made.accelerator.free_memory()
    return found


@pytest.mark.long
@pytest.mark.parametrize("kind", ["DPO", "GRPO"])
def test_losses_are_the_same_bits_on_all_stages(door: Pool, tiny: Path, tmp_path: Path, kind: str) -> None:
    first, *others = door.run(2, losses, kind, str(tiny), str(tmp_path))[0]
    assert len(first[0]) == 4
    assert first[0][0] != first[0][-1]
    assert others == [first, first]
