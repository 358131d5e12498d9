"""The promise: the engine's methods and attributes, what `describe()` says, and that exceptions spoil nothing."""

from __future__ import annotations

import argparse
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import batch, config, make_net, step
from torch import nn

import zero
from zero.core.comm import local_device
from zero.engine import Engine
from zero.utils import safe_get_local_fp32_param

SCHEDULE = {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 4, "warmup_type": "linear"}}


def alone(model: nn.Module | None = None, **more: Any) -> Any:
    """An engine of one process without a process group."""
    return zero.initialize(model=model or make_net(), config=config(0, 1, **more))


def test_initialize_returns_four():
    engine, optimizer, loader, scheduler = alone(scheduler=SCHEDULE)
    assert isinstance(engine, Engine)
    assert isinstance(engine, nn.Module)
    assert optimizer is engine.optimizer
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert loader is None
    assert scheduler is engine.lr_scheduler
    assert zero.initialize is zero.engine.initialize


def test_answers_of_the_configuration():
    engine = alone(micro=2, accumulation=3, gradient_clipping=0.7)[0]
    assert engine.get_batch_info() == (6, 2, 3)
    assert engine.train_batch_size() == 6
    assert (engine.zero_optimization(), engine.zero_optimization_stage()) == (False, 0)
    assert not engine.zero_optimization_partition_gradients()
    assert not engine.zero_optimization_partition_weights()
    assert not engine.fp16_enabled()
    assert not engine.bfloat16_enabled()
    assert not engine.amp_enabled()
    assert engine.gradient_clipping() == 0.7
    assert engine.get_lr() == [1e-2]
    assert engine.get_mom() == [(0.9, 0.999)]
    assert engine.get_type() == ["AdamW"]
    assert (engine.optimizer_name(), engine.scheduler_name(), engine.optimizer_params()["lr"]) == ("AdamW", None, 1e-2)
    assert engine.get_data_types() == (torch.float32, torch.float32) and engine.torch_autocast_dtype() is None
    assert (engine.communication_data_type, engine.initial_dynamic_scale()) == (torch.float32, 65536)
    assert engine.postscale_gradients() and not engine.zero_use_cpu_optimizer() and engine.zero_offload_param() is None
    assert (engine.global_rank, engine.world_size, engine.device.type) == (0, 1, local_device().type)
    assert engine.config["gradient_clipping"] == 0.7


def test_it_is_the_module_for_what_it_has_not_itself():
    engine = alone()[0]
    assert engine.eval() is engine
    assert not engine.module.blocks[0].training
    assert engine.train() is engine
    assert engine.module.blocks[0].training
    assert engine.blocks is engine.module.blocks
    with pytest.raises(AttributeError, match=r"^'Engine' object \(and its module Net\) has no attribute 'nonsense'$"):
        _ = engine.nonsense
    assert not hasattr(engine, "nonsense")


def test_counters_and_boundary():
    engine = alone(accumulation=3, scheduler=SCHEDULE)[0]
    seen = []
    for number in range(6):
        boundary = engine.is_gradient_accumulation_boundary()
        returned = engine.backward(loss := engine(*batch(number, 2)))
        assert returned.item() == pytest.approx(loss.item() / 3)
        assert not returned.requires_grad
        engine.step()
        applied = engine.was_step_applied()
        seen.append((boundary, applied, engine.micro_steps, engine.global_steps, engine.global_samples))
    assert seen == [
        (False, False, 1, 0, 0),
        (False, False, 2, 0, 0),
        (True, True, 3, 1, 6),
        (False, False, 4, 1, 6),
        (False, False, 5, 1, 6),
        (True, True, 6, 2, 12),
    ]
    assert engine.lr_scheduler.last_batch_iteration == 1


def test_global_grad_norm_is_before_clipping():
    norms = []
    for clipping in (0.0, 1e-3):
        engine = alone(gradient_clipping=clipping)[0]
        assert engine.get_global_grad_norm() is None
        engine.backward(engine(*batch(0, 2)))
        engine.step()
        norms.append(engine.get_global_grad_norm())
    plain = make_net()
    plain(*batch(0, 2)).backward()
    wanted = nn.utils.clip_grad_norm_(plain.parameters(), 1.0).item()
    assert norms[0] == norms[1] == pytest.approx(wanted, rel=1e-6)


def test_zero_grad_forgets_and_a_step_after_it_is_one_with_zero_gradients():
    optimizer = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.0}}
    engine, fresh = (alone(optimizer=optimizer)[0] for _ in range(2))
    before = [param.detach().clone() for param in engine.parameters()]
    engine.backward(engine(*batch(5, 2)))
    engine.zero_grad()
    engine.step()
    assert engine.was_step_applied()
    assert engine.get_global_grad_norm() == 0.0
    assert all(torch.equal(a, b) for a, b in zip(before, engine.parameters(), strict=True))
    for each in (engine, fresh):
        step(each, 0)
    assert engine.get_global_grad_norm() == fresh.get_global_grad_norm()


def test_a_graph_from_before_the_step_is_refused_as_in_torch():
    engine = alone()[0]
    loss = engine(*batch(0, 2))
    engine.backward(loss, retain_graph=True)
    engine.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        engine.backward(loss)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"config_params": {}}, "initialize() got config and config_params, which say the same; pass one of them"),
        ({"mpu": object()}, "mpu: got a object; wanted an object with get_data_parallel_group()"),
        ({"mesh_param": 4}, "mesh_param: got 4; wanted a DeviceMesh, (replicas, shards), or a mapping such as"),
        ({"mpu": object(), "mesh_param": (1, 1)}, "initialize() got mesh_param and mpu, which say the same"),
        ({"model_parameters": [3]}, "model_parameters: group 0 holds a int; wanted parameters"),
        ({"model_parameters": [nn.Parameter(torch.ones(2))]}, "optimizer group 0 holds a parameter of shape (2,) that"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(ValueError) as raised:
        zero.initialize(**{"model": make_net(), "config": config(0, 1), **arguments})
    assert str(raised.value).startswith(message)


def test_units_by_name():
    engine = alone(zero={"units": ["Linear"]})[0]
    assert {"blocks.0.up", "head"} <= {unit.name for unit in engine.describe().units}


def test_one_engine_at_a_time_per_parameter():
    net = make_net()
    engine = alone(net)[0]
    with pytest.raises(ValueError, match=r"parameter 'embed.weight' belongs to another engine"):
        alone(net)
    engine.destroy()


@pytest.mark.parametrize("loss", [3.0, torch.ones(2, requires_grad=True), torch.ones(())], ids=str)
def test_wrong_losses(loss):
    with pytest.raises(ValueError, match="wants the loss, a scalar tensor with a graph; got"):
        alone()[0].backward(loss)


def test_without_optimizer_only_inference():
    settings = {key: value for key, value in config(0, 1).items() if key != "optimizer"}
    engine, optimizer, *_ = zero.initialize(model=make_net(), config=settings)
    assert optimizer is None
    loss = engine(*batch(0, 2))
    for call in (lambda: engine.backward(loss), engine.step):
        with pytest.raises(RuntimeError, match="needs an optimizer"):
            call()


def test_config_from_a_file_and_from_arguments(tmp_path: Path):
    path, settings = tmp_path / "zero.json", {**config(0, 1), "steps_per_print": 1000}
    path.write_text(json.dumps(settings))
    parser = zero.add_config_arguments(argparse.ArgumentParser())

    def size(**given: Any) -> int:
        return zero.initialize(model=make_net(), **given)[0].train_batch_size()

    assert size(config=str(path)) == 2
    for flag in ("--zero_config", "--deepspeed_config"):
        assert size(args=parser.parse_args([flag, str(path)])) == 2
    for given in (str(path), path):  # as scripts with a parser of their own have it
        assert size(args=argparse.Namespace(deepspeed_config=given)) == 2
    assert isinstance(parser.parse_args(["--deepspeed_config", "x.json"]).deepspeed_config, str), "as in DeepSpeed"
    for given in ({"local_rank": 0}, {"zero_config": "no such file"}, [], 3, "flags"):
        for name in ("config", "config_params"):
            assert size(args=given, **{name: settings}) == 2
    with pytest.raises(ValueError, match="got a dict, which is the configuration"):
        zero.initialize({"local_rank": 0}, make_net())


def test_memory_and_configuration_are_printed(caplog):
    asked = {"memory_breakdown": True, "dump_state": True, "steps_per_print": 1}
    with caplog.at_level(logging.INFO, logger="zero"):
        engine = alone(**asked)[0]
        engine.backward(engine(*batch(0, 2)))
        engine.step()
    lines = [record.getMessage() for record in caplog.records]
    assert "stage 0 on 1 rank, " in lines[0]
    assert f"{sum(p.numel() for p in engine.parameters()):,} parameters in fp32, 4 units" in lines[0]
    assert '"stage":' in next(line for line in lines if line.startswith("configuration: "))
    assert lines[-1].startswith("model state on rank 0 (MiB) | parameters: 0.0 | gradients: 0.0 | optimizer: 0.0")


# --- describe --------------------------------------------------------------------------------------------------------


HOST = {"device": "cpu", "pin_memory": False}


@pytest.mark.ranks(2)
def test_the_elements_that_it_names_are_those_that_the_rank_updates() -> None:
    engine, *_ = zero.initialize(model=make_net(), config=config(3, 2))
    named, values = dict(engine.module.named_parameters()), dict(make_net().named_parameters())
    owned = {name: torch.zeros(value.numel()) for name, value in values.items()}
    for one in (one for unit in engine.describe().units for one in unit.parameters):
        piece = safe_get_local_fp32_param(named[one.name])
        if (span := one.owners.get(dist.get_rank())) is not None:
            owned[one.name][span.start : span.stop] = 1
            assert torch.equal(piece.flatten(), values[one.name].flatten()[span.start : span.stop])
    assert sum(one.sum() for one in owned.values()) > 0
    for one in owned.values():
        dist.all_reduce(one)
        assert one.eq(1).all(), "each element has one owner"
    engine.destroy()


def test_shapes_placements_and_state_are_said() -> None:
    model = make_net()
    shapes = {name: tuple(param.shape) for name, param in model.named_parameters()}
    for param in model.blocks[0].parameters():
        param.requires_grad_(False)
    settings = config(3, 1, zero_optimization={"stage": 3, "offload_optimizer": HOST, "offload_param": HOST})
    engine, *_ = zero.initialize(model=model, config=settings)
    found = engine.describe()
    assert {one.name: one.shape for unit in found.units for one in unit.parameters} == shapes
    frozen, trained = found.units[1], found.units[2]
    assert (frozen.name, frozen.optimizer, frozen.params) == ("blocks.0", "none", "host")
    assert (trained.name, trained.optimizer, trained.group, trained.state) == ("blocks.1", "host", 0, "sharded")
    text = str(found)
    assert "blocks.1: 661 x fp32, cut, sharded, parameters: host; group 0, optimizer state: host" in text
    assert "    blocks.1.up.weight    25x12         rank 0 [0:300]" in text
    assert "not updated" in text
    engine.destroy()


def test_what_is_only_told_a_count_or_a_time_ends_no_run(caplog: pytest.LogCaptureFixture):
    engine = alone()[0]
    speed, forward = engine.tput_timer, engine.timers("forward")
    speed.stop(global_step=True)  # what was not started counts nothing
    for _ in range(2):
        forward.start()
        speed.start()
        engine(*batch(0, 2))
        speed.stop(global_step=True, report_speed=False)
        forward.stop(record=True)
        forward.stop()
    assert speed.global_step_count == speed.micro_step_count == forward.count == 2
    assert speed.avg_samples_per_sec() == pytest.approx(2 * 2 / speed.seconds) and speed.batch_size == 2
    speed.update_epoch_count()
    assert (engine.tput_timer.epoch_count, engine.tput_timer.micro_step_count) == (1, 0)
    assert engine.timers("forward") is forward and list(engine.timers.get_timers()) == ["forward"]
    mean = engine.timers.get_mean(["forward", "never"], reset=False)["forward"]
    assert 2 * mean == pytest.approx(forward.elapsed(reset=False)) and mean >= 1e3 * speed.seconds / 2 > 0
    with caplog.at_level("INFO", "zero"):
        engine.timers.log(["forward", "never"], memory_breakdown=True, ranks=[0])
        engine.print_forward_breakdown(1.5)
    assert f"time (ms) | forward: {2 * mean:.2f}" in caplog.text and "forward: 1.5 ms" in caplog.text
    assert forward.elapsed() == 0.0, "the log began it again"
