"""What the programs of `make programs` train on: tiny models, and rows where each of them looks."""

from __future__ import annotations

import json
import random
import string
from pathlib import Path

import torch
from huggingface_cases import make_model, write_rows

BERT = "bert-base-cased"
DISTILBERT = "distilbert-base-uncased"


def write_text(data: Path) -> None:
    """A tiny language model and 4 KiB of sums."""
    make_model(data / "model")
    (data / "text.txt").write_text("\n".join(f"{a}+{b}={a + b}" for a in range(24) for b in range(24)))


def write_trl(name: str, data: Path) -> None:
    """A tiny language model and what a script of TRL trains on."""
    make_model(data / "model")
    write_rows(data / "rows", name)


def write_chats(data: Path) -> None:
    """Sums with a right and a wrong answer, by the name of a set that the program knows, and a bf16 model of bytes.

    Its blocks have more parameters than stay gathered with the JSON in the program's code.
    """
    import transformers
    from datasets import Dataset, DatasetDict

    make_model(data / "model")
    tokenizer = transformers.ByT5Tokenizer()  # of those that have a `save_vocabulary` to be called
    tokenizer.save_pretrained(data / "model")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": len(tokenizer)}
    config = transformers.AutoConfig.from_pretrained(data / "model", **sizes)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(data / "model")
    config.save_pretrained(data / "critic")
    critic = {f"rwtransformer.{name}": value for name, value in model.model.state_dict().items()}
    torch.save({**critic, "v_head.weight": model.lm_head.weight[:1].clone()}, data / "critic" / "pytorch_model.bin")
    rows = [{"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": f"{a + b}0"} for a in range(8) for b in range(8)]
    sets = {"train": Dataset.from_list(rows), "test": Dataset.from_list(rows[::8])}
    DatasetDict(sets).save_to_disk(data / "Dahoas" / "rm-static")


def write_letters(data: Path) -> None:
    """A cache of the hub with a tiny Bert, a text of letters, and pairs, labelled by the half of the alphabet."""
    import hub  # Transformers and datasets take seconds to import

    hub.make(data / "hub", [BERT])
    draw = random.Random(0)
    halves = [string.ascii_lowercase[13 * (number % 2) :][:13] for number in range(256)]
    rows = [[" ".join(draw.choices(half, k=6)) for _ in range(2)] for half in halves]
    pairs = [
        {"sentence1": first, "sentence2": second, "label": number % 2} for number, (first, second) in enumerate(rows)
    ]
    (data / "text.txt").write_text("\n".join(map(" ".join, rows)))
    (data / "pairs.json").write_text("\n".join(map(json.dumps, pairs)))


def write_scores(count: int, data: Path) -> None:
    """A cache of the hub with two tiny models, and `count` pairs, each with its share of letters in common."""
    import hub

    hub.make(data / "hub", [DISTILBERT, "distilbert/distilroberta-base"])
    draw, rows = random.Random(0), []
    for _ in range(count + 128):
        first, second = (draw.sample(string.ascii_lowercase[:12], k=6) for _ in range(2))
        score = len({*first} & {*second}) / 6
        rows.append({"sentence1": " ".join(first), "sentence2": " ".join(second), "score": score})
    splits = {"train": rows[128:], "validation": rows[:64], "test": rows[64:128]}
    hub.save(splits, data / "hub" / "datasets", "sentence-transformers/stsb", "default")


def write_sums(data: Path) -> None:
    """A tiny language model and questions with their answers."""
    make_model(data / "model")
    sums = [{"input": f"{a}+{b}=", "output": str(a + b)} for a in range(8) for b in range(8)]
    (data / "rows.jsonl").write_text("\n".join(map(json.dumps, sums)))


def write_wikitext(data: Path) -> None:
    """A tokenizer of letters, and one line many times over: the program begins its data anew when it resumes."""
    import hub
    import transformers

    vocabulary = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", *string.ascii_lowercase]
    numbers = {word: number for number, word in enumerate(vocabulary)}
    transformers.RobertaTokenizer(vocab=numbers, merges=[]).save_pretrained(data / "tokenizer")
    rows = [{"text": string.ascii_lowercase[:8]} for _ in range(64)]
    hub.save({"train": rows}, data / "hub" / "datasets", "wikitext", "wikitext-2-v1")
