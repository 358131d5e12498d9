"""The promise: parameters off the device can be read, written, saved and built as any others.

Each way is walked by an engine without offload, too, and every value must be bitwise the same.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from marks import longer
from models import batch, config, make_net
from torch import nn

import zero
from zero.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_set_full_fp32_param,
    safe_set_local_fp32_param,
)

CPU = {"device": "cpu"}
Found = dict[str, torch.Tensor]


def ways(folder: str) -> list[dict[str, Any]]:
    """No offload; and parameters off the device, alone and with the optimizer's state."""
    file = {"device": "nvme", "nvme_path": folder, "max_in_cpu": 0, "buffer_count": 2}
    return [{}, {"offload_param": CPU}, {"offload_param": file}, {"offload_param": file, "offload_optimizer": CPU}]


def step(engine: Any, index: int, **more: Any) -> torch.Tensor:
    loss = engine(*batch(index, 2), **more)
    engine.backward(loss)
    engine.step()
    return loss.detach()


def values(engine: Any) -> Found:
    """All parameters as they are now, whole."""
    named = dict(engine.module.named_parameters())
    with zero.GatheredParameters(named.values()):
        return {name: param.detach().clone() for name, param in named.items()}


def start(model: nn.Module, section: dict[str, Any], **more: Any) -> Any:
    sections = {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True, **section}
    engine, *_ = zero.initialize(
        model=model, config=config(3, dist.get_world_size(), zero_optimization=sections, **more)
    )
    return engine


def read_and_written(engine: Any, folder: Path) -> Found:
    """Reads and writes between steps, right behind a step whose updates may still run."""
    found, first, head = {}, engine.module.blocks[0].up, engine.module.head
    step(engine, 0)
    with zero.GatheredParameters([first.weight, head.bias]):
        found["read"] = torch.cat([first.weight.flatten(), head.bias]).detach().clone()
    with zero.GatheredParameters(first.weight, modifier_rank=0):
        if dist.get_rank() == 0:
            with torch.no_grad():
                first.weight[1:3] *= 2
    with zero.GatheredParameters(head.weight, modifier_rank=0):
        nn.init.constant_(head.weight, 0.25)
    step(engine, 1)
    found["exact"] = safe_get_full_fp32_param(first.weight).clone()
    found["local"] = safe_get_local_fp32_param(head.weight).clone()
    found["moment"] = safe_get_full_optimizer_state(head.bias, "exp_avg").clone()
    safe_set_full_fp32_param(head.bias, torch.arange(17.0) / 64)
    safe_set_local_fp32_param(first.bias, safe_get_local_fp32_param(first.bias) * 3)
    found["loss"] = step(engine, 2)
    engine.module_state_dict()
    engine.load_module_state_dict({name: value * 0.5 for name, value in engine.module_state_dict().items()})
    return found


def saved(engine: Any, folder: Path) -> Found:
    """A model written right behind a step, and evaluations before and after."""
    found = {}
    step(engine, 0)
    engine.eval()
    with torch.no_grad():
        found["loss"] = torch.stack([engine(*batch(index, 2)) for index in range(3)])
    engine.train()
    step(engine, 1)
    assert engine.save_16bit_model(folder, "whole.bin")
    dist.barrier()
    found |= torch.load(folder / "whole.bin")
    dist.barrier()
    return found


def refused(engine: Any, folder: Path) -> Found:
    """Values that are away are not shown, and a change that would be lost is told."""
    weight = engine.module.head.weight
    step(engine, 0)
    with pytest.raises(RuntimeError, match=r"parameter 'head.weight' is released"):
        weight.sum()
    lost = r"head.weight.*changed inside GatheredParameters without modifier_rank"
    with pytest.raises(RuntimeError, match=lost), zero.GatheredParameters(weight), torch.no_grad():
        weight.zero_()
    return {}


def walk(way: Any, section: dict[str, Any], folder: str, bf16: bool) -> Found:
    engine = start(make_net(), section, bf16={"enabled": bf16})
    found = way(engine, Path(folder))
    step(engine, 3)
    found |= {f"then {name}": value for name, value in values(engine).items()}
    engine.destroy()
    return found | {f"plain {name}": param.detach() for name, param in engine.module.named_parameters()}


def check(runs: list[Found]) -> None:
    plain, *others = runs
    for found in others:
        assert found.keys() == plain.keys()
        for name, value in plain.items():
            assert torch.equal(found[name], value), name


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("way", "world", "bf16"),
    [
        (read_and_written, 1, True),
        (read_and_written, 2, False),
        (read_and_written, 2, True),
        (saved, 1, False),
        (saved, 2, True),
        (refused, 2, False),  # one rank without offload has everything
    ],
)
def test_use(tmp_path, way, world, bf16):
    check([walk(way, section, str(tmp_path), bf16) for section in ways(str(tmp_path))])


def built(folder: str, remote: str | None, bf16: bool) -> list[Found]:
    """Trained models that were built plainly, and under `zero.Init`."""
    runs = []
    for section in ways(folder)[1:]:
        for way in (None, {"remote_device": remote}, {"config": {"zero_optimization": {"stage": 3, **section}}}):
            if way is None:
                model = make_net()
            else:
                with zero.Init(**way):
                    model = make_net()
            engine = start(model, section, bf16={"enabled": bf16})
            runs.append({"losses": torch.stack([step(engine, index) for index in range(2)]), **values(engine)})
            engine.destroy()
    return runs


@pytest.mark.parametrize(("world", "remote", "bf16"), [(2, "nvme", True), *longer((1, "cpu", True), (2, None, False))])
def test_models_that_were_built_cut(pool, tmp_path, world, remote, bf16):
    for runs in pool.run(world, built, str(tmp_path), remote, bf16):
        check(runs)
