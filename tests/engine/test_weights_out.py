"""The promise: whole weights go out, also as `save_pretrained` writes them, and come in, on every stage."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from marks import longer, needs
from models import TiedNet, config, step
from ranks import listening, said_by
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

import zero
from zero.utils import safe_get_full_fp32_param

pytestmark = pytest.mark.ranks(2)


def start(stage: int, dtype: str = "bf16", seed: int = 7) -> Any:
    torch.manual_seed(seed)
    section = {"stage": stage, "stage3_gather_16bit_weights_on_model_save": stage == 2}
    settings = config(stage, dist.get_world_size(), bf16={"enabled": dtype == "bf16"}, zero_optimization=section)
    return zero.initialize(model=TiedNet(), config=settings)[0]


def now(engine: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in engine.module_state_dict().items()}


def equal(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return list(one) == list(two) and all(torch.equal(one[name], two[name]) for name in one)


def raises(call: Callable[[], object], part: str) -> None:
    with pytest.raises((OSError, RuntimeError, ValueError)) as caught:
        call()
    assert part in str(caught.value)


@pytest.mark.parametrize("stage", [1, 3, *longer(0, 2)])
def test_what_is_written_is_the_model(stage, tmp_path):
    """Stage 3 has no `stage3_gather_16bit_weights_on_model_save`, and says so once."""
    engine, first = start(stage), dist.get_rank() == 0
    for number in range(2):
        step(engine, number)
    with listening(logging.INFO) as said:
        engine.save_16bit_model(tmp_path, "model.safetensors")
        engine.save_16bit_model(tmp_path)
        engine.save_16bit_model(tmp_path, "trained.bin", exclude_frozen_parameters=True)
    assert sum("on_model_save is false" in line for line in said) == (stage == 3 and first)
    state = engine._consolidated_16bit_state_dict()
    assert (state is not None) == first
    assert not first or state["head.weight"] is state["embed.weight"]
    everywhere = {name: value.clone() for name, value in engine.module_state_dict(prefix="m.").items()}
    assert engine.module_state_dict(keep_vars=True).keys() == engine.module.state_dict(keep_vars=True).keys()
    engine.empty_partition_cache()
    step(engine, 2)  # all of that left the engine usable
    assert engine.was_step_applied()
    again = start(stage)
    for number in range(2):
        step(again, number)
    again.destroy()  # gives the module back whole
    wanted = again.module.state_dict()
    assert equal({f"m.{name}": value for name, value in wanted.items()}, everywhere)
    loaded = torch.load(tmp_path / "pytorch_model.bin")
    assert equal(loaded, wanted) and loaded["head.weight"].data_ptr() == loaded["embed.weight"].data_ptr()
    few = torch.load(tmp_path / "trained.bin")
    assert [name for name in wanted if name not in few] == [name for name in wanted if "blocks.1." in name]
    tensors = load_file(tmp_path / "model.safetensors")
    assert wanted.keys() - tensors.keys() == {"head.weight"}
    assert all(torch.equal(wanted[name], tensors[name]) for name in tensors)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata()["head.weight"] == "embed.weight"
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [1, 3, *longer(0, 2)])
def test_what_is_loaded_is_exact(stage, dtype):
    """fp32 weights of another model: the masters hold them exactly, the parameters their rounding, at once."""
    torch.manual_seed(3)
    source = TiedNet().state_dict()
    source["scale"] = torch.tensor([3.0, 4.0])
    engine = start(stage, dtype)
    step(engine, 0)
    result = engine.load_module_state_dict(source)
    assert result.missing_keys == [] == result.unexpected_keys
    for name, param in engine.module.named_parameters():
        exact = safe_get_full_fp32_param(param)
        assert exact is None or torch.equal(exact, source[name])
    mine = now(engine)
    assert torch.equal(mine["scale"], source["scale"])
    for name, value in mine.items():
        assert torch.allclose(value.float(), source[name], rtol=2**-8, atol=0)
    other = start(stage, dtype, seed=3)  # the same weights from the start
    assert equal({**now(other), "scale": source["scale"]}, mine)


@pytest.mark.parametrize("stage", [1, 3])
def test_what_does_not_fit_is_refused_on_all_ranks(stage):
    engine, second = start(stage), dist.get_rank() == 1
    before = now(engine)
    few = {name: value for name, value in before.items() if name != "scale"}
    more = {**before, "more": before["scale"]}
    begin = "RuntimeError: load_module_state_dict: "
    for given, text in (
        (few if second else before, "missing: ['scale']"),
        (more, "unexpected: ['more']"),
        ({**before, "head.bias": torch.zeros(16)}, "'head.bias' has shape (17,), the dictionary (16,)"),
    ):
        alone = given is before and not second
        said = said_by(lambda given=given: engine.load_module_state_dict(given))
        assert said == (begin + text).replace(": ", ": rank 1: " if alone else ": ", 1)
    assert engine.load_module_state_dict(more, strict=False).unexpected_keys == ["more"]
    assert engine.load_module_state_dict(few, allowed_missing_keys=["scale"]).missing_keys == []
    engine.load_module_state_dict({}, custom_load_fn=lambda src, dst: nn.init.constant_(dst.head.bias, 0.25))
    assert (engine.module_state_dict()["head.bias"] == 0.25).all()
    engine.load_module_state_dict(before)
    assert equal(now(engine), before)


def test_what_cannot_be_written_is_said(tmp_path):
    engine, second = start(2), dist.get_rank() == 1
    (tmp_path / "file").touch()
    raises(lambda: engine.save_16bit_model(tmp_path / "file" / "below"), "rank 0: " if second else "file")
    raises(engine._zero3_consolidated_16bit_state_dict, "this function requires ZeRO-3 mode")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("stage", [1, 3])
def test_the_layout_of_hugging_face(stage, tmp_path):
    engine = start(stage)
    step(engine, 0)
    assert engine.save_16bit_model(tmp_path, max_shard_size="2KB")
    wanted = now(engine)
    del wanted["head.weight"]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == wanted.keys()
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / file)[name], wanted[name])
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == [*sorted(set(index["weight_map"].values())), "model.safetensors.index.json"]
    assert all(path.stat().st_size < 4096 + 4000 for path in tmp_path.glob("*.safetensors"))
    step(engine, 1)
    for name, size in (("model.bin", "1GB"), ("model.safetensors", "large")):
        raises(lambda name=name, size=size: engine.save_16bit_model(tmp_path, name, max_shard_size=size), "shard_size")


def test_a_failure_between_two_files_leaves_no_rank_behind(tmp_path):
    """Rank 0 cannot write the second file; the others have gathered everything with it, and the engine goes on."""
    engine, second = start(3), tmp_path / "model-00002-of-00002.safetensors"
    step(engine, 0)
    second.mkdir(exist_ok=True)
    text = "rank 0: " if dist.get_rank() else "directory"
    raises(lambda: engine.save_16bit_model(tmp_path, max_shard_size="3KB"), text)
    with zero.GatheredParameters(engine.parameters()):
        pass
    step(engine, 1)
    assert engine.was_step_applied()
    assert [path.name for path in tmp_path.iterdir()] == [second.name]


# --- save_pretrained --------------------------------------------------------------------------------------------


def trained(model: nn.Module, **batch: Any) -> tuple[zero.Engine, dict[str, torch.Tensor]]:
    engine, *_ = zero.initialize(model=model, config=config(3, 2))
    engine.backward(engine(**batch).loss if batch else engine(torch.ones(2, 4)).sum())
    engine.step()
    return engine, now(engine)


def test_save_pretrained_of_a_plain_module_writes_that_layout(tmp_path):
    engine, weights = trained(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)))
    engine.save_pretrained(tmp_path / "one")
    assert [path.name for path in (tmp_path / "one").iterdir()] == ["model.safetensors"]
    assert equal(weights, {name: load_file(tmp_path / "one" / "model.safetensors")[name] for name in weights})
    engine.save_pretrained(tmp_path / "two", max_shard_size="60B")
    index = json.loads((tmp_path / "two" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == weights.keys() and len(set(index["weight_map"].values())) == 2
    raises(lambda: engine.save_pretrained(tmp_path, max_shard_size="much"), "max_shard_size: got 'much', wanted a num")
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


def test_a_model_that_writes_itself_gets_weights_that_take_no_memory(tmp_path: Path) -> None:
    model = Own(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    engine, weights = trained(model)
    engine.save_pretrained(tmp_path, max_shard_size="1KB")
    assert [path.name for path in tmp_path.iterdir()] == ["own.bin"]
    written, limit = torch.load(tmp_path / "own.bin")
    assert equal(written, weights) and limit == "1KB"
    engine.destroy()


@needs("transformers")
def test_of_a_model_of_transformers_it_is_read_by_from_pretrained(tmp_path: Path) -> None:
    import transformers as hf
    from test_transformers import batch, build

    tokens = batch(0, 0)
    engine, weights = trained(build("gpt2"), input_ids=tokens, labels=tokens)
    engine.save_pretrained(tmp_path)
    assert {"config.json", "generation_config.json", "model.safetensors"} <= {path.name for path in tmp_path.iterdir()}
    read = hf.GPT2LMHeadModel.from_pretrained(tmp_path).state_dict()
    assert read.keys() == weights.keys() and all(torch.equal(read[name], weights[name]) for name in weights)
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        engine.save_pretrained(tmp_path / "file" / "inside")
    engine.destroy()


@needs("peft")
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
