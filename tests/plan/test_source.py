"""The promise: `zero plan` finds a model by function or folder, without memory for it; what is unclear is said."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest

from zero.config import load
from zero.sizes.model_trace import trace
from zero.tools.plan.source import load_model

MODULE = """
    import torch
    from torch import nn

    def wide():
        model = nn.Sequential(nn.Linear(2**20, 2**20), nn.Linear(2**20, 1, bias=False))  # 4 TiB
        return model, torch.zeros(3, 2**20)

    def alone():
        return nn.Linear(2, 2)

    def text():
        return "a model"
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"made_for_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(textwrap.dedent(MODULE))
    monkeypatch.chdir(tmp_path)
    return name


def test_a_function_gives_a_model_and_its_inputs(module: str):
    model, inputs = load_model(f"{module}:wide", 1)
    assert all(param.is_meta for param in model.parameters())
    cost = trace(model, inputs, load({"train_batch_size": 1}, 1))
    side = 2**20
    assert cost.flops == 4 * side**2 + 2 * side + 4 * side  # the first layer has no gradient of its input


def test_what_is_no_model_is_said(module: str, tmp_path: Path):
    for text, wanted in (
        ("not_there:make", "No module named 'not_there'"),
        (f"{module}:nobody", "has no nobody"),
        (f"{module}:alone", r"have it give \(model, inputs\)"),
        (f"{module}:text", "gave a str"),
        (str(tmp_path), r"has no config\.json"),
    ):
        with pytest.raises(ValueError, match=wanted):
            load_model(text, 8)


@pytest.mark.long
def test_a_folder_of_hugging_face_gives_ids_and_labels(tmp_path: Path):
    pytest.importorskip("transformers")
    sizes = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
    values = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_key_value_heads": 8, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(values))
    model, inputs = load_model(str(tmp_path), 4096)
    assert inputs["input_ids"].shape == inputs["labels"].shape == (2, 4096)
    cost = trace(model, inputs, load({"train_batch_size": 1, "bf16": {"enabled": True}}, 1))
    weights = sum(param.numel() for param in model.parameters()) - model.get_input_embeddings().weight.numel()
    attention = 3.5 * 4 * 4096**2 * 8192 * 80
    assert cost.flops == pytest.approx(6 * weights * 4096 + attention, rel=1e-3) and weights > 60e9
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit", "architectures": ["ViTModel"]}))
    with pytest.raises(ValueError, match=r"takes more than ids and labels.*module:function"):
        load_model(str(tmp_path), 8)
