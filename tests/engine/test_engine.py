"""The promise: the engine's methods and attributes, and that an exception does not spoil it."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from closeness import error, ulps
from models import batch, config, make_net
from torch import nn

import zero
from zero.engine import Engine

SCHEDULE = {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 4, "warmup_type": "linear"}}


def share(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    rank = dist.get_rank()
    tokens, targets = batch(step, 2 * dist.get_world_size())
    return tokens[2 * rank : 2 * rank + 2], targets[2 * rank : 2 * rank + 2]


def alone(model: nn.Module | None = None, **more: Any) -> Any:
    """An engine of one process without a process group."""
    return zero.initialize(model=model or make_net(), config=config(0, 1, **more))


# --- in one process -----------------------------------------------------------------------------------------


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
    assert (engine.global_rank, engine.world_size, engine.device.type) == (0, 1, local_type())
    assert engine.config["gradient_clipping"] == 0.7


def local_type() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def test_train_and_eval_return_the_engine_and_reach_the_module():
    engine = alone()[0]
    assert engine.eval() is engine
    assert not engine.module.blocks[0].training
    assert engine.train() is engine
    assert engine.module.blocks[0].training


def test_unknown_attributes_come_from_the_module():
    engine = alone()[0]
    assert engine.blocks is engine.module.blocks
    with pytest.raises(AttributeError, match=r"^'Engine' object \(and its module Net\) has no attribute 'nonsense'$"):
        _ = engine.nonsense
    assert not hasattr(engine, "nonsense")


def test_counters_and_boundary():
    engine = alone(accumulation=3, scheduler=SCHEDULE)[0]
    seen = []
    for step in range(6):
        boundary = engine.is_gradient_accumulation_boundary()
        returned = engine.backward(loss := engine(*batch(step, 2)))
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


def test_boundary_set_by_hand():
    engine = alone(accumulation=4)[0]
    engine.set_gradient_accumulation_boundary(True)
    engine.backward(engine(*batch(0, 2)))
    engine.step()
    assert engine.global_steps == 1
    engine.set_gradient_accumulation_boundary(False)
    engine.step()
    assert engine.global_steps == 1
    engine.set_gradient_accumulation_boundary(None)
    assert not engine.is_gradient_accumulation_boundary()


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


def test_zero_grad_forgets():
    engine = alone(accumulation=2)[0]
    engine.backward(engine(*batch(5, 2)))
    engine.zero_grad()
    plain = alone(accumulation=2)[0]
    for each in (engine, plain):
        each.step()
        each.backward(each(*batch(0, 2)))
        each.step()
    assert engine.get_global_grad_norm() == plain.get_global_grad_norm()


def test_a_step_after_zero_grad_is_one_with_zero_gradients():
    engine = alone(optimizer={"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.0}})[0]
    before = [param.detach().clone() for param in engine.parameters()]
    engine.backward(engine(*batch(0, 2)))
    engine.zero_grad()
    engine.step()
    assert engine.was_step_applied()
    assert engine.get_global_grad_norm() == 0.0
    assert all(torch.equal(a, b) for a, b in zip(before, engine.parameters(), strict=True))


def test_not_finite_gradient_skips_and_names(caplog):
    engine = alone(scheduler=SCHEDULE)[0]
    before = [param.detach().clone() for param in engine.parameters()]
    poison = engine.module.blocks[1].down.weight.register_hook(lambda grad: grad * float("inf"))
    with caplog.at_level(logging.WARNING, logger="zero"):
        engine.backward(engine(*batch(0, 2)))
        engine.step()
    poison.remove()
    assert "step skipped: the gradient of parameter 'blocks.1.down.weight' is not finite" in caplog.text
    assert all(torch.equal(a, b) for a, b in zip(before, engine.parameters(), strict=True))
    assert (engine.was_step_applied(), engine.skipped_steps, engine.global_steps) == (False, 1, 1)
    assert engine.optimizer.overflow
    assert engine.lr_scheduler.last_batch_iteration == -1
    engine.backward(engine(*batch(1, 2)))
    engine.step()
    assert (engine.was_step_applied(), engine.skipped_steps) == (True, 1)


def test_a_graph_from_before_the_step_is_refused_as_in_torch():
    engine = alone()[0]
    loss = engine(*batch(0, 2))
    engine.backward(loss, retain_graph=True)
    engine.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        engine.backward(loss)


def test_changing_the_learning_rate_acts_at_once():
    engine, optimizer, *_ = alone(optimizer={"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.0}})
    optimizer.param_groups[0]["lr"] = 0.0
    before = [param.detach().clone() for param in engine.parameters()]
    engine.backward(engine(*batch(0, 2)))
    engine.step()
    assert all(torch.equal(a, b) for a, b in zip(before, engine.parameters(), strict=True))


def test_parameter_groups_keep_their_own_settings():
    net = make_net()
    frozen_rate = list(net.head.parameters())
    rest = [param for name, param in net.named_parameters() if not name.startswith("head")]
    groups = [{"params": rest}, {"params": frozen_rate, "lr": 0.0, "weight_decay": 0.0}]
    engine, *_ = zero.initialize(model=net, model_parameters=groups, config=config(0, 1))
    before = {name: param.detach().clone() for name, param in net.named_parameters()}
    engine.backward(engine(*batch(0, 2)))
    engine.step()
    for name, param in net.named_parameters():
        assert torch.equal(param, before[name]) == name.startswith("head"), name
    assert engine.get_lr() == [1e-2, 0.0]


def test_a_client_optimizer_and_scheduler():
    net, plain = make_net(), make_net()
    client = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(client, 1, gamma=0.5)
    settings = {key: value for key, value in config(0, 1).items() if key != "optimizer"}
    engine, *_ = zero.initialize(model=net, optimizer=client, lr_scheduler=scheduler, config=settings)
    wanted = torch.optim.SGD(plain.parameters(), lr=0.5, momentum=0.9)
    decay = torch.optim.lr_scheduler.StepLR(wanted, 1, gamma=0.5)
    for step in range(3):
        engine.backward(engine(*batch(step, 2)))
        engine.step()
        plain(*batch(step, 2)).backward()
        wanted.step()
        wanted.zero_grad()
        decay.step()
    assert engine.get_lr() == [0.0625]
    theirs = list(plain.parameters())
    assert error(net.parameters(), theirs) <= ulps(8, theirs)


def test_training_data_becomes_a_loader():
    data = torch.utils.data.TensorDataset(*batch(0, 10))
    loader = zero.initialize(model=make_net(), config=config(0, 1), training_data=data)[2]
    assert len(loader) == 5
    assert [len(tokens) for tokens, _ in loader] == [2] * 5
    first, second = [torch.cat([tokens for tokens, _ in loader]) for _ in range(2)]
    assert not torch.equal(first, second), "each epoch shuffles anew"
    assert sorted(map(tuple, first.tolist())) == sorted(map(tuple, second.tolist()))


def test_destroy_gives_the_module_back():
    net = make_net()
    engine = alone(net)[0]
    engine.destroy()
    engine.destroy()
    with pytest.raises(RuntimeError, match="this engine was destroyed"):
        engine(*batch(0, 2))
    net(*batch(0, 2)).backward()
    assert all(param.grad is not None for param in net.parameters())
    again = alone(net)[0]
    again.backward(again(*batch(0, 2)))
    again.step()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": None}, "initialize() needs model=<torch.nn.Module>; got NoneType"),
        ({"config": None}, "initialize() needs a configuration: pass config=<path or dict>, or args"),
        (
            {"config_params": {}},
            "initialize() got more than one configuration: config, config_params; pass one of them",
        ),
        ({"mpu": object()}, "mpu: got a object; wanted an object with get_data_parallel_group()"),
        ({"mesh_param": 4}, "mesh_param: got 4; wanted a DeviceMesh, (replicas, shards), or a mapping such as"),
        ({"mesh_param": (1, 2)}, "mesh_param: dp_replicate 1 x dp_shard 2 = 2 ranks, but there are 1"),
        ({"mpu": object(), "mesh_param": (1, 1)}, "got mesh_param and mpu, which say the same; pass one of them"),
        ({"model_parameters": []}, "model_parameters: no parameter requires a gradient"),
        ({"model_parameters": [3]}, "model_parameters: group 0 holds a int; wanted parameters"),
        ({"model_parameters": [nn.Parameter(torch.ones(2))]}, "optimizer group 0 holds a parameter of shape (2,) that"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(ValueError) as raised:
        zero.initialize(**{"model": make_net(), "config": config(0, 1), **arguments})
    assert str(raised.value).startswith(message)


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        ({"type": "AdmaW"}, "optimizer.type: unknown optimizer 'AdmaW'; did you mean 'AdamW'?"),
        ({"type": "LBFGS"}, "optimizer.type: 'LBFGS' cannot run on shards: it needs a closure"),
        (
            {"type": "RMSprop", "params": {"momentun": 1}},
            "optimizer.params: torch.optim.RMSprop refuses {'momentun': 1}",
        ),
    ],
)
def test_wrong_optimizers(optimizer, message):
    with pytest.raises(ValueError) as raised:
        alone(optimizer=optimizer)
    assert str(raised.value).startswith(message)


def test_units_by_name():
    with pytest.raises(ValueError, match=r"zero.units: \['Blok'\] match no module of the model; did you mean 'Block'?"):
        alone(zero={"units": ["Blok"]})
    engine = alone(zero={"units": ["Linear"]})[0]
    names = [unit.plan.name for unit in engine._sharded.units]
    assert "blocks.0.up" in names
    assert "head" in names


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
    import argparse
    import json

    path = tmp_path / "zero.json"
    settings = config(0, 1)
    settings["steps_per_print"] = 1000
    path.write_text(json.dumps(settings))
    assert zero.initialize(model=make_net(), config=str(path))[0].train_batch_size() == 2
    parser = zero.add_config_arguments(argparse.ArgumentParser())
    for flag in ("--zero_config", "--deepspeed_config"):
        args = parser.parse_args([flag, str(path)])
        assert zero.initialize(args=args, model=make_net())[0].train_batch_size() == 2
    for given in (str(path), path):  # as scripts with a parser of their own have it
        args = argparse.Namespace(deepspeed_config=given)
        assert zero.initialize(args=args, model=make_net())[0].train_batch_size() == 2
    assert isinstance(parser.parse_args(["--deepspeed_config", "x.json"]).deepspeed_config, str), "as in DeepSpeed"


def test_progress_line(caplog):
    with caplog.at_level(logging.INFO, logger="zero"):
        engine = alone(steps_per_print=2)[0]
        for step in range(4):
            engine.backward(engine(*batch(step, 2)))
            engine.step()
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("step=")]
    assert lines == [f"step={n}, skipped=0, lr=[0.01], mom=[(0.9, 0.999)]" for n in (2, 4)]


def test_breakdowns_and_state_are_printed(caplog):
    asked = {"wall_clock_breakdown": True, "memory_breakdown": True, "dump_state": True, "steps_per_print": 1}
    with caplog.at_level(logging.INFO, logger="zero"):
        engine = alone(**asked)[0]
        engine.backward(engine(*batch(0, 2)))
        engine.step()
    lines = [record.getMessage() for record in caplog.records]
    assert "stage 0 on 1 rank(s), " in lines[0]
    assert f"{sum(p.numel() for p in engine.parameters()):,} parameters in fp32, 4 units" in lines[0]
    assert '"stage":' in next(line for line in lines if line.startswith("configuration: "))
    assert re.search(r"^time \(ms per step over 1 steps\) \| forward: \S+ \| backward: \S+ \| step: \S+$", lines[-2])
    assert lines[-1].startswith("model state on rank 0 (MiB) | parameters: 0.0 | gradients: 0.0 | optimizer: 0.0")


# --- exceptions, on real ranks ------------------------------------------------------------------------------


class Boom(torch.autograd.Function):
    """Raises in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("backward failed")


def with_exceptions(stage: int, where: str | None) -> list[torch.Tensor]:
    """Four steps; before the third, one that fails at `where`."""
    net = make_net()
    engine, *_ = zero.initialize(model=net, config=config(stage, 2))
    for step in range(4):
        if step == 2 and where is not None:
            fail(engine, where)
        engine.backward(engine(*share(step)))
        engine.step()
    engine.destroy()
    return [param.detach() for param in net.parameters()]


def fail(engine: Any, where: str) -> None:
    tokens, targets = share(100)
    block = engine.module.blocks[1]
    if where == "forward":
        handle = block.up.register_forward_pre_hook(lambda *_: 1 / 0)
    else:
        handle = block.norm.register_forward_hook(lambda module, args, output: Boom.apply(output))
    try:
        loss = engine(tokens, targets)
        loss.backward() if where == "plain backward" else engine.backward(loss)
    except ArithmeticError:
        handle.remove()
        return
    raise RuntimeError("nothing was raised")


@pytest.mark.parametrize("where", ["forward", "backward", "plain backward"])
@pytest.mark.parametrize("stage", [1, 3])
def test_an_exception_leaves_the_engine_usable(pool, stage, where):
    spoilt = pool.run(2, with_exceptions, stage, where)
    clean = pool.run(2, with_exceptions, stage, None)
    for mine, wanted in zip(spoilt, clean, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, wanted, strict=True))


def two_engines(stage: int) -> list[bool]:
    """Two engines in one process, one graph: a student trained on a teacher that trains too."""
    pairs = []
    for order in ((7, 8), (8, 7)):
        nets = [make_net(seed) for seed in order]
        engines = [zero.initialize(model=net, config=config(stage, 2))[0] for net in nets]
        for step in range(3):
            losses = [engine(*share(step)) for engine in engines]
            sum(losses).backward()
            for engine in engines:
                engine.step()
        for engine in engines:
            engine.destroy()
        pairs.append([[p.detach() for p in net.parameters()] for net in nets])
    swapped = pairs[1][::-1]
    return [
        torch.equal(a, b) for one, two in zip(pairs[0], swapped, strict=True) for a, b in zip(one, two, strict=True)
    ]


@pytest.mark.parametrize("stage", [2, 3])
def test_two_engines_in_one_graph(pool, stage):
    for equal in pool.run(2, two_engines, stage):
        assert equal
        assert all(equal)
