"""The promise: what Trainer saves it goes on from, bit for bit, in the middle of an epoch too, and at other ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_cases import settings, trained
from ranks import Pool

pytestmark = pytest.mark.long
SAVING = {"save_strategy": "steps", "save_steps": 3}  # an epoch has 8 steps at 2 ranks
STAGES = range(4)


def run(model: str, out: str, number: int, resume: str | None, more: dict) -> object:
    return trained(model, out, settings(number), resume, **SAVING, **more)


@pytest.mark.parametrize("number", STAGES)
def test_a_resumed_run_has_the_bits_of_one_that_went_through(
    door: Pool, tiny: Path, tmp_path: Path, number: int
) -> None:
    through = door.run(2, run, str(tiny), str(tmp_path / "a"), number, None, {})[0]
    resumed = door.run(2, run, str(tiny), str(tmp_path / "b"), number, str(tmp_path / "a/checkpoint-3"), {})[0]
    assert resumed == through
    assert (tmp_path / "a" / "checkpoint-3" / "zero_to_fp32.py").exists()


@pytest.mark.parametrize("number", STAGES)
def test_it_resumes_at_another_number_of_ranks(door: Pool, tiny: Path, tmp_path: Path, number: int) -> None:
    (losses, *_), _ = door.run(2, run, str(tiny), str(tmp_path / "a"), number, None, {"attention_dropout": 0.0})
    more = {"per_device_train_batch_size": 8, "attention_dropout": 0.0}
    (again, *_) = door.run(1, run, str(tiny), str(tmp_path / "b"), number, str(tmp_path / "a/checkpoint-3"), more)[0]
    assert again == pytest.approx(losses, rel=1e-5, abs=0)


@pytest.mark.parametrize("number", STAGES)
def test_the_best_model_is_loaded_at_the_end(door: Pool, tiny: Path, tmp_path: Path, number: int) -> None:
    """Of the largest loss, so that it is not the last."""
    best = {"eval_strategy": "steps", "eval_steps": 3, "load_best_model_at_end": True, "greater_is_better": True}
    _, sums, chosen = door.run(2, run, str(tiny), str(tmp_path), number, None, best)[0]
    assert Path(chosen).name == "checkpoint-3"
    from safetensors.torch import load_file

    saved = load_file(Path(chosen) / "model.safetensors")
    assert sums == {key: (value.double().sum().item(), value.double().norm().item()) for key, value in saved.items()}
