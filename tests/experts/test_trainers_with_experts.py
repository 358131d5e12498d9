"""The promise: unchanged programs of Transformers, TRL and Accelerate train mixtures whose experts the JSON divides.

Losses and norms of gradients are those of one process with plain torch; what is saved has Transformers' own names.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_cases import STEPS, TRL, logged, opened, run_script, settings, words, write_rows
from marks import longer
from ranks import Pool
from torch.utils.data import DataLoader
from transformer_models import tiny

SIZES = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "num_experts_per_tok": 2}
KINDS: dict[str, dict[str, Any]] = {
    "MixtralForCausalLM": {"num_local_experts": 4},
    "Qwen3MoeForCausalLM": {"num_experts": 4, "moe_intermediate_size": 32},
}
MIXTRAL, QWEN = KINDS
BATCH = 8  # sequences of all ranks together
SAVING = {"save_strategy": "steps", "save_steps": 2}


@pytest.fixture(scope="module")
def four(door: Pool) -> Iterator[Pool]:
    """Four ranks whose libraries find zero as deepspeed."""
    made = Pool(4)
    yield made
    made.close()


@pytest.fixture(scope="module")
def folders(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder for each kind of model, with a tokenizer."""
    found = {kind: tmp_path_factory.mktemp(kind) for kind in KINDS}
    for kind, folder in found.items():
        for file in tiny.glob("token*"):
            shutil.copy(file, folder)
        made(kind).save_pretrained(folder)
    return found


def made(kind: str, **more: Any) -> Any:
    return tiny(kind, **SIZES, **KINDS[kind], **more)


def divided(ep: int, stage: int, tp: int = 1) -> dict[str, Any]:
    """The JSON of a program."""
    more = {"tensor_parallel": {"autotp_size": tp}} if tp > 1 else {}
    return settings(stage) | {"expert_parallel": {"enabled": True, "autoep_size": ep}} | more


def program(folder: str, out: str, config: dict[str, Any] | None, ranks: int, resume: str | None = None, **more: Any):
    """Train with Trainer for 4 steps, and save; losses and norms by step. config: of zero; None for plain torch.

    It is the script of Transformers' own test of experts on ranks (expert_parallel_train.py), but for its
    DistributedConfig. ranks: that have batches of their own.
    """
    with opened():
        from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

        place = {"use_cpu": True} if config is None else {"deepspeed": config}
        how = {"learning_rate": 1e-3, "max_grad_norm": 1.0, "seed": 0, "data_seed": 0, "dataloader_drop_last": True}
        said = {"logging_steps": 1, "report_to": [], "disable_tqdm": True, "remove_unused_columns": False}
        args = TrainingArguments(
            f"{out}/trainer",
            per_device_train_batch_size=BATCH // ranks,
            max_steps=STEPS,
            average_tokens_across_devices=True,
            **{"save_strategy": "no", **how, **said, **place, **more},
        )
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        trainer = Trainer(model=model, args=args, train_dataset=rows())
        trainer.train(resume_from_checkpoint=resume)
        trainer.save_model(f"{out}/model")
        log = [entry for entry in trainer.state.log_history if "loss" in entry]
        trainer.accelerator.free_memory()
        return [(entry["loss"], entry["grad_norm"]) for entry in log]


def rows() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, SIZES["vocab_size"], (STEPS * BATCH, 16), generator=generator)
    return [{"input_ids": each, "labels": each.clone()} for each in ids]


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    """As Transformers reads them, which must find each of them and know all."""
    from transformers import AutoModelForCausalLM

    model, found = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(found.values()), found
    return model.state_dict()


@pytest.fixture(scope="module")
def plain(four: Pool, folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Losses and norms, and the folder of the weights, of one process without zero."""
    found = {}
    for kind, folder in folders.items():
        out = tmp_path_factory.mktemp("plain")
        found[kind] = four.run(1, program, str(folder), str(out), None, 1)[0], out / "model"
    return found


LAYOUTS = [(MIXTRAL, 4, 3, 1), *longer((MIXTRAL, 2, 1, 1), (MIXTRAL, 4, 2, 1), (MIXTRAL, 2, 3, 1))]
LAYOUTS += longer((QWEN, 2, 3, 1), (QWEN, 4, 0, 1), (QWEN, 4, 1, 2), (QWEN, 2, 0, 2))


@pytest.mark.parametrize(("kind", "ep", "stage", "tp"), LAYOUTS)
def test_trainer_logs_what_one_plain_process_does(
    four: Pool, folders: dict[str, Path], plain: dict[str, Any], tmp_path: Path, kind: str, ep: int, stage: int, tp: int
) -> None:
    """Transformers' test_matches_single_process_reference has 1e-4 and 1e-3, with ep 2 and tp 2 x ep 4."""
    wanted, whole = plain[kind]
    found = four.run(4, program, str(folders[kind]), str(tmp_path), divided(ep, stage, tp), 4 // tp)
    assert len(wanted) == STEPS and all(each == found[0] for each in found)
    for (loss, norm), (one_loss, one_norm) in zip(found[0], wanted, strict=True):
        assert loss == pytest.approx(one_loss, abs=1e-6)
        assert norm == pytest.approx(one_norm, rel=1e-6)
    weights, one = weights_of(tmp_path / "model"), weights_of(whole)
    assert weights.keys() == one.keys()
    for name, value in one.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize(("kind", "ep", "stage"), [(MIXTRAL, 4, 3), (QWEN, 2, 1)])
def test_trainer_goes_on_from_what_it_saved(
    four: Pool, folders: dict[str, Path], tmp_path: Path, kind: str, ep: int, stage: int
) -> None:
    """Bit for bit, with the same ranks; and with other ones, or none, that have experts."""
    folder, json = str(folders[kind]), divided(ep, stage)
    through = four.run(4, program, folder, str(tmp_path / "a"), json, 4, **SAVING)[0]
    kept = tmp_path / "a" / "trainer" / "checkpoint-2"
    resumed = four.run(4, program, folder, str(tmp_path / "b"), json, 4, str(kept), **SAVING)[0]
    assert resumed == through
    first, again = (weights_of(tmp_path / each / "model") for each in "ab")
    assert all(torch.equal(again[name], value) for name, value in first.items())
    assert first.keys() == weights_of(kept).keys()
    for ranks, other in (4, divided(6 - ep, stage)), (1, settings(1)):
        whole = four.run(ranks, program, folder, str(tmp_path / "c"), other, ranks, str(kept), **SAVING)[0]
        assert len(whole) == STEPS
        for (loss, norm), (one_loss, one_norm) in zip(whole, through, strict=True):
            assert loss == pytest.approx(one_loss, abs=1e-6) and norm == pytest.approx(one_norm, rel=1e-6)


@pytest.mark.parametrize(("kind", "ep", "stage"), [(MIXTRAL, 4, 2), (QWEN, 2, 3), (QWEN, 4, 1)])
def test_trl_trains_as_one_plain_process(
    four: Pool, folders: dict[str, Path], tmp_path: Path, kind: str, ep: int, stage: int
) -> None:
    """Its own script, with SFTTrainer."""
    script = Path(importlib.util.find_spec("trl").origin).parent / "scripts" / "sft.py"
    write_rows(tmp_path / "data", "sft")
    config = tmp_path / "zero.json"
    config.write_text(json.dumps(divided(ep, stage)))
    logs = []
    for world, place in (1, {"use_cpu": "True"}), (4, {"deepspeed": config}):
        out = tmp_path / str(world)
        given = {"model_name_or_path": folders[kind], "dataset_name": tmp_path / "data", "output_dir": out, **place}
        steps = {"gradient_accumulation_steps": 4 // world, "eval_strategy": "no"}
        steps |= {"per_device_train_batch_size": 2, "optim": "sgd"}  # Adam makes steps of what is rounded
        four.run(world, run_script, str(script), *words({**given, **TRL, **steps}))
        logs.append([entry for entry in logged(out) if "loss" in entry])
    for entry, one in zip(logs[1], logs[0], strict=True):
        assert entry["loss"] == pytest.approx(one["loss"], abs=1e-6)
        assert entry["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-6)
    assert len(logs[0]) == STEPS and weights_of(tmp_path / "4").keys() == weights_of(tmp_path / "1").keys()


def accelerated(folder: str, config: dict[str, Any] | None, state: str | None) -> tuple[list[float], dict[str, Any]]:
    """A loop of Accelerate over 4 steps, of which the last two again from what was saved; losses and weights."""
    with opened():
        from accelerate import Accelerator, DeepSpeedPlugin
        from transformers import AutoModelForCausalLM

        plugin = None if config is None else DeepSpeedPlugin(hf_ds_config=config)
        accelerator = Accelerator(deepspeed_plugin=plugin, cpu=plugin is None)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        loader = DataLoader(rows(), batch_size=BATCH // accelerator.num_processes)
        model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
        losses = list[float]()
        batches = list(loader)
        for number in (0, 1, 2, 3, 2, 3) if state else range(STEPS):
            if state and number == 2:
                (accelerator.save_state if len(losses) == 2 else accelerator.load_state)(state)
            loss = model(**batches[number]).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach()).mean().item())
        weights = accelerator.get_state_dict(model)
        accelerator.free_memory()
        return losses, {name: value.clone() for name, value in (weights or {}).items()}


@pytest.mark.parametrize(("kind", "ep", "stage"), [(MIXTRAL, 2, 3), (MIXTRAL, 4, 0), (QWEN, 2, 2)])
def test_a_loop_of_accelerate(
    four: Pool, folders: dict[str, Path], tmp_path: Path, kind: str, ep: int, stage: int
) -> None:
    folder = str(folders[kind])
    losses, weights = four.run(1, accelerated, folder, None, None)[0]
    config = divided(ep, stage) | {"train_micro_batch_size_per_gpu": 2}
    (found, whole), *others = four.run(4, accelerated, folder, config, str(tmp_path))
    assert found[:STEPS] == pytest.approx(losses, abs=1e-6) and found[STEPS:] == found[2:STEPS]
    assert whole.keys() == weights.keys() and not any(each for _, each in others)
    for name, value in weights.items():
        torch.testing.assert_close(whole[name], value, rtol=1e-5, atol=1e-6)
