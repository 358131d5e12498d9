"""The promise: however ranks lie, and whichever parts and units each holds, they train and save as one process does.

The numbers of `tests/exact.py` sum without rounding: all is compared bit by bit, without trees. Rows of the matrix are
ways to lie (stages with other units, one without any, experts, layers cut in unequal parts, shared sequences), columns
what the seams do: steps, clipping, overflow, accumulation, offload, checkpoints in and out, weights out and in, writes,
models built under `zero.Init`, comparison of replicas.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from device import moved
from exact import NORM, SHAPES, WAYS, WORLDS, Exact, values
from fake_nccl import on_fake_nccl
from marks import longer
from offload_cases import BOTH, OPTIMIZER
from safetensors.torch import load_file
from scenario import settings
from torch import nn

import zero
from zero.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state, safe_set_full_fp32_param

each_way = pytest.mark.parametrize("way", [way for way in WAYS if way != "one"])
ADAM = {"optimizer": {"type": "AdamW", "params": {"lr": 0.125, "weight_decay": 0.25}}}
SGD = {"optimizer": {"type": "SGD", "params": {"lr": 0.125, "momentum": 0.5}}}


def world_of(way: str) -> int:
    return WORLDS.get(way, 4)


def engine_of(way: str, json: dict[str, Any], init: bool = False) -> Any:
    grid, sizes = WAYS[way].grid(world_of(way)), WAYS[way].told(json["stage"])
    whole = settings({"cut": True, **json}, grid.size("dp_replicate", "dp_shard"))
    mesh = {"mesh_param": sizes} if sizes else {}
    if not init:
        return zero.initialize(model=Exact(WAYS[way]), config=whole, **mesh)[0]
    with zero.Init(config_dict_or_path=whole, **mesh):
        model = Exact(WAYS[way])
    return zero.initialize(model=model, config=whole, **mesh)[0]


def step(engine: Any, number: int, spoiler: int = -1) -> None:
    for turn in range(engine.gradient_accumulation_steps()):
        loss = engine(2 * number + turn, **engine.module.inputs)
        engine.backward(loss * (math.inf if engine.global_rank == spoiler else 1.0))
        engine.step()


def whole_state(engine: Any) -> dict[str, torch.Tensor]:
    """Masters and moments, whole, of what this rank has."""
    found, group = {}, engine.optimizer.param_groups[0]
    keys = () if "use_muon" in group else ("exp_avg", "exp_avg_sq") if "betas" in group else ("momentum_buffer",)
    for name, param in engine.module.named_parameters():
        found[name] = safe_get_full_fp32_param(param)
        for key in keys:
            found[f"{key} of {name}"] = safe_get_full_optimizer_state(param, key)
    return found


def trained(
    way: str, json: dict[str, Any], steps: range = range(3), load: str = "", save: str = "", init: bool = False
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Norms, and the state at the end; the second of three or more steps overflows on one rank of 16 bits."""
    engine, norms = engine_of(way, json, init), []
    if load:
        engine.load_checkpoint(load)
    for number in steps:
        if number == 1 and "fp16" in json:
            step(engine, 100, spoiler=0 if way == "a rank without any" else world_of(way) - 1)
        step(engine, number)
        norms.append(engine.get_global_grad_norm())
    if save:
        engine.save_checkpoint(save)
    found = whole_state(engine)
    engine.destroy()
    return norms, found


def run(pool: Any, way: str, function: Any, *args: Any, **more: Any) -> list[Any]:
    return pool.run(world_of(way), function, way, *args, **more)


def check(found: list[Any], wanted: tuple[list[float], dict[str, torch.Tensor]]) -> None:
    """All ranks have the norms of one process, and of what they have its bits; together they have all."""
    names: set[str] = set()
    for norms, state in found:
        assert norms == wanted[0]
        assert [name for name, value in state.items() if not torch.equal(value, wanted[1][name])] == []
        names |= state.keys()
    assert names == wanted[1].keys()


def said(json: dict[str, Any]) -> str:
    return " ".join(map(str, (json["stage"], json.get("precision", "fp32"), *sorted(json.keys() - {"stage"}))))


FP16 = {"fp16": {"enabled": True, "initial_scale_power": 4}}  # a larger scale overflows by itself
CLIPPED = {"gradient_clipping": 0.5, "accumulation": 2}
JSONS = [
    {"stage": 3, "precision": "bf16", **ADAM, **CLIPPED},
    {"stage": 1, **SGD, "accumulation": 2, "zero": {"check_replicas": 1}},
    {"stage": 2, **FP16, **ADAM, "section": OPTIMIZER},
    {"stage": 0, **FP16, **ADAM, **CLIPPED, "zero": {"check_replicas": 1}},
]
MORE = [
    *({"stage": stage, "precision": kind, **ADAM, **CLIPPED} for stage in range(4) for kind in ("fp32", "bf16")),
    {"stage": 3, **FP16, **ADAM, "section": BOTH},
    {"stage": 3, **SGD, "zero": {"check_replicas": 1}, "accumulation": 2},
    {"stage": 2, "precision": "bf16", **ADAM, "zero": {"reduce": "tree"}},
]


@each_way
@pytest.mark.parametrize("json", [*JSONS, *longer(*MORE)], ids=said)
def test_training_is_that_of_one_process(pool, way, json):
    (wanted,) = run(pool, "one", trained, json)
    check(run(pool, way, trained, json), wanted)


def ones(way: str, stage: int) -> float:
    engine = engine_of(way, {"stage": stage, **SGD})
    engine.backward(engine(0, ones=True, **engine.module.inputs))
    engine.step()
    norm = engine.get_global_grad_norm()
    engine.destroy()
    return norm


@each_way
@pytest.mark.parametrize("stage", [1, *longer(0, 2, 3)])
def test_the_norm_of_gradients_of_all_ones_is_the_root_of_their_number(pool, way, stage):
    assert set(run(pool, way, ones, stage)) == {math.sqrt(NORM)}


@pytest.mark.parametrize("stage", [1, 3, *longer(0, 2)])
def test_megatron_6660_experts_that_no_other_rank_has_are_summed_once_over_micro_batches(pool, stage):
    """The gradient of a buffer whose group has one rank was doubled at every micro-batch."""
    json = {"stage": stage, **ADAM, **CLIPPED}
    (wanted,) = run(pool, "one", trained, json)
    check(run(pool, "ep 2 = dp 2", trained, json), wanted)


LAMB = {"optimizer": {"type": "Lamb", "params": {"lr": 0.125}}}


@pytest.mark.parametrize("json", [{"precision": "bf16", **ADAM}, LAMB], ids=["AdamW", "Lamb"])
@pytest.mark.parametrize("stage", [2, *longer(0, 1, 3)])
def test_deepspeed_1522_a_rank_without_parameters_takes_part_in_the_norm(pool, stage, json):
    """The ranks of the other stages waited for it in the norm, and with LAMB in those of its updates."""
    json = {"stage": stage, **json, **CLIPPED}
    (wanted,) = run(pool, "one", trained, json)
    found = run(pool, "a rank without any", trained, json)
    assert found[1] == (wanted[0], {})
    check(found, wanted)


@each_way
@pytest.mark.parametrize("stage", [3, *longer(0, 1, 2)])
def test_a_checkpoint_of_any_way_goes_on_in_any_other(pool, tmp_path, way, stage):
    json = {"stage": stage, "precision": "bf16", **ADAM}
    (wanted,) = run(pool, "one", trained, json, range(5))
    late = wanted[0][3:], wanted[1]
    for each in ("one", way):
        run(pool, each, trained, json, range(3), "", str(tmp_path / each))
    for save, load in ((way, "one"), ("one", way), (way, way)):
        check(run(pool, load, trained, json, range(3, 5), str(tmp_path / save)), late)


@pytest.mark.parametrize("way", ["ep 2 x efsdp 2", "ep 2 = dp 2"])
def test_muon_of_a_stack_of_matrices_that_ranks_divide_is_one_of_each_matrix(pool, tmp_path, way):
    """With NorMuon's mean squares of rows, which a checkpoint has, too."""
    json = {"stage": 2, "optimizer": {"type": "Muon", "params": {"lr": 0.125, "muon_lr": 0.125, "beta2": 0.5}}}
    (wanted,) = run(pool, "one", trained, json, range(5))
    run(pool, way, trained, json, range(3), "", str(tmp_path))
    check(run(pool, way, trained, json, range(3, 5), str(tmp_path)), (wanted[0][3:], wanted[1]))
    check(run(pool, "one", trained, json, range(3, 5), str(tmp_path)), (wanted[0][3:], wanted[1]))


def out_and_in(way: str, stage: int, folder: str) -> dict[str, torch.Tensor]:
    """What each way out gives, of which this rank has seen all; then it is taken in again by an engine that differs."""
    engine = engine_of(way, {"stage": stage, **SGD})
    step(engine, 0)
    engine.save_16bit_model(folder, "model.safetensors")
    engine.save_16bit_model(folder, "model.bin")
    engine.save_pretrained(folder)
    streamed = moved(dict(engine.stream_weights()), torch.device("cpu"))
    state = {name: value.detach().cpu().clone() for name, value in engine.module_state_dict().items()}
    assert state.keys() <= streamed.keys() and all(torch.equal(streamed[name], state[name]) for name in state)
    copy, since = {name: value.clone() for name, value in streamed.items()}, engine.global_steps
    assert {update.name for update in engine.weight_updates(None)} == streamed.keys()
    step(engine, 1)
    for update in engine.weight_updates(since):
        update.apply_to(copy[update.name])
    assert all(torch.equal(copy[name], value.cpu()) for name, value in engine.stream_weights())
    engine.load_module_state_dict(state)
    own = {name: safe_get_full_fp32_param(param).cpu() for name, param in engine.module.named_parameters()}
    assert [name for name in own if not torch.equal(own[name], streamed[name])] == []
    step(engine, 1)
    zero.load_weights(engine, Path(folder, "model.safetensors"))
    assert all(
        torch.equal(safe_get_full_fp32_param(param).cpu(), own[name])
        for name, param in engine.module.named_parameters()
    )
    engine.destroy()
    return streamed


@each_way
@pytest.mark.parametrize("stage", [3, *longer(0, 2)])
def test_weights_go_out_whole_and_come_back(pool, tmp_path, way, stage):
    (wanted,) = run(pool, "one", out_and_in, stage, str(tmp_path / "one"))
    for found in run(pool, way, out_and_in, stage, str(tmp_path / way)):
        assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in SHAPES)
    folder = tmp_path / way
    files = [
        load_file(folder / "model.safetensors"),
        torch.load(folder / "model.bin"),
        load_file(folder / "own.safetensors"),
    ]
    for loaded in files:
        assert all(torch.equal(loaded[name], wanted[name].to(loaded[name].dtype)) for name in SHAPES)


@each_way
@pytest.mark.parametrize("json", [JSONS[0]], ids=["bf16"])
def test_a_model_built_under_init_has_the_parts_of_its_ranks(pool, way, json):
    (wanted,) = run(pool, "one", trained, json)
    check(run(pool, way, trained, json, init=True), wanted)


def written(way: str, stage: int) -> dict[str, torch.Tensor]:
    """Every parameter is written under `GatheredParameters` by rank 0, and by `safe_set_full_fp32_param`."""
    engine = engine_of(way, {"stage": stage, **SGD})
    for name, param in engine.module.named_parameters():
        safe_set_full_fp32_param(param, values(name) + 1)
    step(engine, 0)
    before = whole_state(engine)
    with zero.GatheredParameters(list(engine.module.parameters()), modifier_rank=0), torch.no_grad():
        for param in engine.module.parameters():
            param.mul_(2)
    after = whole_state(engine)
    assert all(torch.equal(after[name], 2 * before[name]) for name in SHAPES if name in after)
    engine.destroy()
    return {name: value for name, value in after.items() if name in SHAPES}


@each_way
@pytest.mark.parametrize("stage", [3, *longer(1)])
def test_writes_reach_every_part(pool, way, stage):
    (wanted,) = run(pool, "one", written, stage)
    for found in run(pool, way, written, stage):
        assert all(torch.equal(value, wanted[name]) for name, value in found.items())


@pytest.mark.ranks(4)
def test_stages_of_different_depth_pass_the_check_of_the_order_of_collectives():
    stage = dist.get_rank() // 2
    model = nn.Sequential(OrderedDict((f"stage{stage}_{at}", nn.Linear(64, 64)) for at in range(2 + stage)))
    json = settings({"stage": 3, "cut": True, "zero": {"check_order": True}}, 2)
    engine = zero.initialize(model=model, config=json, mesh_param={"pp": 2, "dp_shard": 2})[0]
    for _ in range(3):
        engine.backward(engine(torch.ones(2, 64, device=engine.device)).sum())
        engine.step()
    norms = engine.get_global_grad_norm()
    engine.destroy()
    assert math.isfinite(norms)


# --- over NCCL: tests/fake_nccl.py refuses tensors on the host, and ranks that begin collectives in another order ---


# The stand-in for a GPU has no attention.
THERE = [way for way in WAYS if way != "one" and "cp" not in WAYS[way].sizes]
FEW = ("pp 2 x dp 2", "ep 2 x efsdp 2", "tp 2 x dp 2")


def over_nccl(way: str, name: str, *args: Any) -> Any:
    with pytest.MonkeyPatch.context() as patch, on_fake_nccl(patch):
        return moved(globals()[name](way, *args), torch.device("cpu"))


@pytest.mark.parametrize("way", THERE)
def test_training_over_nccl_is_that_of_one_process(pool, way):
    (wanted,) = run(pool, "one", trained, JSONS[1])
    check(run(pool, way, over_nccl, "trained", JSONS[1]), wanted)


@pytest.mark.parametrize("way", [*FEW, *longer(*(way for way in THERE if way not in FEW))])
def test_all_that_goes_out_and_in_over_nccl_is_that_of_one_process(pool, tmp_path, way):
    (wanted,) = run(pool, "one", out_and_in, 3, str(tmp_path / "one"))
    for found in run(pool, way, over_nccl, "out_and_in", 3, str(tmp_path / way)):
        assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in SHAPES)
    (wanted,) = run(pool, "one", written, 3)
    for found in run(pool, way, over_nccl, "written", 3):
        assert all(torch.equal(value, wanted[name]) for name, value in found.items())
    json = {"stage": 3, "precision": "bf16", **ADAM}
    (wanted,) = run(pool, "one", trained, json, range(5))
    run(pool, way, over_nccl, "trained", json, range(3), "", str(tmp_path / "checkpoint"))
    late = run(pool, way, over_nccl, "trained", json, range(3, 5), str(tmp_path / "checkpoint"))
    check(late, (wanted[0][3:], wanted[1]))
