"""The programs of `make programs`: how each is started, what it trains on, and what its runs leave."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_cases import (
    GRPO,
    KEPT,
    STEPS,
    TIMES,
    TRL,
    logged,
    without,
    words,
)
from program_data import (
    BERT,
    DISTILBERT,
    write_chats,
    write_letters,
    write_scores,
    write_sums,
    write_text,
    write_trl,
    write_wikitext,
)
from safetensors.torch import load_file

Weights = dict[str, torch.Tensor]
Log = list[dict[str, Any]]


@dataclass(frozen=True)
class Program:
    """One program and how its runs are judged.

    In words, {data}, {out} and {config} are paths, of what `make` has written, of the run's own folder and of a file
    with the JSON of docs/huggingface.md; {stage} is a number; in those of a resume {first} is the folder of the run
    that went on. `log` and `load` are given a run's folder: its entries by step, without times, and the weights of what
    it has saved by plain torch or Transformers. `checkpoint` is the folder with zero's index, None where it saves none;
    its * stands for a name that the program makes up.
    """

    script: str  # below FOLDER, or below the installed packages
    words: list[str]
    make: Callable[[Path], None]
    load: Callable[[Path], Weights] | None
    # Empty where it saves checkpoints, but has no way to begin from one.
    resume: list[str] = field(default_factory=lambda: ["--resume_from_checkpoint", f"{{first}}/checkpoint-{KEPT}"])
    checkpoint: str | None = "checkpoint-{step}/global_step{step}"
    log: Callable[[Path], Log] = logged
    # False where plain runs draw other masks, or an order of data, after a resume: then resumes of stages are compared.
    exact: bool = True
    stages: tuple[int, ...] = (0, 2, 3)
    steps: tuple[int, int] = (KEPT, STEPS)  # after which it saves
    # True where a resume goes on in the folder that it reads, from its `latest`, and logs its own steps only: it gets a
    # copy of that folder, as it was after the first save; {again} is its path.
    in_place: bool = False
    packages: int = 0  # how many folders above its own are the packages that it imports
    dtype: str = "fp32"  # of what it computes with, and saves
    accelerate: bool = False  # True: started as by `accelerate launch --use_deepspeed`, which gives no --local_rank


def printed(folder: Path) -> Log:
    """Losses, scores and accuracies that a program prints, in their order."""
    text = folder.with_name(f"{folder.name}.log").read_text()
    number = r"(?: *:)? +(-?\d[\w.-]*|nan|inf)"
    found = re.findall(f"([lL]oss|Accuracy of [^:]*?|chosen_last_scores [^:]*?){number}", text)
    return [{name.lower(): float(value)} for name, value in found]


def of_epochs(folder: Path) -> Log:
    """What Accelerate's examples print at the ends of epochs, accuracies or losses."""
    text = folder.with_name(f"{folder.name}.log").read_text()
    return [{name: float(value)} for name, value in re.findall(r"epoch \d+: .*?(accuracy|loss)'?: ([\d.]+)", text)]


def into_bert(folder: Path) -> Weights:
    """What the script beside the last checkpoint writes, as Transformers' model of it takes it."""
    import transformers

    (script,) = folder.glob("epoch_2/zero_to_fp32.py")
    subprocess.run([sys.executable, script, script.parent, folder / "fp32.safetensors"], check=True)
    cached = folder.parent / "data/hub/hub" / f"models--{BERT}"
    model = transformers.AutoModelForSequenceClassification.from_pretrained(next(cached.glob("snapshots/*")))
    model.load_state_dict(load_file(folder / "fp32.safetensors"))
    return model.state_dict()


def on_the_board(folder: Path) -> Log:
    """By step what a run has written for TensorBoard."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (file,) = folder.rglob("events.out.tfevents.*")
    board = EventAccumulator(str(file)).Reload()
    steps: dict[int, dict[str, Any]] = {}
    for tag in board.Tags()["scalars"]:
        for event in board.Scalars(tag):
            steps.setdefault(event.step, {"step": event.step})[tag] = event.value
    return [steps[step] for step in sorted(steps)]


def of_means(folder: Path) -> Log:
    """The losses of which a program logs the mean since its start; they are bf16, so rounding has the whole of them."""
    means = [entry["Train/loss"] for entry in on_the_board(folder)]
    sums = [0.0, *(mean * number for number, mean in enumerate(means, 1))]
    return [{"loss": round(after - before, 4)} for before, after in itertools.pairwise(sums)]


def logged_by_trl(folder: Path) -> Log:
    """The same as `logged` but for TRL's count of tokens, which is in no checkpoint of SFT and DPO."""
    return [without(entry, ["num_tokens"]) for entry in logged(folder)]


def evaluated(folder: Path) -> Log:
    """`logged`, and the evaluation at the end."""
    return [*logged(folder), without(json.loads((folder / "eval_results.json").read_text()), TIMES)]


def from_pretrained(kind: str, folder: Path) -> Weights:
    """The weights of a saved model as Transformers loads it without zero; ValueError where it misses some."""
    import transformers

    model, found = getattr(transformers, kind).from_pretrained(folder, output_loading_info=True)
    if found["missing_keys"] or found["unexpected_keys"]:
        raise ValueError(f"from_pretrained: {found}")
    return model.state_dict()


def by_sentence_transformers(kind: str, folder: Path) -> Weights:
    """The weights of what a program of that library has saved at its end."""
    import sentence_transformers

    # Its name has the time, so ranks may have two; the weights are in that of rank 0.
    (saved,) = folder.glob("output/*/final/model.safetensors")
    return getattr(sentence_transformers, kind)(str(saved.parent)).state_dict()


def by_its_script(folder: Path) -> Weights:
    """What the script beside a checkpoint writes; ValueError where Transformers' encoder does not take its part."""
    import transformers

    (script,) = folder.glob("*/zero_to_fp32.py")
    subprocess.run([sys.executable, script, script.parent, folder / "fp32.safetensors"], check=True)
    weights = load_file(folder / "fp32.safetensors")
    model = transformers.RobertaModel(transformers.RobertaConfig(**_ROBERTA))
    model.load_state_dict({name[8:]: value for name, value in weights.items() if name.startswith("encoder.")})
    return {**weights, **{f"encoder.{name}": value for name, value in model.state_dict().items()}}


_EXAMPLES = "transformers/examples/pytorch"
_CAUSAL = partial(from_pretrained, "AutoModelForCausalLM")
_MODEL = {"model_name_or_path": "{data}/model", "output_dir": "{out}", "deepspeed": "{config}"}
_TRAINER = {
    **{key: value for key, value in TRL.items() if key not in ("dtype", "bf16", "gradient_checkpointing")},
    "do_train": "True",
}
_EVALUATED = {**_MODEL, "model_name_or_path": BERT, **_TRAINER, "do_eval": "True", "max_eval_samples": 16}
_ROBERTA = {  # the sizes that train_bert_ds.py has in its code, and those of _HELLO
    "vocab_size": 50265,
    "max_position_embeddings": 514,
    "type_vocab_size": 1,
    "hidden_size": 128,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
_HELLO = {  # no randomness: it keeps none in its checkpoints
    "h_dim": 128,
    "ff_dim": 64,
    "num_layers": 2,
    "num_heads": 2,
    "dropout": 0.0,
    "mask_prob": 1.0,
    "random_replace_prob": 0.0,
    "unmask_replace_prob": 0.0,
    "batch_size": 2,
    "num_iterations": 9,
    "checkpoint_every": 4,
    "log_every": 1,
}
_OPENRLHF = {
    "model.model_name_or_path": "{data}/model",
    "data.dataset": "{data}/rows.jsonl",
    "data.output_key": "output",
    "data.input_template": "",
    "data.max_samples": 8 * STEPS,
    "ds.zero_stage": "{stage}",
    "ds.attn_implementation": "sdpa",
    "train.max_epochs": 1,
    "train.batch_size": 8,
    "train.micro_batch_size": 4,
    "adam.lr": 1e-2,
    "max_norm": 0.1,
    "ckpt.save_steps": KEPT,
    "ckpt.path": "{out}/checkpoints",
    "ckpt.output_dir": "{out}/model",
    "logger.tensorboard_dir": "{out}/board",
}
_CHAT = {
    "model_name_or_path": "{data}/model",
    "data_path": "{data}/Dahoas/rm-static",
    "data_output_path": "{out}/data",
    "data_split": "0,1,0",
    "output_dir": "{out}/model",
    "zero_stage": "{stage}",
    "dtype": "bf16",
    "per_device_train_batch_size": 8,
    "per_device_eval_batch_size": 4,
    "num_train_epochs": 2,
    "max_seq_len": 16,
    "learning_rate": 1e-2,
}


_PPO = {
    **{key: _CHAT[key] for key in ("data_path", "data_output_path", "output_dir", "dtype")},
    **{f"{who}_zero_stage": "{stage}" for who in ("actor", "critic")},
    **{f"{who}_learning_rate": 1e-3 for who in ("actor", "critic")},
    "actor_model_name_or_path": "{data}/model",
    "critic_model_name_or_path": "{data}/critic",
    "per_device_generation_batch_size": 4,
    "per_device_training_batch_size": 4,
    "max_prompt_seq_len": 8,
    "max_answer_seq_len": 8,
    "data_split": "0,0,1",
    "seed": 1234,
}


def chat(step: str, load: Callable[[Path], Weights], options: dict[str, Any], *stages: int) -> Program:
    """One of DeepSpeed-Chat's programs, which save a model at the end, and no checkpoint to resume from."""
    return Program(
        f"DeepSpeedExamples/applications/DeepSpeed-Chat/training/{step}/main.py",
        words(options),
        write_chats,
        lambda folder: load(folder / "model"),
        checkpoint=None,
        log=printed,
        stages=stages,
        packages=2,
        dtype="bf16",
    )


def of_torch(folder: Path) -> Weights:
    """What torch loads."""
    return torch.load(folder / "pytorch_model.bin", weights_only=True)


def accelerated(
    name: str, options: dict[str, Any], load: Callable[[Path], Weights] | None = None, saved: str = "", **more: Any
) -> Program:
    """One of Accelerate's examples: most save nothing; with `saved`, it is resumed from epoch_`saved`."""
    checkpoint = "epoch_{step}/pytorch_model" if saved else None
    more = {"make": write_letters, "checkpoint": checkpoint, "stages": (2, 3), **more}
    return Program(
        f"accelerate/examples/{name}",
        words(options),
        load=load,
        resume=words({"resume_from_checkpoint": f"{{first}}/epoch_{saved}"}),
        log=of_epochs,
        exact=False,
        accelerate=True,
        **more,
    )


PROGRAMS = {
    "run_clm.py": Program(
        f"{_EXAMPLES}/language-modeling/run_clm.py",
        words({**_MODEL, **_TRAINER, "train_file": "{data}/text.txt", "block_size": 32}),
        write_text,
        _CAUSAL,
        stages=(0, 1, 2, 3),
    ),
    "run_mlm.py": Program(
        f"{_EXAMPLES}/language-modeling/run_mlm.py",
        words({**_EVALUATED, "train_file": "{data}/text.txt", "max_seq_length": 32}),
        write_letters,
        partial(from_pretrained, "AutoModelForMaskedLM"),
        log=evaluated,
        exact=False,
    ),
    "run_glue.py": Program(
        f"{_EXAMPLES}/text-classification/run_glue.py",
        words({**_EVALUATED, **dict.fromkeys(("train_file", "validation_file"), "{data}/pairs.json")}),
        write_letters,
        partial(from_pretrained, "AutoModelForSequenceClassification"),
        log=evaluated,
    ),
    **{
        f"{name}.py": Program(
            f"trl/scripts/{name}.py",
            words({**_MODEL, **TRL, "dataset_name": "{data}/rows", **more}),
            partial(write_trl, name),
            _CAUSAL,
            log=logged_by_trl,
        )
        for name, more in (("sft", {}), ("dpo", {}), ("grpo", GRPO))
    },
    "dpo-precomputed": Program(
        "trl/scripts/dpo.py",
        words({**_MODEL, **TRL, "dataset_name": "{data}/rows", "precompute_ref_log_probs": "True"}),
        partial(write_trl, "dpo"),
        _CAUSAL,
        log=logged_by_trl,
    ),
    "nlp_example.py": accelerated("nlp_example.py", {}),
    **{
        f"{name}.py": accelerated(f"by_feature/{name}.py", {})
        for name in (
            "automatic_gradient_accumulation",
            "cross_validation",
            "ddp_comm_hook",
            "memory",
            "multi_process_metrics",
            "profiler",
        )
    },
    "gradient_accumulation.py": accelerated("by_feature/gradient_accumulation.py", {"gradient_accumulation_steps": 2}),
    **{
        Path(name).name: accelerated(
            name, {"checkpointing_steps": "epoch", "output_dir": "{out}"}, into_bert, "1", steps=(1, 2)
        )
        for name in ("complete_nlp_example.py", "by_feature/checkpointing.py")
    },
    **{
        name: accelerated(
            "by_feature/deepspeed_with_config_support.py",
            {
                "train_file": "{data}/text.txt",
                "model_name_or_path": "{data}/model",
                "output_dir": "{out}",
                "block_size": 32,
                "per_device_train_batch_size": 16,
                "learning_rate": 1e-2,
                "num_train_epochs": 2,
                "seed": 1,
                "checkpointing_steps": "epoch",
            },
            _CAUSAL,
            "0",
            make=write_text,
            stages=(stage,),  # at 3 Transformers draws as in DeepSpeed-Chat-2-cut, and the order of data is another
            steps=(0, 1),
        )
        for name, stage in (("deepspeed_with_config_support.py", 2), ("deepspeed_with_config_support-cut", 3))
    },
    **{
        name: Program(
            f"sentence-transformers/examples/{folder}/training/sts/training_stsbenchmark.py",
            given,
            partial(write_scores, pairs),
            partial(by_sentence_transformers, kind),
            resume=[],
            checkpoint="output/*/checkpoint-{step}/global_step{step}",
            log=partial(logged, where=f"output/*/checkpoint-{steps[1]}"),
            stages=(2, 3),
            steps=steps,
            dtype=dtype,
            accelerate=True,
        )
        for name, folder, kind, given, pairs, steps, dtype in (
            ("sts", "sentence_transformer", "SentenceTransformer", [DISTILBERT], 1600, (100, 200), "fp16"),
            ("sts-cross", "cross_encoder", "CrossEncoder", [], 3200, (80, 100), "bf16"),
        )
    },
    "cifar10_deepspeed.py": Program(
        "DeepSpeedExamples/training/cifar/cifar10_deepspeed.py",
        words({"epochs": 4, "log-interval": 1, "dtype": "fp32", "stage": "{stage}"}),
        lambda data: None,
        None,
        checkpoint=None,
        log=printed,
    ),
    "DeepSpeed-Chat-1": chat("step1_supervised_finetuning", _CAUSAL, {**_CHAT, "data_split": "1,0,0"}, 0, 2, 3),
    "DeepSpeed-Chat-2": chat("step2_reward_model_finetuning", of_torch, _CHAT, 0, 2),
    # With another head: before it is drawn, Transformers draws embeddings at stage 3 that it does not elsewhere.
    "DeepSpeed-Chat-2-cut": chat("step2_reward_model_finetuning", of_torch, _CHAT, 3),
    "DeepSpeed-Chat-2-dpo": chat("step2_dpo_finetuning", _CAUSAL, _CHAT, 0, 2, 3),
    "DeepSpeed-Chat-3": chat("step3_rlhf_finetuning", lambda folder: _CAUSAL(folder / "actor"), _PPO, 0, 2, 3),
    "train_bert_ds.py": Program(
        "DeepSpeedExamples/training/HelloDeepSpeed/train_bert_ds.py",
        words({"checkpoint_dir": "{out}", "tokenizer": "{data}/tokenizer", **_HELLO}),
        write_wikitext,
        by_its_script,
        resume=words({"checkpoint_dir": "None", "load_checkpoint_dir": "{again}"}),
        checkpoint="bert_pretrain.*/global_step{step}",
        log=of_means,
        stages=(1,),  # it is in its code
        steps=(4, 8),
        in_place=True,
    ),
    "train_sft.py": Program(
        "OpenRLHF/openrlhf/cli/train_sft.py",
        words(_OPENRLHF),
        write_sums,
        lambda folder: _CAUSAL(folder / "model"),
        resume=["--ckpt.load_enable"],
        checkpoint="checkpoints/global_step{step}",
        log=on_the_board,
        stages=(0, 2),  # at 3 its change of Transformers' loading wants 5.15, which returns what is a generator in 5.23
        in_place=True,
        packages=2,
        dtype="bf16",
    ),
}
