"""The promise: TRL's scripts have the same bits on every stage and resumed; those of docs/huggingface.md train."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_cases import GRPO, KEPT, STEPS, TRL, logged, run_script, script, settings, without, words, write_rows
from marks import needs
from ranks import Pool
from safetensors.torch import load_file

PRECOMPUTED = {"precompute_ref_log_probs": "True"}
PEFT = {"use_peft": "True", "lora_r": 4, "lora_target_modules": ["q_proj", "v_proj"]}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    (file,) = folder.glob("*model.safetensors")
    return load_file(file)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "peft", "resumed"),
    [("sft", {}, 3), ("dpo", PEFT, 1), ("dpo", PRECOMPUTED, 3), ("grpo", {}, 2)],
    ids=lambda value: value if isinstance(value, str) else "LoRA" if value == PEFT else str(value or "whole"),
)
def test_a_script_has_the_same_bits_on_all_stages_and_resumed(
    door: Pool, tiny: Path, tmp_path: Path, name: str, peft: dict[str, Any], resumed: int
) -> None:
    script = Path(importlib.util.find_spec("trl").origin).parent / "scripts" / f"{name}.py"

    def run(number: int, out: Path, **more: Any) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
        data = out / "data"  # of its own: nothing is found that another run has computed
        write_rows(data, name)
        config = tmp_path / f"{number}.json"
        config.write_text(json.dumps(settings(number)))
        given = {"model_name_or_path": tiny, "dataset_name": data, "output_dir": out, "deepspeed": config}
        options = {**given, **TRL, **(GRPO if name == "grpo" else {}), **peft, **more}
        door.run(2, run_script, str(script), *words(options))
        return logged(out), weights(out)

    log, saved = run(1, tmp_path / "1")
    assert len({entry["loss"] for entry in log}) == STEPS
    assert min(entry["grad_norm"] for entry in log) > TRL["max_grad_norm"]
    kept = tmp_path / str(resumed) / f"checkpoint-{KEPT}"
    for number, more in (2, {}), (3, {}), (resumed, {"resume_from_checkpoint": kept}):
        log_here, saved_here = run(number, tmp_path / (f"{number}-resumed" if more else str(number)), **more)
        # TRL's own count of tokens is in no checkpoint of SFT and DPO.
        uncounted = {"num_tokens"} if more else set()
        assert [without(entry, uncounted) for entry in log_here] == [without(entry, uncounted) for entry in log]
        assert saved_here.keys() == saved.keys()
        assert [key for key, value in saved.items() if not torch.equal(value, saved_here[key])] == []
    assert not (tmp_path / f"{resumed}-resumed/checkpoint-{KEPT}").exists()  # it went on, and did not begin again


@pytest.mark.long
@pytest.mark.parametrize("number", [2, 3])
def test_sft_has_the_losses_of_one_plain_process(door: Pool, tiny: Path, tmp_path: Path, number: int) -> None:
    script = Path(importlib.util.find_spec("trl").origin).parent / "scripts" / "sft.py"
    write_rows(tmp_path / "data", "sft")
    config = tmp_path / "zero.json"
    config.write_text(json.dumps(settings(number)))  # TRL divides by the tokens of the step itself
    logs = []
    for world, place in (1, {"use_cpu": "True"}), (2, {"deepspeed": config}):
        out = tmp_path / str(world)
        given = {"model_name_or_path": tiny, "dataset_name": tmp_path / "data", "output_dir": out, **place}
        steps = {"gradient_accumulation_steps": 2 // world, "eval_strategy": "no"}
        door.run(world, run_script, str(script), *words({**given, **TRL, **steps}))
        logs.append([entry["loss"] for entry in logged(out) if "loss" in entry])
    assert len(logs[0]) == STEPS and logs[1] == pytest.approx(logs[0], rel=1e-5)


# --- the scripts of the page -----------------------------------------------------------------------------------------


TEXTS = [f"{a}+{b}={a + b}" for a in range(16) for b in range(16)]
LONG = pytest.mark.long
PACKED = needs("bitsandbytes")
CASES = [
    *[("Trainer", 3), ("Accelerate", 2)],
    *[pytest.param(*case, marks=LONG) for case in (("Trainer", 1), ("PEFT", 3), ("TRL", 2), ("LoRA", 3))],
    pytest.param("4-bit and 8-bit bases", 3, marks=[LONG, PACKED]),
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
