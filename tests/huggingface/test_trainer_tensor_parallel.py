"""The promise: an unchanged Trainer trains a model that is cut by the JSON, and saves and resumes it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_cases import settings, trained
from ranks import Pool

pytestmark = pytest.mark.long
TWO = {"tensor_parallel": {"autotp_size": 2}}
SAVING = {"save_strategy": "steps", "save_steps": 3}


@pytest.fixture(scope="module")
def four() -> Iterator[Pool]:
    """Four ranks whose libraries find zero as deepspeed."""
    made = Pool(4)
    yield made
    made.close()


def on(model: str, out: str, stage: int, tp: bool, resume: str | None = None, **more: Any) -> Any:
    return trained(model, out, settings(stage) | (TWO if tp else {}), resume, attention_dropout=0.0, **more)


@pytest.mark.parametrize("stage", [0, 2])  # at 3 Transformers itself refuses to load weights
def test_losses_are_those_of_data_ranks_alone(four: Pool, tiny: Path, tmp_path: Path, stage: int) -> None:
    cut = four.run(4, on, str(tiny), str(tmp_path / "cut"), stage, True)[0]
    whole = four.run(2, on, str(tiny), str(tmp_path / "whole"), stage, False)[0]
    assert len(cut[0]) == len(whole[0]) == 10
    assert cut[0] == pytest.approx(whole[0], rel=1e-5)


def test_it_saves_and_resumes(four: Pool, tiny: Path, tmp_path: Path) -> None:
    """On rank 0 alone a save would wait for ever, and a resume elsewhere failed on shapes (transformers-48569)."""
    kept = str(tmp_path / "a" / "checkpoint-3")
    through = four.run(2, on, str(tiny), str(tmp_path / "a"), 1, True, **SAVING)[0]
    resumed = four.run(2, on, str(tiny), str(tmp_path / "b"), 1, True, kept, **SAVING)[0]
    assert resumed == through
    whole = four.run(1, on, str(tiny), str(tmp_path / "c"), 1, False, kept, **SAVING)[0]
    assert whole[0] == pytest.approx(through[0], rel=1e-4)
