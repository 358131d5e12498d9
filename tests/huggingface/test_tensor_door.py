"""The promise: `tp_model_init`, `mpu` and DeepSpeed's names of groups mean the ranks that layers are cut over."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from models import config
from ranks import Pool
from torch import nn

import zero
from zero.parallel.grid_groups import GridGroups
from zero.plan.grid import Grid

RULES = {"layer_specs": [{"patterns": ["0.weight"]}, {"patterns": ["2.weight"], "partition_type": "row"}]}


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))


def said_by_names() -> list[Any]:
    """What deepspeed's names say before and after layers are cut, and of an engine beside it."""
    importlib.import_module("zero.as_deepspeed")  # first, wherever imports are sorted to
    import deepspeed
    import torch.distributed as dist
    from deepspeed.module_inject.layers import LinearLayer, is_autotp_training_mode
    from deepspeed.module_inject.tp_shard import get_shard_size_list
    from deepspeed.runtime.utils import is_model_parallel_parameter
    from deepspeed.utils import groups
    from deepspeed.utils.groups import get_tensor_model_parallel_world_size as ranks

    deepspeed.init_distributed()
    before = (ranks(), groups.get_data_parallel_world_size())
    json = config(1, 1, tensor_parallel={"partition_config": RULES})
    model = deepspeed.tp_model_init(net(), tp_size=2, dtype=torch.float32, config=json)
    engine, *_ = deepspeed.initialize(model=model, config=json)
    beside, *_ = deepspeed.initialize(model=net(), config=config(0, 2))
    group = groups.get_tensor_model_parallel_group()
    after = (ranks(), groups._get_data_parallel_world_size(), groups.get_tensor_model_parallel_src_rank())
    place = (
        groups.get_tensor_model_parallel_rank(),
        dist.get_process_group_ranks(group),
        engine.mpu.get_data_parallel_rank(),
    )
    cut = [is_model_parallel_parameter(param) for param in model.parameters()]
    with pytest.raises(NotImplementedError, match=r"LinearLayer is not in zero.*: the section tensor_parallel"):
        LinearLayer(net()[0], group)
    whole = deepspeed.comm.get_world_group() is dist.group.WORLD and is_autotp_training_mode()
    said = (engine.autotp_size(), beside.autotp_size(), engine.tensor_parallel_config().autotp_size)
    beside.destroy()
    engine.destroy()
    return [before, after, place, cut, whole, said, get_shard_size_list(10, 4)]


def test_names_of_groups_are_those_of_the_ranks_that_layers_are_cut_over(door: Pool) -> None:
    for rank, (before, after, place, *same) in enumerate(door.run(2, said_by_names)):
        assert (before, after, place) == ((1, 2), (2, 1, 0), (rank, [0, 1], 0))
        assert same == [[True, True, True, False], True, (2, 1, 0), [3, 3, 2, 2]]


@pytest.mark.ranks(2)
def test_megatrons_groups_say_which_ranks_layers_are_cut_over() -> None:
    """By the JSON or by `tp_model_init`; clipping and its norm are then those of the whole model."""
    for tell in (True, False):
        model = zero.tp_model_init(net(), 2) if tell else net()
        section = {"partition_config": RULES} | ({} if tell else {"autotp_size": 2})
        json = config(1, 1, tensor_parallel=section, gradient_clipping=1.0)
        engine, *_ = zero.initialize(model=model, config=json, mpu=GridGroups(Grid(2, {"tp": 2})))
        assert (tuple(model[0].weight.shape), engine.autotp_size(), engine.dp_world_size) == ((4, 4), 2, 1)
        engine.destroy()


@pytest.mark.ranks(2)
def test_what_contradicts_tp_model_init_is_refused() -> None:
    import torch.distributed as dist

    pair, alone = dist.group.WORLD, [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    two = {"tensor_parallel": {"autotp_size": 2}}
    cases = [
        ((1, None), {}, {}, two, "tensor_parallel.autotp_size: got 2, and tp_model_init was told 1; keep one"),
        ((2, None), {}, {}, {"tensor_parallel": {"tp": {"tp_size": 1}}}, "tensor_parallel.tp.tp_size: got 1, and"),
        ((2, torch.float16), {}, {}, {"bf16": {"enabled": True}}, "Conflicting dtype: bf16 is enabled, and tp_model"),
        (
            (2, None),
            {"tp_group": pair},
            {"mpu": GridGroups(Grid(2, {"tp": 2}))},
            two,
            "tp_model_init provided tp_group",
        ),
        (
            (2, None),
            {"tp_group": alone},
            {},
            two,
            r"tp_model_init\(tp_group=...\): got ranks \[.\]; wanted 2 from 0 on",
        ),
    ]
    for told, more, given, json, said in cases:
        model = zero.tp_model_init(net(), *told, **more)
        with pytest.raises(ValueError, match=said):
            zero.initialize(model=model, config=config(1, 1, **json), **given)
    for told, said in (((0,), "got 0; wanted"), ((2, None, {"tensor_parallel": {"autotp_size": 4}}), "got 4, and")):
        with pytest.raises(ValueError, match=said):
            zero.tp_model_init(net(), *told)
    with pytest.raises(ValueError, match="and an earlier call"):
        zero.tp_model_init(zero.tp_model_init(net(), 2), 4)


def accelerated(told: int, said: int) -> str:
    """What `Accelerator.prepare` says where ParallelismConfig and the JSON say numbers; else shapes and batches."""
    from huggingface_cases import filled, opened

    with opened():
        from accelerate import Accelerator, DeepSpeedPlugin, ParallelismConfig

        json = filled(1) | {"tensor_parallel": {"partition_config": RULES, "autotp_size": said}}
        parallel = ParallelismConfig(tp_size=told, dp_shard_size=2 // told)
        accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=json), parallelism_config=parallel)
        model = net()
        loader = torch.utils.data.DataLoader(torch.arange(8.0), batch_size=1)
        try:
            engine, _, loader = accelerator.prepare(model, torch.optim.Adam(model.parameters()), loader)
        except ValueError as error:
            return str(error)
        said = f"{tuple(model[0].weight.shape)} {[int(each) for each in loader]}"
        accelerator.free_memory()
        engine.destroy()
        return said


def test_accelerates_own_number_must_be_in_the_json(door: Pool) -> None:
    """Where it is, ranks that share layers get the same batches."""
    assert door.run(2, accelerated, 2, 2) == ["(4, 4) [0, 1, 2, 3, 4, 5, 6, 7]"] * 2
    assert all('say "tensor_parallel": {"autotp_size": 2} there' in said for said in door.run(2, accelerated, 2, 1))
