"""The promise: one Trainer script has the same losses, bit for bit, on every stage, with and without offload.

Plain Trainer has them, too, but for the order of sums. What it saves it goes on from, also at other ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from huggingface_cases import settings, trained
from ranks import Pool

pytestmark = pytest.mark.long
OPTIMIZER = {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")}
CPU = {"device": "cpu"}
EVERY = {"zero": {"reduce_every_micro_batch": True}, "optimizer": OPTIMIZER}
STAGES = range(4)
SAVING = {"save_strategy": "steps", "save_steps": 3}  # an epoch has 8 steps at 2 ranks
OFFLOADED = [settings(2, offload_optimizer=CPU), settings(3, offload_optimizer=CPU, offload_param=CPU)]


@pytest.mark.parametrize(
    ("world", "accumulation", "configs"),
    [(2, 1, [*map(settings, STAGES)]), (1, 2, [settings(1), *OFFLOADED])],
    ids=["two ranks", "one rank, offload"],
)
def test_losses_are_the_same_bits_on_all_stages(
    door: Pool, tiny: Path, tmp_path: Path, world: int, accumulation: int, configs: list[dict[str, Any]]
) -> None:
    first, *others, plain = [
        door.run(world, trained, str(tiny), f"{tmp_path}/{number}", config, gradient_accumulation_steps=accumulation)[0]
        for number, config in enumerate([*({**config, **EVERY} for config in configs), None])  # the last is plain
    ]
    assert len(first[0]) == 10
    for other in others:
        assert other == first
    assert first[0] == pytest.approx(plain[0], rel=1e-5, abs=0)


def saving(model: str, out: str, number: int, resume: str | None = None, **more: Any) -> Any:
    return trained(model, out, settings(number), resume, **SAVING, **more)


@pytest.mark.parametrize("number", [0, 3])
def test_a_resumed_run_has_the_bits_of_one_that_went_through(
    door: Pool, tiny: Path, tmp_path: Path, number: int
) -> None:
    """In the middle of an epoch."""
    kept = tmp_path / "a" / "checkpoint-3"
    through = door.run(2, saving, str(tiny), str(tmp_path / "a"), number)[0]
    resumed = door.run(2, saving, str(tiny), str(tmp_path / "b"), number, str(kept))[0]
    assert resumed == through
    assert (kept / "zero_to_fp32.py").exists()


def test_it_resumes_at_another_number_of_ranks(door: Pool, tiny: Path, tmp_path: Path) -> None:
    kept = str(tmp_path / "a" / "checkpoint-3")
    losses, *_ = door.run(2, saving, str(tiny), str(tmp_path / "a"), 3, attention_dropout=0.0)[0]
    more = {"per_device_train_batch_size": 8, "attention_dropout": 0.0}
    again, *_ = door.run(1, saving, str(tiny), str(tmp_path / "b"), 1, kept, **more)[0]
    assert again == pytest.approx(losses, rel=1e-5, abs=0)


def test_the_best_model_is_loaded_at_the_end(door: Pool, tiny: Path, tmp_path: Path) -> None:
    """Of the largest loss, so that it is not the last."""
    from safetensors.torch import load_file

    best = {"eval_strategy": "steps", "eval_steps": 3, "load_best_model_at_end": True, "greater_is_better": True}
    _, sums, chosen = door.run(2, saving, str(tiny), str(tmp_path), 3, **best)[0]
    assert Path(chosen).name == "checkpoint-3"
    saved = load_file(Path(chosen) / "model.safetensors")
    assert sums == {key: (value.double().sum().item(), value.double().norm().item()) for key, value in saved.items()}


TOKENS = {"zero": {"mean": "tokens"}, "optimizer": OPTIMIZER}
BY_LENGTH = {"attention_dropout": 0.0, "train_sampling_strategy": "group_by_length"}


@pytest.mark.parametrize("number", [1, 3])
def test_the_mean_over_tokens_is_that_of_one_plain_process(door: Pool, tiny: Path, tmp_path: Path, number: int) -> None:
    """Micro-batches of samples of one length, so that each has another number of tokens."""
    one, two = ({"gradient_accumulation_steps": 2 // world, **BY_LENGTH} for world in (1, 2))
    losses, weights, _ = door.run(1, trained, str(tiny), f"{tmp_path}/plain", None, **one)[0]
    json, out = settings(number) | TOKENS, str(tmp_path / "out")
    for world, more in ((1, one), (2, two), (2, two | {"average_tokens_across_devices": False})):
        found, ended, _ = door.run(world, trained, str(tiny), out, json, **more)[0]
        for name, digests in weights.items():
            assert ended[name] == pytest.approx(digests, rel=1e-4, abs=1e-4)
        if more.get("average_tokens_across_devices", True):  # else Trainer logs a mean of means
            assert found == pytest.approx(losses, rel=1e-5, abs=0)
