"""The promise: TRL's own scripts, unchanged, log and save the same bits on every stage, and after a resume."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_cases import GRPO, KEPT, STEPS, TRL, logged, run_script, settings, without, words, write_rows
from ranks import Pool
from safetensors.torch import load_file

PEFT = {"use_peft": "True", "lora_r": 4, "lora_target_modules": ["q_proj", "v_proj"]}


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
    write_rows(data, name)

    def run(number: int, out: Path, **more: Any) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
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
