"""The promise: what programs import of DeepSpeed beside its engine does here what it does there."""

from __future__ import annotations

import copy
import importlib
import os
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_cases import filled, opened
from models import config, make_net, step
from ranks import Pool
from torch import nn

import zero


def of_the_accelerator() -> tuple[list[torch.dtype], list[int], bool]:
    """Dtypes, devices as variables say, and whether a peak of memory is seen and forgotten."""
    with opened():
        from deepspeed.accelerator import get_accelerator, is_current_accelerator_supported

        device = get_accelerator()
        assert is_current_accelerator_supported()
        assert device.random().initial_seed() == torch.initial_seed()
        device.manual_seed(5)
        assert torch.initial_seed() == 5
        device.range_push("part")
        device.range_pop()
        assert not device.is_pinned(torch.ones(2))
        counts = []
        for there in ({"LOCAL_SIZE": "3"}, {"LOCAL_WORLD_SIZE": "2"}, {}):
            for name in ("LOCAL_SIZE", "LOCAL_WORLD_SIZE"):
                os.environ.pop(name, None)
            os.environ.update(there)
            counts.append(device.device_count())
        device.reset_peak_memory_stats()
        before = device.max_memory_allocated()
        values = torch.ones(10_000_000)
        grown = device.max_memory_allocated() - before > values.nbytes / 2
        del values
        device.reset_peak_memory_stats()
        return device.supported_dtypes(), counts, grown and device.max_memory_allocated() - before < 20_000_000


@pytest.mark.skipif(torch.cuda.is_available(), reason="of the CPU")
def test_the_accelerator_of_a_cpu_answers(door: Pool) -> None:
    assert door.run(1, of_the_accelerator) == [([torch.float, torch.half, torch.bfloat16], [3, 2, 1], True)]


def of_comm() -> list[Any]:
    """The own local rank, a sum over the ranks, and what was sent."""
    with opened():
        import deepspeed
        import deepspeed.comm as dist
        from deepspeed.utils import is_initialized

        with pytest.raises(RuntimeError, match="set comms_logger"):
            dist.log_summary()
        model = nn.Linear(4, 3)
        config = {**filled(3), "comms_logger": {"enabled": True}}
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        engine.backward(engine(torch.ones(2, 4)).sum())
        engine.step()
        assert dist.log_summary() is None
        summary = dist.log_summary(return_dict=True)["summary"]
        engine.destroy()
        total = torch.full((2,), dist.get_rank() + 1.0)
        dist.inference_all_reduce(total)
        return [
            is_initialized(),
            total.tolist(),
            summary["gather"]["count"] > 0,
            dist.get_local_rank() == dist.get_rank(),
        ]


def test_comm_has_what_torch_has_not(door: Pool) -> None:
    assert door.run(2, of_comm) == [[True, [3.0, 3.0], True, True]] * 2


def of_utils() -> list[Any]:
    """Memory printed once, seeds, nested values, and a norm that ranks agree about."""
    with opened():
        import deepspeed
        from deepspeed.runtime.utils import clip_grad_norm_, move_to_device, see_memory_usage, set_random_seed

        see_memory_usage("now", force=True)
        drawn = []
        for _ in range(2):
            set_random_seed(3)
            drawn.append((random.random(), np.random.rand(), torch.rand(1).item()))
        assert drawn[0] == drawn[1]
        nested = {"a": [torch.ones(1), (torch.ones(2), 3)], "b": "text"}
        moved = move_to_device(nested, "meta")
        assert moved["a"][0].is_meta and moved["a"][1][0].is_meta and moved["b"] == "text"
        kept = torch.ones(2)
        assert move_to_device([kept], "cpu", torch.is_tensor)[0] is kept
        rank = torch.distributed.get_rank()
        param = nn.Parameter(torch.zeros(2))
        param.grad = torch.tensor([3.0, 4.0]) * (1 + rank)  # norms 5 and 10, of which the mean is 7.5
        norm = clip_grad_norm_(param, 1.5)
        model = nn.Linear(4, 3)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=filled(2))
        with pytest.raises(ValueError, match="set gradient_clipping in the JSON"):
            clip_grad_norm_(model.parameters(), 1.0)
        engine.destroy()
        return [norm.item(), (param.grad.norm() / (1 + rank)).item()]


def test_the_helpers_of_scripts(door: Pool) -> None:
    for norm, clipped in door.run(2, of_utils):
        assert norm == 7.5
        assert clipped == pytest.approx(1.0, rel=1e-5)


def states_away(number: int) -> None:
    """Move states away by the members of DeepSpeed's enums, and back; a JSON may have one, too."""
    with opened():
        import deepspeed
        from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum

        model = nn.Linear(4, 3)
        config = {**filled(number, offload_optimizer={"device": OffloadDeviceEnum.none})}
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        before = [each.clone() for each in engine.optimizer.single_partition_of_fp32_groups]
        engine.offload_states(include=list(OffloadStateTypeEnum), device=OffloadDeviceEnum.cpu)
        with pytest.raises(RuntimeError, match="call reload_states"):
            engine(torch.ones(2, 4))
        engine.reload_states()
        assert all(map(torch.equal, before, engine.optimizer.single_partition_of_fp32_groups))
        engine.destroy()


def test_states_are_offloaded_by_the_members_of_enums(door: Pool) -> None:
    door.run(2, states_away, 3)


def of_configs() -> list[Any]:
    """What a configuration says by DeepSpeed's names, and what is raised for a wrong one."""
    with opened():
        from deepspeed import DeepSpeedConfig, DeepSpeedConfigError

        zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
        adam = {"type": "AdamW", "params": {"lr": 1.0}}
        made = copy.copy(DeepSpeedConfig({"train_batch_size": 8, "zero_optimization": zero, "optimizer": adam}))
        mpu = SimpleNamespace(get_data_parallel_world_size=lambda: 4)
        sizes = [DeepSpeedConfig({"train_batch_size": 8}, each).train_micro_batch_size_per_gpu for each in (None, mpu)]
        with pytest.raises(DeepSpeedConfigError, match=r"zero_optimization\.stage: got 5"):
            DeepSpeedConfig({"train_batch_size": 8, "zero_optimization": {"stage": 5}})
        with pytest.raises(AttributeError, match="no_such_key"):
            made.no_such_key  # noqa: B018
        with pytest.raises(DeepSpeedConfigError):
            __import__("deepspeed").initialize(model=nn.Linear(2, 2), config={"train_batch_size": 8, "fp16": 3})
        named = [made.zero_enabled, made.zero_optimization_stage, made.zero_config.stage, made.fp16_enabled]
        return [*named, made.optimizer_name, made.optimizer_params, made.scheduler_name, made.gradient_clipping, *sizes]


def test_a_configuration_by_itself(door: Pool) -> None:
    assert door.run(2, of_configs)[0] == [True, 2, 2, False, "AdamW", {"lr": 1.0}, None, 1.0, 4, 2]


def of_models() -> list[Any]:
    """Paths, groups of parameters, schedules and FLOPs."""
    with opened():
        from deepspeed.compression.helper import recursive_getattr, recursive_setattr
        from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer as split
        from deepspeed.profiling.flops_profiler import get_model_profile
        from deepspeed.runtime import lr_schedules

        model = nn.Sequential(nn.Linear(8, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 2)))
        found = recursive_getattr(model, "1.1")
        recursive_setattr(model, "1.1", nn.Linear(4, 3))
        recursive_setattr(model, "0", model[0])
        assert found.out_features == 2 and model[1][1].out_features == 3
        group = {"params": list(model.parameters()), "name": "all"}
        assert split(group) == [group] == split((group,))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        params = {lr_schedules.CYCLE_MIN_LR: 0.1, lr_schedules.CYCLE_MAX_LR: 0.2, lr_schedules.CYCLE_FIRST_STEP_SIZE: 1}
        cycle = lr_schedules.OneCycle(optimizer, **params, cycle_second_step_size=3, cycle_momentum=False)
        warm = lr_schedules.WarmupLR(optimizer, **{lr_schedules.WARMUP_MAX_LR: 0.5})
        assert not hasattr(lr_schedules.WarmupCosineLR(optimizer, 10), "max_lrs")
        whole = get_model_profile(model, (2, 8), print_profile=False, as_string=False)
        with torch.no_grad():
            said = get_model_profile(model, args=[torch.ones(2, 8)], warm_up=0)
        assert model.training and "forward" not in vars(model)
        return [cycle.min_lrs, cycle.max_lrs, cycle.step_ratio, warm.min_lrs, warm.max_lrs, whole, said]


def test_models_are_looked_at_by_its_functions(door: Pool) -> None:
    macs = 2 * (8 * 4 + 4 * 3)
    cycle, warm = [[0.1], [0.2], 0.25], [[0.0], [0.5]]
    texts = (f"{2 * macs} ", f"{macs} MACs", "51 ")
    assert door.run(1, of_models) == [[*cycle, *warm, (2 * macs, macs, 51), texts]]


# --- optimizers ------------------------------------------------------------------------------------------------------


NUMBERS = {"lr": 0.01, "weight_decay": 0.1}
# Module, class and what it is called with; and what the JSON says.
CLASSES = [
    ("adam", "DeepSpeedCPUAdam", {"adamw_mode": False}, "Adam", {"adam_w_mode": False}),
    ("adam", "FusedAdam", {"set_grad_none": True}, "AdamW", {}),
    ("adagrad", "DeepSpeedCPUAdagrad", {"eps": 1e-6}, "Adagrad", {"eps": 1e-6}),
    ("lamb", "FusedLamb", {"max_coeff": 0.5}, "Lamb", {"max_coeff": 0.5}),
    ("lion", "FusedLion", {"betas": (0.8, 0.9)}, "Lion", {"betas": [0.8, 0.9]}),
]


def trained(kind: str, more: dict[str, Any], make: Any = None) -> list[torch.Tensor]:
    model, settings = make_net(), config(2, 2)
    settings["optimizer"] = {"type": kind, "params": {**NUMBERS, **more}}
    optimizer = None if make is None else make(model.parameters())
    if make is not None:
        del settings["optimizer"]
    engine, *_ = zero.initialize(model=model, optimizer=optimizer, config=settings)
    for number in range(3):
        step(engine, number)
    weights = [param.detach().clone() for param in model.parameters()]
    engine.destroy()
    return weights


def of_ops(module: str, name: str) -> Any:
    importlib.import_module("zero.as_deepspeed")
    return getattr(importlib.import_module(f"deepspeed.ops.{module}"), name)


def by_both(module: str, name: str, given: dict[str, Any], kind: str, more: dict[str, Any]) -> bool:
    made = of_ops(module, name)
    ours = trained(kind, more, lambda params: made(params, **NUMBERS, **given))
    assert not all(map(torch.equal, ours, make_net().parameters()))
    return all(map(torch.equal, ours, trained(kind, more)))


@pytest.mark.parametrize("case", CLASSES, ids=[name for _, name, *_ in CLASSES])
def test_it_updates_as_the_json_says(door: Any, case: tuple[Any, ...]) -> None:
    assert door.run(2, by_both, *case) == [True, True]


def refused(more: dict[str, Any]) -> str:
    with pytest.raises(ValueError) as error:
        of_ops("lamb", "FusedLamb")(make_net().parameters(), **more)
    return str(error.value)


def test_a_limit_for_the_norm_is_refused_where_the_engine_has_its_own(door: Any) -> None:
    assert "set gradient_clipping in the JSON instead" in door.run(1, refused, {"max_grad_norm": 1.0})[0]
