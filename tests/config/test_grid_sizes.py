"""The promise: JSON, `mesh_param` and `mpu` say the sizes of the grid in one place, and all else counts data ranks."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import torch.distributed as dist
from exact import WAYS, Exact
from models import config
from ranks import said_by
from torch import nn
from torch.utils.data import TensorDataset

import zero
from zero.__main__ import main
from zero.config import ConfigError, load
from zero.config.grid_sizes import Told
from zero.parallel.grid_groups import GridGroups
from zero.plan.grid import AXES, Grid

TP = {"tensor_parallel": {"autotp_size": 2}}
EP = {"expert_parallel": {"enabled": True, "autoep_size": 2}}


def sizes(values: dict[str, Any], world: int, told: dict[str, int] | None = None) -> str:
    grid = load({"train_micro_batch_size_per_gpu": 1, **values}, world, Told(told or {}, "mesh_param")).grid
    found = [f"{axis} {grid.size(axis)}" for axis in (*AXES, "ep") if grid.size(axis) > 1]
    return " ".join(found)


STAGE = {"zero_optimization": {"stage": 2}}


@pytest.mark.parametrize(
    ("values", "world", "told", "said"),
    [
        ({}, 4, {}, "dp_replicate 4"),
        (STAGE, 4, {}, "dp_shard 4"),
        (STAGE | TP, 8, {}, "dp_shard 4 tp 2"),
        (STAGE | {"tensor_parallel": {"tp": {"tp_size": 2}}}, 2, {}, "tp 2"),
        (STAGE | TP | {"sequence_parallel_size": 2}, 8, {}, "dp_shard 2 cp 2 tp 2"),
        (STAGE | TP | {"pipeline": {"stages": 2}}, 8, {}, "pp 2 dp_shard 2 tp 2"),
        (STAGE | EP, 4, {}, "dp_shard 4 ep 2"),
        (EP, 4, {}, "dp_shard 4 ep 2"),
        (STAGE | EP, 4, {"dp_shard": 4, "ep": 2}, "dp_shard 4 ep 2"),
        (STAGE | {"zero": {"shard_size": 2}} | TP, 8, {}, "dp_replicate 2 dp_shard 2 tp 2"),
        (STAGE, 8, {"tp": 2, "pp": 2}, "pp 2 dp_shard 2 tp 2"),
        (STAGE | TP, 8, {"tp": 2}, "dp_shard 4 tp 2"),
        ({"expert_parallel": {"enabled": False, "autoep_size": 2}}, 2, {}, "dp_replicate 2"),
    ],
)
def test_sizes(values, world, told, said):
    assert sizes(values, world, told) == said


@pytest.mark.parametrize(
    ("values", "world", "told", "said"),
    [
        (TP, 4, {"tp": 4}, "tensor_parallel.autotp_size: got 2, and mesh_param says 4; keep one of the two"),
        (
            {"tensor_parallel": {"autotp_size": 2, "tp": {"tp_size": 4}}},
            8,
            {},
            "tensor_parallel.tp.tp_size: got 4, and tensor_parallel.autotp_size says 2; keep one of the two",
        ),
        ({"tensor_parallel": {"autotp_size": 3}}, 4, {}, "tensor_parallel.autotp_size: "),
        ({"pipeline": {"stages": "two"}}, 4, {}, "pipeline.stages: got 'two', wanted an integer of at least 1"),
        (EP | {"expert_parallel": {"enabled": True, "autoep_size": 3}}, 4, {}, "expert_parallel.autoep_size: "),
        ({"pipeline": {"stages": 2, "interval": 2}}, 4, {}, "pipeline: unknown key 'interval'"),
        ({"expert_parallel": {"enabled": True, "preset_model": "x"}}, 4, {}, "expert_parallel: is not there yet"),
        (
            {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}} | TP,
            8,
            {},
            "zero_optimization.zero_hpz_partition_size: got more than 1 with pp x tp 2",
        ),
    ],
)
def test_contradictions(values, world, told, said):
    with pytest.raises(ConfigError) as caught:
        sizes(values, world, told)
    assert any(line.startswith(said) for line in str(caught.value).splitlines()), str(caught.value)


def test_what_does_not_fit_names_the_nearest_sizes():
    with pytest.raises(ConfigError, match=r"tensor_parallel\.autotp_size: .*nearest that fit: tp 2 x .* or tp 4"):
        sizes({"tensor_parallel": {"autotp_size": 3}}, 4)


@pytest.mark.ranks(4)
def test_batches_loaders_and_groups_count_data_ranks():
    """Said by the JSON, by sizes and by Megatron's object; under `zero.Init`, too."""
    way, data = WAYS["tp 2 x dp 2"], TensorDataset(torch.arange(8))
    values = config(1, 2)
    ways = [(values | TP, {}), (values, {"mesh_param": {"tp": 2}}), (values, {"mpu": GridGroups(Grid(4, {"tp": 2}))})]
    for settings, more in ways:
        engine, _, loader, _ = zero.initialize(model=Exact(way), config=settings, training_data=data, **more)
        seen = sorted(int(index) for (part,) in loader for index in part)
        assert (engine.dp_world_size, engine.train_batch_size(), len(seen)) == (2, 4, 4)
        groups = zero.groups(engine)
        assert groups.get_tensor_model_parallel_world_size() == 2 == groups.get_data_parallel_world_size()
        assert groups.get_data_parallel_rank() == dist.get_rank() // 2 == engine.get_data_parallel_rank()
        assert (engine.get_tensor_parallel_rank(), engine.get_model_parallel_rank()) == (dist.get_rank() % 2,) * 2
        assert (engine.mp_world_size, engine.seq_dp_world_size) == (2, 2)
        engine.destroy()
    with zero.Init(config_dict_or_path=config(3, 2), mesh_param={"tp": 2}):  # not "4 ranks, and 2 x 2 is not 4"
        assert nn.Linear(2, 2) is not None


@pytest.mark.ranks(2)
def test_a_form_that_no_layer_uses_is_refused_by_the_name_of_its_axis():
    said = said_by(lambda: zero.initialize(model=nn.Linear(4, 4), config=config(1, 1) | TP))
    assert said.startswith("ValueError: tensor_parallel.autotp_size 2: nothing tells how Linear is cut; its layers are")
    for form, axis, sizes in ((EP, "ep", None), ({}, "pp", {"pp": 2})):
        json = config(1, 2 if form is EP else 1) | form
        said = said_by(lambda: zero.initialize(model=nn.Linear(4, 4), config=json, mesh_param=sizes))  # noqa: B023
        assert said.startswith(f"ValueError: initialize(): {axis} is 2, and ")


def test_a_dry_run_prints_the_groups(tmp_path, capsys):
    path, script = tmp_path / "zero.json", tmp_path / "train.py"
    path.write_text(json.dumps({"train_micro_batch_size_per_gpu": 1, **STAGE, **TP}))
    script.write_text("")
    assert main(["run", "--num_gpus", "4", "--dry-run", "--config", str(path), str(script)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[:3] == ["# 4 ranks: dp_shard 2 x tp 2", "# tensor parallel (tp): 2 of 2", "#   [0, 1] [2, 3]"]
    assert said[3:5] == ["# data parallel (dp): 2 of 2", "#   [0, 2] [1, 3]"]
    assert main(["run", "--num_gpus", "3", "--dry-run", "--config", str(path), str(script)]) == 2
    assert "tensor_parallel.autotp_size" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (EP, "expert_parallel.autoep_size: of a number of parameters no layers are known"),
        (TP, "tensor_parallel.autotp_size: of a number of parameters no layers are known"),
    ],
)
def test_what_does_not_count_on_parts_of_a_model_says_so(tmp_path, capsys, form, text):
    path = tmp_path / "zero.json"
    path.write_text(json.dumps({"train_micro_batch_size_per_gpu": 1, **STAGE, **form}))
    assert main(["plan", "--params", "1e6", "--world", "4", "--config", str(path)]) == 2
    assert text in capsys.readouterr().err
