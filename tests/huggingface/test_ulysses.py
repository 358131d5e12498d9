"""The promise: ranks that share sequences by DeepSpeed's names train as one plain process does.

Programs of Accelerate, Transformers and TRL ask for it by ParallelismConfig(sp_size=...), and stay as they are.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_cases import TIMES, _trained, opened, settings, without
from ranks import Pool, RankError, said_by
from transformer_models import tiny

import zero
from zero.compat.ulysses import UlyssesSPAttentionHF, UlyssesSPDataLoaderAdapter, cut_batch
from zero.utils import safe_get_full_fp32_param

LONG = pytest.mark.long
LLAMA = "hf-internal-testing/tiny-random-LlamaForCausalLM"
SIZES = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}


def batches() -> list[dict[str, Any]]:
    """Documents in a row of odd length, as TRL tells them; padding on the left; a half without labels; a plain one."""
    draw = torch.Generator().manual_seed(0)
    ids = [torch.randint(1, 32, shape, generator=draw) for shape in ((1, 15), (2, 12), (2, 16), (1, 8))]
    positions = torch.cat([torch.arange(size) for size in (4, 9, 2)])[None]
    packed = {"input_ids": ids[0], "labels": ids[0].masked_fill(positions == 0, -100), "position_ids": positions}
    told = {"cu_seq_lens_q": torch.tensor([0, 4, 13, 15]), "max_length_q": 9, "seq_idx": torch.zeros(1, 15)}
    mask = torch.ones(2, 12, dtype=torch.int64)
    mask[0, :7] = 0
    padded = {"input_ids": ids[1], "labels": ids[1].masked_fill(mask == 0, -100), "attention_mask": mask}
    padded["labels"][0, 7] = -100  # nobody's promise: what padding predicts
    halves = torch.cat([ids[2][:, :7], torch.full((2, 9), -100)], 1)
    return [packed | told, padded, {"input_ids": ids[2], "labels": halves}, {"input_ids": ids[3], "labels": ids[3]}]


def llama() -> Any:
    return tiny("LlamaForCausalLM", 0, **SIZES, **HEADS)


def loss_of_all(engine: Any, batch: dict[str, Any], group: Any) -> torch.Tensor:
    """As Accelerate's example adds it up: the backward of its all-gather adds up the gradients of all ranks.

    Over gloo it takes places in a group for ranks of the world, so pairs of ranks add up by other means here.
    """
    from torch.distributed.nn.functional import all_gather

    logits, targets = engine(**batch).logits, batch["shift_labels"]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    if group is torch.distributed.group.WORLD:
        return sum(all_gather(loss, group=group)) / sum(all_gather((targets != -100).sum(), group=group))
    whole = torch.stack([loss.detach(), (targets != -100).sum()])
    torch.distributed.all_reduce(whole, group=group)
    return (whole[0] + (loss - loss.detach()) * 2) / whole[1]


def config_of(number: int, mode: str = "ulysses") -> dict[str, Any]:
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": number}, "gradient_clipping": 0}
    return config | {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "zero": {"context": {"mode": mode}}}


def stepped(engine: Any, loader: Any, group: Any, epochs: int) -> tuple[list[float], dict[str, list[float]]]:
    """Losses, and the weights after a step of SGD for each batch."""
    losses = []
    for _ in range(epochs):
        for batch in loader:
            losses.append(loss_of_all(engine, batch, group))
            engine.backward(losses[-1])
            engine.step()
    weights = {name: safe_get_full_fp32_param(each).tolist() for name, each in engine.module.named_parameters()}
    return [each.item() for each in losses], weights


def shared_steps(number: int, mode: str) -> tuple[list[float], dict[str, list[float]]]:
    """By DeepSpeed's names, two epochs; each of two ranks reads every second batch."""
    with opened():
        import deepspeed
        from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF, UlyssesSPDataLoaderAdapter
        from deepspeed.utils import groups

        mpu, model = UlyssesSPAttentionHF.register_with_transformers("a model", "sdpa", 2, 1), llama()
        engine, *_ = deepspeed.initialize(model=model, config=config_of(number, mode), mpu=mpu)
        rank, group = groups._get_sequence_parallel_rank(), groups._get_sequence_parallel_group()
        assert groups._get_sequence_parallel_world_size() == 2
        loader = UlyssesSPDataLoaderAdapter(batches()[rank::2], rank, group, 2, engine.device)
        assert len(loader) == 4
        return stepped(engine, loader, group, 2)


def two_pairs(number: int) -> tuple[list[float], dict[str, list[float]]]:
    """By zero's own; four ranks have a batch each, and two share it."""
    mpu = UlyssesSPAttentionHF.register_with_transformers("a model", None, 2, 1)
    engine, *_ = zero.initialize(model=llama(), config=config_of(number), mpu=mpu)
    rank, group = mpu.get_sequence_parallel_rank(), mpu.get_sequence_parallel_group()
    own = [batches()[torch.distributed.get_rank()]]
    return stepped(engine, UlyssesSPDataLoaderAdapter(own, rank, group, 2, engine.device), group, 1)


def plain_steps(groups: list[list[dict[str, Any]]]) -> tuple[list[float], Any]:
    """Losses of one plain process, and its model after a step for the mean of each group of batches."""
    model = llama()
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.1), []
    for group in groups:
        for batch in group:
            batch = {key: value for key, value in batch.items() if not key.startswith(("cu_", "max_", "seq_"))}
            loss = model(**batch, use_cache=False).loss / len(group)
            loss.backward()
            losses.append(loss.item() * len(group))
        optimizer.step()
        optimizer.zero_grad()
    return losses, model


@pytest.mark.parametrize(
    ("number", "mode"), [(3, "ulysses"), pytest.param(2, "ulysses", marks=LONG), pytest.param(3, "ring", marks=LONG)]
)
def test_losses_and_weights_are_those_of_one_plain_process(door: Pool, number: int, mode: str) -> None:
    losses, model = plain_steps([[batch] for batch in batches() * 2])
    found, weights = door.run(2, shared_steps, number, mode)[0]
    assert found == pytest.approx(losses, rel=1e-5)
    for name, each in model.named_parameters():
        torch.testing.assert_close(torch.tensor(weights[name]), each.detach(), rtol=1e-5, atol=1e-6)


@LONG
@pytest.mark.parametrize("number", [1, 3])
def test_gradients_are_the_mean_over_pairs_of_ranks(pool: Pool, number: int) -> None:
    first, second, third, fourth = batches()
    losses, model = plain_steps([[first, third], [second, fourth]])
    (here, weights), _, (there, _), _ = pool.run(4, two_pairs, number)
    assert [here[0], there[0], here[1], there[1]] == pytest.approx(losses, rel=1e-5)
    for name, each in model.named_parameters():
        torch.testing.assert_close(torch.tensor(weights[name]), each.detach(), rtol=1e-5, atol=1e-6)


def evaluated(disable: bool) -> torch.Tensor:
    """Logits in eval: of this rank's own batch, or of its piece of one."""
    with opened():
        import deepspeed
        from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

        mpu = UlyssesSPAttentionHF.register_with_transformers("a model", None, 2, 1, disable_in_eval=disable)
        config = {"train_micro_batch_size_per_gpu": 1}
        engine, *_ = deepspeed.initialize(model=llama(), config=config, mpu=mpu)
        rank = torch.distributed.get_rank()
        batch = batches()[2 + rank] if disable else cut_batch(batches()[2], 2)[rank]
        with torch.no_grad():
            return engine.eval()(**{key: batch[key] for key in batch if "label" not in key}).logits


def test_in_eval_ranks_have_batches_of_their_own_or_pieces(door: Pool) -> None:
    own = [llama()(input_ids=batch["input_ids"]).logits.detach() for batch in batches()[2:]]
    for rank, found in enumerate(door.run(2, evaluated, True)):
        torch.testing.assert_close(found, own[rank])
    torch.testing.assert_close(torch.cat(door.run(2, evaluated, False), 1), own[0])


# --- the loader ------------------------------------------------------------------------------------------------------


def test_a_batch_is_cut_into_pieces_of_the_whole() -> None:
    ids = torch.arange(10, 15)[None]
    more = {"weights": torch.ones(1, 5, 2), "rows": torch.tensor([7]), "name": "a"}
    first, second = cut_batch({"input_ids": ids, "labels": ids, **more}, 2)
    assert first.keys() == second.keys() == {"input_ids", "position_ids", "shift_labels", "weights", "rows", "name"}
    assert (first["input_ids"].tolist(), second["input_ids"].tolist()) == ([[10, 11, 12]], [[13, 14, 0]])
    assert (first["position_ids"].tolist(), second["position_ids"].tolist()) == ([[0, 1, 2]], [[3, 4, 0]])
    assert (first["shift_labels"].tolist(), second["shift_labels"].tolist()) == ([[11, 12, 13]], [[14, -100, -100]])
    assert (second["weights"].tolist(), second["rows"].tolist(), second["name"]) == (
        [[[1, 1], [1, 1], [0, 0]]],
        [7],
        "a",
    )


def dealt(wrong: dict[str, Any]) -> list[Any]:
    """Sums of what comes in two epochs where this rank has two batches, or one more than the other; then an error."""
    rank = torch.distributed.get_rank()
    mpu = UlyssesSPAttentionHF.register_with_transformers("a model", None, 2, 1)
    ends = mpu.get_sequence_parallel_rank(), mpu.get_sequence_parallel_group(), 2, torch.device("cpu")
    found = []
    for count in 2, 2 + rank:
        own = [{"input_ids": torch.full((1, 4), 10 * rank + number)} for number in range(count)]
        loader = UlyssesSPDataLoaderAdapter(own, *ends)
        found += [[int(piece["input_ids"].sum()) for piece in loader] for _ in range(2)]
    bad = UlyssesSPDataLoaderAdapter([wrong if rank else own[0]], *ends)
    return [*found, said_by(lambda: list(bad))]


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (
            {"input_ids": torch.ones(1, 4), "cu_seq_lens_q": 1},
            "got cu_seq_lens_q without position_ids, which tell docu",
        ),
        (
            {"input_ids": torch.ones(1, 4), "labels": torch.ones(1, 3)},
            "labels: got the shape (1, 3) beside input_ids of",
        ),
        ((1, 2), "got a tuple; wanted a mapping with input_ids [rows, length]"),
    ],
)
def test_batches_of_all_ranks_come_in_turn_and_what_is_wrong_with_one_all_are_told(pool: Pool, wrong, text) -> None:
    for *found, said in pool.run(2, dealt, wrong):
        assert found == [[0, 20, 2, 22]] * 2 + [[0, 20, 2, 22, 24]] * 2
        assert said.startswith(f"ValueError: the batch of rank 1: {text}")


def refused() -> list[str]:
    register = UlyssesSPAttentionHF.register_with_transformers
    model = llama()
    said = [said_by(lambda: register(model, "flash_attention_2", 2, 1)), said_by(lambda: register(model, "sdpa", 3, 1))]
    model.loss_type = "ForMaskedLM"
    return [*said, said_by(lambda: register(model, "sdpa", 2, 1)), said_by(lambda: register(model, "sdpa", 1, 1))]


def test_what_does_not_fit_is_refused(pool: Pool) -> None:
    other, sizes, loss, alone = pool.run(2, refused)[0]
    assert "'flash_attention_2' does not match model config attn_implementation='sdpa'" in other
    assert "GridError: cp 3 = 3 does not divide the 2 ranks there are" in sizes
    assert "got a model with the loss 'ForMaskedLM'" in loss
    assert alone == "nothing"


# --- programs --------------------------------------------------------------------------------------------------------


def accumulated() -> tuple[int, int]:
    """Steps of Accelerate's loop over 3 batches of each of 2 ranks, 4 to a step; and the micro-batches that were."""
    with opened():
        from accelerate import Accelerator, DeepSpeedPlugin
        from accelerate.utils import ParallelismConfig

        plugin = DeepSpeedPlugin(hf_ds_config=settings(2) | {"gradient_accumulation_steps": 4})
        shared = ParallelismConfig(sp_backend="deepspeed", sp_size=2)
        accelerator = Accelerator(deepspeed_plugin=plugin, parallelism_config=shared)
        rows = [{"input_ids": torch.full((8,), number)} for number in range(6)]
        model = llama()
        optimizer, loader = torch.optim.SGD(model.parameters()), torch.utils.data.DataLoader(rows, batch_size=1)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        count = 0
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).logits.sum())
                optimizer.step()
                optimizer.zero_grad()
            count += 1
        accelerator.free_memory()
        return model.global_steps, count


@LONG
def test_accelerate_steps_at_the_end_of_the_loader_and_not_before(door: Pool) -> None:
    assert door.run(2, accumulated) == [(2, 6)] * 2


@LONG
@pytest.mark.parametrize("number", [2, 3])
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_accelerates_own_script_has_the_losses_of_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, precision: str
) -> None:
    """What its tests/deepspeed/test_alst_ulysses_sp.py starts, with bf16; here it prints more digits."""
    import accelerate.test_utils

    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "suites"))
    import hub

    script = Path(accelerate.test_utils.__file__).parent / "scripts/external_deps/test_ds_alst_ulysses_sp.py"
    hub.make(tmp_path, [LLAMA])
    start = tmp_path / "start.py"
    text = f"import runpy, time, torch\ntorch.set_printoptions(precision=9)\nrunpy.run_path({str(script)!r})\n"
    # torch.distributed.nn's functions keep the process group in their defaults, and so gloo's threads: one that drops
    # tensors of the last scatter after the interpreter has ended would abort the process.
    start.write_text(text + "time.sleep(1)\n")
    words = ["--num_processes=2", "--num_machines=1", "--machine_rank=0", "--use_deepspeed", f"--zero_stage={number}"]
    command = ["-m", "zero.as_deepspeed", "-m", "accelerate.commands.launch", *words, f"--mixed_precision={precision}"]
    more = {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command, str(start)], env=os.environ | more, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = [float(each) for each in re.findall(r"loss=tensor\((.+?),", done.stdout)]

    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(next(tmp_path.glob("hub/*/snapshots/*")))
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=1e-5), []
    positions = torch.arange(4 * 32).view(4, 1, 32)
    for each in positions:
        loss = model(input_ids=each + 101, position_ids=each, labels=each + 101).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert found == pytest.approx(losses, rel=1e-5 if precision == "no" else 1e-2)


def shared(model: str, out: str, config: Any, size: int, resume: str | None = None, **more: Any) -> Any:
    """As `trained`, with so many ranks to a sequence; 0: without a word of it."""
    with opened():
        from accelerate.utils import ParallelismConfig

        if size:
            more["parallelism_config"] = ParallelismConfig(sp_backend="deepspeed", sp_size=size)
        return _trained(model, out, config, resume, {"attention_dropout": 0.0, **more})


@LONG
@pytest.mark.parametrize("number", [2, 3])
def test_trainer_has_the_losses_of_one_process_and_resumes(door: Pool, tiny: Path, tmp_path: Path, number: int) -> None:
    """In the middle of its second epoch, bit for bit."""
    usual = {"max_steps": 12, "per_device_train_batch_size": 8}
    saving = {"save_strategy": "steps", "save_steps": 10, **usual}
    losses, sums, _ = door.run(1, shared, str(tiny), str(tmp_path), None, 0, **usual)[0]
    through = door.run(2, shared, str(tiny), f"{tmp_path}/a", settings(number), 2, **saving)[0]
    assert through[0] == pytest.approx(losses, rel=1e-5, abs=0)
    for name, digests in sums.items():
        assert through[1][name] == pytest.approx(digests, rel=1e-4, abs=1e-4)
    kept = f"{tmp_path}/a/checkpoint-10"
    assert door.run(2, shared, str(tiny), f"{tmp_path}/b", settings(number), 2, kept, **saving)[0] == through


@LONG
def test_trainer_that_knows_nothing_of_it_is_told_what_to_say(door: Pool, tiny: Path, tmp_path: Path) -> None:
    """It gives ranks different samples, and counts those of all."""
    config = settings(2) | {"sequence_parallel_size": 2}
    with pytest.raises(
        RankError, match=r"ranks share sequences, which Accelerate is told by ParallelismConfig\(sp_size="
    ):
        door.run(2, shared, str(tiny), str(tmp_path), config, 0)
    del config["train_batch_size"]
    with pytest.raises(
        RankError, match=r"1 were given another batch than 0.*or Accelerate's ParallelismConfig\(sp_size"
    ):
        door.run(2, shared, str(tiny), str(tmp_path), config, 0)


def tuned(name: str, out: str, config: dict[str, Any] | None) -> tuple[list[dict[str, Any]], list[float]]:
    """TRL's log of packed documents; and, where it is plain, the losses of the same documents by themselves."""
    with opened():
        from accelerate.utils import ParallelismConfig
        from datasets import Dataset
        from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
        from trl import SFTConfig, SFTTrainer

        place: dict[str, Any] = {"use_cpu": True}
        if config is not None:
            shared = ParallelismConfig(sp_backend="deepspeed", sp_size=2)
            place = {"deepspeed": config, "parallelism_config": shared}
        how = {"packing": True, "max_length": 32, "per_device_train_batch_size": 2, "max_steps": 8, "logging_steps": 1}
        more = {"bf16": False, "gradient_checkpointing": False, "save_strategy": "no", "report_to": []}
        args = SFTConfig(out, **how, **more, **place, learning_rate=1e-2, max_grad_norm=0.5, disable_tqdm=True)
        set_seed(0)
        rows = [{"text": f"{a}+{b}={a + b}"} for a in range(0, 100, 7) for b in range(0, 1000, 37)]
        model, tokenizer = AutoModelForCausalLM.from_pretrained(name), AutoTokenizer.from_pretrained(name)
        trainer = SFTTrainer(model, args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
        alone: list[float] = []
        if config is None:
            model.register_forward_pre_hook(lambda _, __, batch: by_document(model, batch, alone), with_kwargs=True)
        trainer.train()
        log = [without(entry, TIMES) for entry in trainer.state.log_history if "loss" in entry]
        trainer.accelerator.free_memory()
        return log, alone


def by_document(model: Any, batch: dict[str, Any], found: list[float]) -> None:
    """Add the loss of a packed batch whose documents the model sees one by one."""
    if "cu_seq_lens_q" not in batch:
        return
    sizes = batch["cu_seq_lens_q"].diff().tolist()
    parts = zip(*(batch[key].split(sizes, 1) for key in ("input_ids", "labels")), strict=True)
    with torch.no_grad():
        losses = [float(model(input_ids=ids, labels=labels, num_items_in_batch=1).loss) for ids, labels in parts]
    found.append(sum(losses) / int((batch["labels"] != -100).sum()))


@LONG
@pytest.mark.parametrize("number", [2, 3])
def test_packed_documents_of_trl_see_only_themselves(door: Pool, tiny: Path, tmp_path: Path, number: int) -> None:
    plain, alone = door.run(1, tuned, str(tiny), f"{tmp_path}/1", None)[0]
    log, _ = door.run(2, tuned, str(tiny), f"{tmp_path}/2", settings(number))[0]
    assert [entry["loss"] for entry in plain] == pytest.approx(alone, rel=1e-5)
    assert len(log) == 8
    for here, there in zip(log, plain, strict=True):
        assert here == pytest.approx(there, rel=1e-4), (here, there)
        assert here["loss"] == pytest.approx(there["loss"], rel=1e-5)
