"""The promise: whole weights go out and come in under the model's own names, on every stage."""

from __future__ import annotations

import io
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from marks import longer
from models import TiedNet, config, step
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

import zero
from zero import log
from zero.core.access import GatheredParameters
from zero.core.unit import Unit
from zero.utils import safe_get_full_fp32_param


def start(stage: int, dtype: str = "bf16", seed: int = 7) -> Any:
    torch.manual_seed(seed)
    section = {"stage": stage, "stage3_gather_16bit_weights_on_model_save": stage == 2}
    settings = config(stage, dist.get_world_size(), bf16={"enabled": dtype == "bf16"}, zero_optimization=section)
    return zero.initialize(model=TiedNet(), config=settings)[0]


def truth(engine: Any) -> dict[str, torch.Tensor]:
    """The module's own state_dict after the engine has given it back."""
    engine.destroy()
    return {name: value.clone() for name, value in engine.module.state_dict().items()}


def equal(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return list(one) == list(two) and all(torch.equal(one[name], two[name]) for name in one)


def written(stage: int, folder: str) -> list[bool]:
    """What goes out of one engine; stage 3 has no `stage3_gather_16bit_weights_on_model_save`, and says so once."""
    engine, said_aloud = start(stage), io.StringIO()
    handler = logging.StreamHandler(said_aloud)
    log._said.cache_clear()
    logging.getLogger("zero").addHandler(handler)
    for index in range(2):
        step(engine, index)
    rank = dist.get_rank()
    said = [engine.save_16bit_model(folder, "model.safetensors"), engine.save_16bit_model(folder)]
    said.append(engine.save_16bit_model(folder, "trained.bin", exclude_frozen_parameters=True))
    logging.getLogger("zero").removeHandler(handler)
    said.append(said_aloud.getvalue().count("on_model_save is false") == (stage == 3 and rank == 0))
    state = engine._consolidated_16bit_state_dict()
    said.append((state is None) == (rank != 0))
    if rank == 0:
        said.append(state["head.weight"] is state["embed.weight"])
    everywhere = {name: value.clone() for name, value in engine.module_state_dict(prefix="m.").items()}
    said.append(sorted(engine.module_state_dict(keep_vars=True)) == sorted(engine.module.state_dict(keep_vars=True)))
    engine.empty_partition_cache()
    said.append(all(unit.state.value == "sharded" for unit in engine._sharded.units if unit.cut))
    step(engine, 2)  # all of that left the engine usable
    said.append(engine.was_step_applied())
    again = start(stage)
    for index in range(2):
        step(again, index)
    wanted = truth(again)
    said.append(equal({f"m.{name}": value for name, value in wanted.items()}, everywhere))
    loaded = torch.load(Path(folder) / "pytorch_model.bin")
    said += [equal(loaded, wanted), loaded["head.weight"].data_ptr() == loaded["embed.weight"].data_ptr()]
    few = torch.load(Path(folder) / "trained.bin")
    said.append([name for name in wanted if name not in few] == [name for name in wanted if "blocks.1." in name])
    tensors = load_file(Path(folder) / "model.safetensors")
    said.append("head.weight" not in tensors and all(torch.equal(wanted[name], tensors[name]) for name in tensors))
    with safe_open(Path(folder) / "model.safetensors", "pt") as file:
        said.append(file.metadata()["head.weight"] == "embed.weight")
    said.append(sorted(path.name for path in Path(folder).iterdir() if path.name.startswith(".")) == [])
    return said


@pytest.mark.parametrize("stage", [1, 3, *longer(0, 2)])
def test_what_is_written_is_the_model(pool, stage, tmp_path):
    for said in pool.run(2, written, stage, str(tmp_path)):
        assert all(said), said


def loaded_into(stage: int, dtype: str) -> list[bool]:
    """fp32 weights of another model: the masters hold them exactly, the parameters their rounding, at once."""
    torch.manual_seed(3)
    source = TiedNet().state_dict()
    source["scale"] = torch.tensor([3.0, 4.0])
    engine = start(stage, dtype)
    step(engine, 0)
    result = engine.load_module_state_dict(source)
    said = [result.missing_keys == [] == result.unexpected_keys]
    for name, param in engine.module.named_parameters():
        exact = safe_get_full_fp32_param(param)
        said.append(exact is None or torch.equal(exact, source[name]))
    now = engine.module_state_dict()
    said.append(torch.equal(now["scale"], source["scale"]))
    for name, value in now.items():
        said.append(torch.allclose(value.float(), source[name], rtol=2**-8, atol=0))
    other = start(stage, dtype, seed=3)  # the same weights from the start
    mine = engine.module_state_dict()
    said += [torch.equal(mine[name], value) for name, value in other.module_state_dict().items() if name != "scale"]
    return said


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [1, 3, *longer(0, 2)])
def test_what_is_loaded_is_exact(stage):
    said = loaded_into(stage, "fp32") + loaded_into(stage, "bf16")
    assert all(said), said


def refused(stage: int) -> list[str]:
    engine = start(stage)
    good = engine.module_state_dict()
    before = {name: value.clone() for name, value in good.items()}
    said = []
    cases = [
        {name: value for name, value in good.items() if name != "scale"} if dist.get_rank() else good,
        {**good, "more": good["scale"]},
        {**good, "head.bias": torch.zeros(16)},
    ]
    for given in cases:
        try:
            engine.load_module_state_dict(given)
            said.append("nothing")
        except RuntimeError as error:
            said.append(str(error))
    result = engine.load_module_state_dict({**cases[1], "head.bias": good["head.bias"]}, strict=False)
    said.append(str(result.unexpected_keys))
    few = {name: value for name, value in good.items() if name != "scale"}
    said.append(str(engine.load_module_state_dict(few, allowed_missing_keys=["scale"]).missing_keys))
    engine.load_module_state_dict({}, custom_load_fn=lambda src, dst: nn.init.constant_(dst.head.bias, 0.25))
    bias = engine.module_state_dict()["head.bias"]
    said.append(str(bool((bias == 0.25).all())))
    engine.load_module_state_dict(before)
    said.append(str(equal(engine.module_state_dict(), before)))
    return said


@pytest.mark.parametrize("stage", [1, 3])
def test_what_does_not_fit_is_refused_on_all_ranks(pool, stage):
    one, two = pool.run(2, refused, stage)
    assert one[0] == f"rank 1: {two[0]}"
    assert two[0] == "load_module_state_dict: missing: ['scale']"
    wanted = [
        "load_module_state_dict: unexpected: ['more']",
        "load_module_state_dict: 'head.bias' has shape (17,), the dictionary (16,)",
        "['more']",
        "[]",
        "True",
        "True",
    ]
    assert one[1:] == two[1:] == wanted


def not_written(folder: str) -> list[Any]:
    engine = start(2)
    said: list[Any] = []
    Path(folder, "file").touch()
    try:
        engine.save_16bit_model(f"{folder}/file/below")
        said.append("nothing")
    except OSError as error:
        said.append(str(error))
    try:
        engine._zero3_consolidated_16bit_state_dict()
    except ValueError as error:
        said.append(str(error))
    return said


def test_what_cannot_be_written_is_said(pool, tmp_path):
    one, two = pool.run(2, not_written, str(tmp_path))
    assert "file" in one[0]
    assert two[0] == f"rank 0: {one[0]}"
    assert one[1] == "this function requires ZeRO-3 mode"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def in_files(stage: int, folder: str) -> tuple[list[bool], int]:
    """The layout of Hugging Face; how many units were ever whole at once while it was written, beside the first."""
    engine = start(stage)
    step(engine, 0)
    engine.empty_partition_cache()
    most, gather = 0, Unit.gather

    def counted(unit: Unit, *args: Any) -> Any:
        nonlocal most
        done = gather(unit, *args)
        most = max(most, sum(one.holds > 0 for one in engine._sharded.units))
        return done

    Unit.gather = counted
    try:
        said = [engine.save_16bit_model(folder, max_shard_size="2KB")]
    finally:
        Unit.gather = gather
    wanted = {name: value.clone() for name, value in engine.module_state_dict().items()}
    index = json.loads(Path(folder, "model.safetensors.index.json").read_text())
    del wanted["head.weight"]
    said.append(set(index["weight_map"]) == set(wanted))
    for name, file in index["weight_map"].items():
        said.append(torch.equal(load_file(Path(folder) / file)[name], wanted[name]))
    files = sorted(path.name for path in Path(folder).iterdir())
    said.append(files == [*sorted(set(index["weight_map"].values())), "model.safetensors.index.json"])
    said.append(all(path.stat().st_size < 4096 + 4000 for path in Path(folder).glob("*.safetensors")))
    step(engine, 1)
    for name, given in (("model.bin", "1GB"), ("model.safetensors", "large")):
        try:
            engine.save_16bit_model(folder, name, max_shard_size=given)
            said.append(False)
        except ValueError as error:
            said.append("max_shard_size" in str(error))
    return said, most


@pytest.mark.parametrize("stage", [1, 3])
def test_the_layout_of_hugging_face_comes_unit_by_unit(pool, stage, tmp_path):
    for said, most in pool.run(2, in_files, stage, str(tmp_path)):
        assert all(said), said
        assert most <= 1, "one unit is let go before the next is gathered"


def fails_halfway(folder: str) -> tuple[str, bool]:
    """Rank 0 cannot write the second file; the others have gathered everything with it, and the engine goes on."""
    engine = start(3)
    step(engine, 0)
    Path(folder, "model-00002-of-00002.safetensors").mkdir(exist_ok=True)
    try:
        engine.save_16bit_model(folder, max_shard_size="3KB")
        text = "nothing"
    except OSError as error:
        text = str(error)
    with GatheredParameters(engine.parameters()):
        pass
    step(engine, 1)
    return text, engine.was_step_applied()


def test_a_failure_between_two_files_leaves_no_rank_behind(pool, tmp_path):
    one, two = pool.run(2, fails_halfway, str(tmp_path))
    assert "IsADirectoryError" in one[0] or "Is a directory" in one[0]
    assert two[0] == f"rank 0: {one[0]}"
    assert one[1] and two[1]
    assert [path.name for path in tmp_path.iterdir()] == ["model-00002-of-00002.safetensors"]
