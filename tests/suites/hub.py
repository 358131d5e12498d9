"""Stands in for the hub: tiny random models and a dataset by the names the suites ask for, in its cache's layout.

Every process finds them by HF_HOME and HF_HUB_OFFLINE=1 alone, so the suites and what they launch stay as they are.
Run it with the folder that is to be HF_HOME.
"""

from __future__ import annotations

import random
import string
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import ClassLabel, Dataset, Features, Value
from datasets.packaged_modules.parquet.parquet import Parquet

_REVISION = "0" * 40
_LETTERS = string.ascii_lowercase
_VOCABULARY = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *_LETTERS, *(f"##{letter}" for letter in _LETTERS))
_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4}
_SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_GROUPS = {**_SIZES, "num_key_value_heads": 4}
_WORDS = {"vocab_size": len(_VOCABULARY), "initializer_range": 0.2}

# Name on the hub -> the class of the model, and the sizes of its configuration; with _WORDS it has a tokenizer, too.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "sshleifer/tiny-gpt2": ("GPT2LMHeadModel", {"n_embd": 2, "n_layer": 2, "n_head": 2}),
    "hf-internal-testing/tiny-random-gpt2": ("GPT2LMHeadModel", {**_GPT2, "vocab_size": 1000}),
    "gpt2": ("GPT2LMHeadModel", _GPT2),
    "hf-internal-testing/tiny-random-gptj": (
        "GPTJForCausalLM",
        {**_GPT2, "rotary_dim": 4, "n_positions": 512, "vocab_size": 1000},
    ),
    "apple/mobilevit-xx-small": ("MobileViTModel", {}),
    "peft-internal-testing/tiny-random-qwen-1.5-MoE": (
        "Qwen2MoeForCausalLM",
        {**_GROUPS, "vocab_size": 512, "moe_intermediate_size": 32, "num_experts": 4},
    ),
    "trl-internal-testing/tiny-Qwen2ForCausalLM-2.5": ("Qwen2ForCausalLM", {**_GROUPS, **_WORDS}),
    "hf-internal-testing/tiny-random-LlamaForCausalLM": (
        "LlamaForCausalLM",
        {**_GROUPS, "vocab_size": 256, "initializer_range": 0.2},
    ),
    "distilbert-base-uncased": (
        "DistilBertModel",
        {**_WORDS, "dim": 32, "hidden_dim": 64, "n_layers": 2, "n_heads": 4},
    ),
    "bert-base-cased": ("BertForSequenceClassification", {**_SIZES, **_WORDS}),
    "distilbert/distilroberta-base": (
        "RobertaForSequenceClassification",
        {**_SIZES, **_WORDS, "type_vocab_size": 2, "num_labels": 1},
    ),
    "patrickvonplaten/t5-tiny-random": (
        "T5ForConditionalGeneration",
        {
            "d_model": 32,
            "d_ff": 64,
            "d_kv": 8,
            "num_layers": 2,
            "num_heads": 4,
            "vocab_size": 256,
            "decoder_start_token_id": 0,
        },
    ),
}


def make(home: Path, names: Collection[str] = MODELS.keys()) -> None:
    """Fill `home` with MODELS, or these of them, and with the dataset; what is there already stays."""
    pairs = {"train": _pairs(1024, seed=0), "validation": _pairs(256, seed=1)}
    for name, (kind, sizes) in MODELS.items():
        if name not in names:
            continue
        repository = home / "hub" / f"models--{name.replace('/', '--')}"
        if (repository / "refs" / "main").exists():
            continue
        folder = repository / "snapshots" / _REVISION
        torch.manual_seed(0)
        made = getattr(transformers, kind)
        model = made(made.config_class(**sizes))
        tokenizer = _tokenizer(folder, sizes["vocab_size"]) if "vocab_size" in sizes else None
        if kind == "BertForSequenceClassification":
            _begin(model, tokenizer, pairs["train"])
        if tokenizer:
            tokenizer.save_pretrained(folder)
        model.save_pretrained(folder)
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / "main").write_text(_REVISION)
    text = Value("string")
    features = Features(sentence1=text, sentence2=text, label=ClassLabel(names=["no", "yes"]), idx=Value("int32"))
    save(pairs, home / "datasets", "nyu-mll/glue", "mrpc", features)


def _tokenizer(folder: Path, words: int) -> Any:
    """One token for each letter, in the manner of the models with so many words; None where no suite wants any."""
    if words == len(_VOCABULARY):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "vocab.txt").write_text("\n".join(_VOCABULARY))
        return transformers.BertTokenizer(str(folder / "vocab.txt"))
    if words == 256:
        pieces = [*("<pad>", "</s>", "<unk>"), "\u2581", *_LETTERS, *(f"<extra_id_{number}>" for number in range(100))]
        return transformers.T5Tokenizer([(piece, -float(place > 2)) for place, piece in enumerate(pieces)])
    return None


def _pairs(count: int, seed: int) -> list[dict[str, Any]]:
    """Rows of GLUE's MRPC, of another language: the label says from which half of the alphabet both sentences are."""
    draw, rows = random.Random(seed), []
    for number in range(count):
        half = _LETTERS[:13] if number % 2 else _LETTERS[13:]
        first, second = (" ".join(draw.choices(half, k=6)) for _ in range(2))
        rows.append({"sentence1": first, "sentence2": second, "label": number % 2, "idx": number})
    return rows


def _begin(model: Any, tokenizer: Any, rows: list[dict[str, Any]]) -> None:
    """Train until 65 % are right: scripts that start from a pretrained model want more than 82 % soon, and growing."""
    inputs = tokenizer([row["sentence1"] for row in rows], [row["sentence2"] for row in rows], return_tensors="pt")
    labels, right = torch.tensor([row["label"] for row in rows]), 0.0
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    while right < 0.65:
        result = model(**inputs, labels=labels)
        right = (result.logits.argmax(-1) == labels).float().mean().item()
        result.loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def save(
    splits: dict[str, list[dict[str, Any]]], cache: Path, name: str, config: str, features: Features | None = None
) -> None:
    """Where `load_dataset(name, config)` looks when it is offline."""
    folder = cache / name.replace("/", "___") / config / "0.0.0" / _REVISION
    if folder.exists():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    files = {split: str(cache / f"{config}-{split}.parquet") for split in splits}
    for split, rows in splits.items():
        Dataset.from_list(rows, features=features).to_parquet(files[split])
    short = name.rpartition("/")[2]
    builder = Parquet(cache_dir=str(cache), dataset_name=short, config_name=config, data_files=files)
    builder.download_and_prepare(str(folder))


if __name__ == "__main__":
    make(Path(sys.argv[1]))
