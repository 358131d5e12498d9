"""The promise: the scripts of docs/huggingface.md train as they stand, on every stage, and leave what they say."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from huggingface_cases import run_script, script, settings
from ranks import Pool

TEXTS = [f"{a}+{b}={a + b}" for a in range(16) for b in range(16)]
LONG = pytest.mark.long
PACKED = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed: pip install bitsandbytes"
)
CASES = [
    *[("Trainer", 3), pytest.param("Trainer", 1, marks=LONG), pytest.param("Trainer", 2, marks=LONG)],
    *[("Accelerate", 2), pytest.param("Accelerate", 1, marks=LONG), pytest.param("Accelerate", 3, marks=LONG)],
    *[pytest.param(title, stage, marks=LONG) for title in ("PEFT", "TRL") for stage in (1, 2, 3)],
    pytest.param("LoRA", 3, marks=LONG),
    *[pytest.param("4-bit and 8-bit bases", stage, marks=[LONG, PACKED]) for stage in (1, 3)],
]


def loss_of(folder: Path, tokenizer_at: Path) -> float:
    """Of what a script has saved, in plain transformers, over all texts."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_at)
    model = AutoModelForCausalLM.from_pretrained(folder)
    batch = tokenizer(TEXTS, padding=True, return_tensors="pt")
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    with torch.no_grad():
        return model(**batch, labels=labels).loss.item()


@pytest.mark.parametrize(("title", "number"), CASES)
def test_a_script_of_the_page_trains_and_saves(door: Pool, tiny: Path, tmp_path: Path, title: str, number: int) -> None:
    path, config, out = tmp_path / "train.py", tmp_path / "zero.json", tmp_path / "out"
    path.write_text(script(title))
    config.write_text(json.dumps(settings(number)))
    words = (str(tiny), str(out)) if title == "LoRA" else (str(tiny), str(config), str(out))
    door.run(2, run_script, str(path), *words)
    assert loss_of(out, tiny) < loss_of(tiny, tiny) - 0.1
    if title in ("PEFT", "LoRA"):
        assert (out / "adapter_model.safetensors").stat().st_size < (tiny / "model.safetensors").stat().st_size / 4
