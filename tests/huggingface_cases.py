"""What tests of Accelerate, Transformers, PEFT and TRL run on their ranks, as if they were the rank's own script."""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import re
import runpy
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[1] / "docs" / "huggingface.md"
CONFIG = {
    **dict.fromkeys(("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size"), "auto"),
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
}
STEPS, KEPT = 4, 2  # of a program that others wrote, and a checkpoint each KEPT steps
TIMES = ("time", "per_second")
TRL = {  # options of its scripts
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
GRPO = {
    "reward_funcs": "huggingface_cases.length",
    "num_generations": 4,
    "max_completion_length": 4,
    "beta": 0.1,
}


def length(completions: list[str], **more: Any) -> list[float]:
    """The reward that grpo.py takes by its name."""
    return [float(len(each)) for each in completions]


def write_rows(folder: Path, name: str) -> None:
    """What a script of TRL trains on: sums, whole, as pairs, or as questions."""
    sums = [(f"{a}+{b}=", str(a + b)) for a in range(8) for b in range(8)]
    rows: list[dict[str, str]] = [{"prompt": prompt} for prompt, _ in sums]
    if name == "sft":
        rows = [{"text": prompt + answer} for prompt, answer in sums]
    elif name == "dpo":
        rows = [{"prompt": prompt, "chosen": answer, "rejected": answer[::-1] + "0"} for prompt, answer in sums]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train.json").write_text("\n".join(map(json.dumps, rows)))


def words(options: dict[str, Any]) -> list[str]:
    """Of a command line."""
    line: list[str] = []
    for key, value in options.items():
        line += [f"--{key}", *map(str, value if isinstance(value, list) else [value])]
    return line


def logged(folder: Path, where: str = f"checkpoint-{STEPS}") -> list[dict[str, Any]]:
    """By step all that a run of Trainer has logged, but for times."""
    (state,) = folder.glob(f"{where}/trainer_state.json")
    history = json.loads(state.read_text())["log_history"]
    return [without(entry, TIMES) for entry in history]


def without(entry: dict[str, Any], some: Collection[str]) -> dict[str, Any]:
    """Leave out keys that have one of `some` in their name."""
    return {key: value for key, value in entry.items() if not any(part in key for part in some)}


def settings(number: int, **more: Any) -> dict[str, Any]:
    """The JSON of docs/huggingface.md with this stage, and with more keys of `zero_optimization`."""
    section = {"stage": number, "stage3_gather_16bit_weights_on_model_save": True, **more}
    return {**CONFIG, "zero_optimization": section}


def filled(number: int, **more: Any) -> dict[str, Any]:
    """The same for `deepspeed.initialize` itself, for which nobody fills in what is "auto"."""
    return {"train_micro_batch_size_per_gpu": 1, "zero_optimization": settings(number, **more)["zero_optimization"]}


def script(title: str) -> str:
    """The script of one section of docs/huggingface.md."""
    section = PAGE.read_text().split(f"\n## {title}\n")[1].split("\n## ")[0]
    return re.findall(r"```python[^\n]*\n(.*?)```", section, re.DOTALL)[0]


def make_model(folder: Path) -> None:
    """A tiny random language model and its tokenizer, one token for each character of sums, as the page makes it."""
    import torch

    torch.manual_seed(0)
    argv, sys.argv = sys.argv, ["tiny.py", str(folder)]
    try:
        exec(script("A tiny model, offline"), {})
    finally:
        sys.argv = argv


@contextlib.contextmanager
def opened() -> Iterator[None]:
    """The door, and the libraries as in a process that starts, although their ranks have run others before."""
    importlib.import_module("zero.as_deepspeed")  # first, wherever imports are sorted to
    from accelerate.state import AcceleratorState, GradientState
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    before = dict(os.environ)
    argv = sys.argv
    os.environ["MASTER_ADDR"] = "127.0.0.1"  # for Trainer without DeepSpeed, which asks for it
    try:
        yield
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        unset_hf_deepspeed_config()
        os.environ.clear()
        os.environ.update(before)
        sys.argv = argv
        gc.collect()


def run_script(path: str, *words: str) -> None:
    """Run a script with these arguments."""
    with opened():
        sys.argv = [path, *words]
        runpy.run_path(path, run_name="__main__")


def trained(model: str, out: str, config: dict[str, Any] | None, resume: str | None = None, **more: Any) -> Any:
    """Train with Trainer for 10 steps; returns losses by step, then digests of the weights it ends with.

    config: of zero; None for Trainer as it is.
    """
    with opened():
        return _trained(model, out, config, resume, more)


def _trained(name: str, out: str, config: dict[str, Any] | None, resume: str | None, more: dict[str, Any]) -> Any:
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        DataCollatorForLanguageModeling,
        Trainer,
        TrainingArguments,
        set_seed,
    )

    dropout = more.pop("attention_dropout", 0.1)
    usual = {"per_device_train_batch_size": 4, "max_steps": 10, "logging_steps": 1, "save_strategy": "no"}
    how = {"learning_rate": 1e-3, "report_to": [], "disable_tqdm": True, "logging_nan_inf_filter": False}
    place = {"use_cpu": True} if config is None else {"deepspeed": config}
    args = TrainingArguments(out, **{**usual, **how, **place, **more})
    set_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(name)
    texts = [dict(tokenizer(f"{a}+{b}={a + b}")) for a in range(8) for b in range(8)]
    model = AutoModelForCausalLM.from_pretrained(name, attention_dropout=dropout)
    collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    trainer = Trainer(model, args, train_dataset=texts, eval_dataset=texts[:16], data_collator=collator)
    trainer.train(resume_from_checkpoint=resume)
    weights = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    losses = {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}
    sums = {key: (value.double().sum().item(), value.double().norm().item()) for key, value in (weights or {}).items()}
    best = trainer.state.best_model_checkpoint
    trainer.accelerator.free_memory()
    return losses, sums, best
