"""The promise: an unchanged Trainer, and TRL's script, train a model that is cut by the JSON, save and resume it."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_cases import STEPS, TRL, logged, run_script, settings, trained, words, write_rows
from ranks import Pool

pytestmark = pytest.mark.long
TWO = {"tensor_parallel": {"autotp_size": 2}}
SAVING = {"save_strategy": "steps", "save_steps": 3}


@pytest.fixture(scope="module")
def four(door: Pool) -> Iterator[Pool]:
    """Four ranks whose libraries find zero as deepspeed."""
    made = Pool(4)
    yield made
    made.close()


def on(model: str, out: str, stage: int | None, resume: str | None = None, **more: Any) -> Any:
    json = None if stage is None else settings(stage) | (TWO if more.pop("tp", True) else {})
    return trained(model, out, json, resume, attention_dropout=0.0, **more)


@pytest.fixture(scope="module")
def plain(four: Pool, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Of one process without zero, which has the samples of two in two micro-batches."""
    out = str(tmp_path_factory.mktemp("plain"))
    return four.run(1, on, str(tiny), out, None, gradient_accumulation_steps=2)[0]


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_two_by_two_ranks_train_as_one_plain_process(
    four: Pool, plain: Any, tiny: Path, tmp_path: Path, stage: int
) -> None:
    """From Trainer's loaders: the ranks that cut a layer are given the same batch, the others other ones."""
    losses, weights, _ = four.run(4, on, str(tiny), str(tmp_path), stage)[0]
    assert len(losses) == 10
    assert losses == pytest.approx(plain[0], rel=1e-5)
    assert weights.keys() == plain[1].keys()
    for name, digests in plain[1].items():
        assert weights[name] == pytest.approx(digests, rel=1e-4, abs=1e-4), name


@pytest.mark.parametrize(("ranks", "stage"), [(2, 1), (4, 3)])
def test_transformers_48569_and_deepspeed_7320_it_saves_and_resumes(
    four: Pool, tiny: Path, tmp_path: Path, ranks: int, stage: int
) -> None:
    """On rank 0 alone a save waited for ever, and a resume failed on shapes or lost the moments."""
    from transformers import AutoModelForCausalLM

    kept = tmp_path / "a" / "checkpoint-3"
    through = four.run(ranks, on, str(tiny), str(tmp_path / "a"), stage, **SAVING)[0]
    resumed = four.run(ranks, on, str(tiny), str(tmp_path / "b"), stage, str(kept), **SAVING)[0]
    assert resumed == through
    more = {"per_device_train_batch_size": 4 * ranks // 2, "tp": False}
    whole = four.run(1, on, str(tiny), str(tmp_path / "c"), 1, str(kept), **more, **SAVING)[0]
    assert whole[0] == pytest.approx(through[0], rel=1e-4)
    _, found = AutoModelForCausalLM.from_pretrained(kept, output_loading_info=True)
    assert not any(found.values()), "what it saves is whole, by Transformers' own names"


def test_trl_7100_trl_trains_as_one_plain_process(four: Pool, tiny: Path, tmp_path: Path) -> None:
    """It multiplies by the weight of the head itself, which stays whole; tokens it counts on each rank."""
    script = Path(importlib.util.find_spec("trl").origin).parent / "scripts" / "sft.py"
    write_rows(tmp_path / "data", "sft")
    config = tmp_path / "zero.json"
    config.write_text(json.dumps(settings(2) | TWO))
    logs = []
    for world, place in (1, {"use_cpu": "True"}), (4, {"deepspeed": config}):
        out = tmp_path / str(world)
        given = {"model_name_or_path": tiny, "dataset_name": tmp_path / "data", "output_dir": out, **place}
        steps = {"gradient_accumulation_steps": 1 if world == 4 else 2, "eval_strategy": "no"}
        four.run(world, run_script, str(script), *words({**given, **TRL, **steps}))
        logs.append([entry for entry in logged(out) if "loss" in entry])
    one, cut = ([entry["loss"] for entry in log] for log in logs)
    assert len(one) == STEPS and cut == pytest.approx(one, rel=1e-5)
    norms = [[entry["grad_norm"] for entry in log] for log in logs]
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)
