"""The promise: TRL's own scripts, unchanged, log and save the same bits on every stage, and after a resume."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_cases import run_script, settings
from ranks import Pool
from safetensors.torch import load_file

STEPS, KEPT = 4, 2  # and a checkpoint each KEPT steps
USUAL = {
    "dtype": "float32",
    "bf16": "False",
    "gradient_checkpointing": "False",
    "max_grad_norm": 0.1,
    "learning_rate": 1e-2,
    "per_device_train_batch_size": 4,
    "max_steps": STEPS,
    "save_steps": KEPT,
    "logging_steps": 1,
    "report_to": "none",
    "disable_tqdm": "True",
}
MORE = {
    "sft": {},
    "dpo": {},
    "grpo": {
        "reward_funcs": "test_programs.length",
        "num_generations": 4,
        "max_completion_length": 4,
        "beta": 0.1,
    },
}
PEFT = {"use_peft": "True", "lora_r": 4, "lora_target_modules": ["q_proj", "v_proj"]}
TIMES = ("time", "per_second")


def length(completions: list[str], **more: Any) -> list[float]:
    """The reward that grpo.py takes by its name."""
    return [float(len(each)) for each in completions]


def rows(name: str) -> list[dict[str, str]]:
    """What a script trains on: sums, whole, as pairs, or as questions."""
    sums = [(f"{a}+{b}=", str(a + b)) for a in range(8) for b in range(8)]
    if name == "dpo":
        return [{"prompt": prompt, "chosen": answer, "rejected": answer[::-1] + "0"} for prompt, answer in sums]
    return [{"text": prompt + answer} if name == "sft" else {"prompt": prompt} for prompt, answer in sums]


def words(value: Any) -> list[str]:
    """Of an option on a command line."""
    return [str(each) for each in (value if isinstance(value, list) else [value])]


def logged(folder: Path) -> list[dict[str, Any]]:
    """By step all that a run has logged, but for times."""
    history = json.loads((folder / f"checkpoint-{STEPS}/trainer_state.json").read_text())["log_history"]
    return [without(entry, TIMES) for entry in history]


def without(entry: dict[str, Any], some: Collection[str]) -> dict[str, Any]:
    return {key: value for key, value in entry.items() if not any(part in key for part in some)}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    (file,) = folder.glob("*model.safetensors")
    return load_file(file)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "peft", "resumed"),
    [
        *[("sft", {}, 3), ("dpo", {}, 2), ("grpo", {}, 3)],
        *[("sft", PEFT, 1), ("dpo", PEFT, 3), ("grpo", PEFT, 2)],
    ],
    ids=lambda value: value if isinstance(value, str) else "LoRA" if value == PEFT else str(value or "whole"),
)
def test_a_script_has_the_same_bits_on_all_stages_and_resumed(
    door: Pool, tiny: Path, tmp_path: Path, name: str, peft: dict[str, Any], resumed: int
) -> None:
    script = Path(importlib.util.find_spec("trl").origin).parent / "scripts" / f"{name}.py"
    data = tmp_path / "data"
    data.mkdir()
    (data / "train.json").write_text("\n".join(map(json.dumps, rows(name))))

    def run(number: int, out: Path, **more: Any) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
        config = tmp_path / f"{number}.json"
        config.write_text(json.dumps(settings(number)))
        given = {"model_name_or_path": tiny, "dataset_name": data, "output_dir": out, "deepspeed": config}
        options = {**given, **USUAL, **MORE[name], **peft, **more}
        door.run(2, run_script, str(script), *(word for key in options for word in (f"--{key}", *words(options[key]))))
        return logged(out), weights(out)

    log, saved = run(1, tmp_path / "1")
    assert len({entry["loss"] for entry in log}) == STEPS
    assert min(entry["grad_norm"] for entry in log) > USUAL["max_grad_norm"]
    kept = tmp_path / str(resumed) / f"checkpoint-{KEPT}"
    for number, more in (2, {}), (3, {}), (resumed, {"resume_from_checkpoint": kept}):
        log_here, saved_here = run(number, tmp_path / (f"{number}-resumed" if more else str(number)), **more)
        # TRL's own count of tokens is in no checkpoint of SFT and DPO.
        uncounted = {"num_tokens"} if more else set()
        assert [without(entry, uncounted) for entry in log_here] == [without(entry, uncounted) for entry in log]
        assert saved_here.keys() == saved.keys()
        assert [key for key, value in saved.items() if not torch.equal(value, saved_here[key])] == []
    assert not (tmp_path / f"{resumed}-resumed/checkpoint-{KEPT}").exists()  # it went on, and did not begin again
