"""The promise: `engine.save_pretrained` writes what others read, with the weights of now, on every stage."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from models import config
from safetensors.torch import load_file
from torch import nn

import zero


def needs(library: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(library) is None, reason=f"{library} is not installed")


def trained(model: nn.Module, **batch: Any) -> tuple[zero.Engine, dict[str, torch.Tensor]]:
    engine, *_ = zero.initialize(model=model, config=config(3, 2))
    engine.backward(engine(**batch).loss if batch else engine(torch.ones(2, 4)).sum())
    engine.step()
    return engine, {name: value.clone() for name, value in engine.module_state_dict().items()}


def same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.ranks(2)
def test_of_a_plain_module_it_is_the_layout_of_hugging_face(tmp_path: Path) -> None:
    engine, weights = trained(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)))
    engine.save_pretrained(tmp_path / "one")
    assert [path.name for path in (tmp_path / "one").iterdir()] == ["model.safetensors"]
    assert same(load_file(tmp_path / "one" / "model.safetensors"), weights)
    engine.save_pretrained(tmp_path / "two", max_shard_size="60B")
    index = json.loads((tmp_path / "two" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == 2
    with pytest.raises(ValueError, match=r"max_shard_size: got 'much', wanted a number of bytes"):
        engine.save_pretrained(tmp_path, max_shard_size="much")
    engine.destroy()


class Own(nn.Sequential):
    """A model that writes its files itself."""

    def save_pretrained(self, folder: Path, state_dict: dict[str, torch.Tensor], max_shard_size: str) -> None:
        lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
        spans = [[int(end, 16) for end in line[0].split("-")] for line in lines if str(folder) in line[-1]]
        for name, value in state_dict.items():
            assert any(begin <= value.data_ptr() < end for begin, end in spans), f"{name} is not mapped to a file"
        assert state_dict["0.weight"] is state_dict["2.weight"]
        torch.save((state_dict, max_shard_size), folder / "own.bin")


@pytest.mark.ranks(2)
def test_a_model_that_writes_itself_gets_weights_that_take_no_memory(tmp_path: Path) -> None:
    model = Own(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    engine, weights = trained(model)
    engine.save_pretrained(tmp_path, max_shard_size="1KB")
    assert [path.name for path in tmp_path.iterdir()] == ["own.bin"]
    written, limit = torch.load(tmp_path / "own.bin")
    assert same(written, weights) and limit == "1KB"
    engine.destroy()


@needs("transformers")
@pytest.mark.ranks(2)
def test_of_a_model_of_transformers_it_is_read_by_from_pretrained(tmp_path: Path) -> None:
    import transformers as hf
    from test_transformers import batch, build

    tokens = batch(0, 0)
    engine, weights = trained(build("gpt2"), input_ids=tokens, labels=tokens)
    engine.save_pretrained(tmp_path)
    assert {"config.json", "generation_config.json", "model.safetensors"} <= {path.name for path in tmp_path.iterdir()}
    assert same(hf.GPT2LMHeadModel.from_pretrained(tmp_path).state_dict(), weights)
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        engine.save_pretrained(tmp_path / "file" / "inside")
    engine.destroy()


@needs("peft")
@pytest.mark.ranks(2)
def test_of_a_model_with_adapters_it_is_the_adapters_alone(tmp_path: Path) -> None:
    import peft
    from test_transformers import batch, build

    tokens = batch(0, 0)
    adapters = peft.LoraConfig(r=2, target_modules=["c_attn"], task_type="CAUSAL_LM")
    engine, weights = trained(peft.get_peft_model(build("gpt2"), adapters), input_ids=tokens, labels=tokens)
    engine.save_pretrained(tmp_path)
    files = {path.name for path in tmp_path.iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors"} <= files
    assert "model.safetensors" not in files
    read = peft.PeftModel.from_pretrained(build("gpt2"), tmp_path).state_dict()
    trained_ones = [name for name in weights if "lora_" in name]
    assert trained_ones
    assert any(weights[name].any() for name in trained_ones if "lora_B" in name)
    assert all(torch.equal(read[name], weights[name]) for name in trained_ones)
    engine.destroy()
