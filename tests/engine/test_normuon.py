"""The promise: NorMuon on shards divides each row as its paper says, with one number of state for each row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from marks import longer
from models import config, make_net, train_parts
from offload_cases import OPTIMIZER, as_on_a_gpu
from test_muon import PARTS, gradients, matrices_only
from torch.optim._muon import _zeropower_via_newtonschulz

import zero

STEPS, SAVED, LR, DECAY, BETA2 = 4, 2, 2e-2, 0.1, 0.9
NORMUON = {"muon_lr": LR, "weight_decay": DECAY, "beta2": BETA2, "ns_method": "standard"}
ROWS = 3 * (25 + 12)


def plain() -> dict[str, torch.Tensor]:
    """Li et al. 2025, algorithm 1, as the authors' code has it, but that an update travels in bf16."""
    net = matrices_only(make_net())
    params = [param for param in net.parameters() if param.requires_grad]
    means = [torch.zeros_like(param) for param in params]
    squares = [torch.zeros(len(param), 1) for param in params]
    for step in range(STEPS):
        grads = gradients(net, params, step)
        with torch.no_grad():
            for param, grad, mean, square in zip(params, grads, means, squares, strict=True):
                mean.lerp_(grad, 1 - 0.95)
                update = _zeropower_via_newtonschulz(grad.lerp(mean, 0.95), (3.4445, -4.7750, 2.0315), 5, 1e-7).float()
                norm = update.norm()
                square.lerp_(update.square().mean(1, keepdim=True), 1 - BETA2)
                update = update / (square.sqrt() + 1e-10)
                update = update * (norm / (update.norm() + 1e-10))
                size = LR * max(1, param.shape[0] / param.shape[1]) ** 0.5
                param.mul_(1 - LR * DECAY).add_(update.bfloat16(), alpha=-size)
    return {name: param.detach() for name, param in net.named_parameters()}


def trained(stage: int, section: dict[str, Any], folder: Any = None, load: str = "", save: str = "") -> dict[str, Any]:
    """All steps, or those behind a checkpoint; one may be saved where that is."""
    world, net = dist.get_world_size(), matrices_only(make_net(seed=9 if load else 7))
    more = {"optimizer": {"type": "Muon", "params": NORMUON}, "zero": {"reduce": "tree"}}
    more["zero_optimization"] = {"stage": stage, **section}
    with as_on_a_gpu(bool(section)):
        engine, *_ = zero.initialize(model=net, config=config(stage, world, accumulation=PARTS // world, **more))
        if load:
            engine.load_checkpoint(folder, load)
        else:
            train_parts(engine, range(SAVED), PARTS)
        if save:
            engine.save_checkpoint(folder, save)
        train_parts(engine, range(SAVED, STEPS), PARTS)
        rule, units = engine.optimizer.shard_optimizer, engine._sharded.trained
        moments = sum(tensor.nbytes for unit in units for *_, tensor in rule.tensors(unit))
        rows = sum(rule.nbytes(unit, engine.optimizer.param_groups[0]) for unit in units) - moments
        engine.destroy()
    return {"rows": rows // 4} | {name: param.detach() for name, param in net.named_parameters()}


def differing(found: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    return [name for name in wanted if name != "rows" and not torch.equal(found[name], wanted[name])]


@pytest.mark.parametrize(
    ("world", "stage", "section"), [(2, 3, {}), *longer((1, 0, {}), (2, 0, {}), (4, 1, OPTIMIZER))]
)
def test_numbers_and_state(pool, world, stage, section):
    wanted, ranks = plain(), pool.run(world, trained, stage, section)
    assert [differing(found, wanted) for found in ranks] == [[]] * world
    of_all = world if stage == 0 else 1
    assert sum(found["rows"] for found in ranks) == of_all * ROWS, "each on the rank that uses it"


@pytest.mark.long
@pytest.mark.parametrize(("world", "stage"), [(4, 1), (1, 0), (2, 3)])
def test_a_checkpoint_goes_on_at_another_number_of_ranks(pool, tmp_path, world, stage):
    """The second one holds what was loaded, as no step has shared it out among the ranks yet."""
    wanted = pool.run(2, trained, 3, {}, tmp_path, "", "first")[0]
    ranks = pool.run(world, trained, stage, {}, tmp_path, "first", "second")
    ranks += pool.run(2, trained, 2, {}, tmp_path, "second")
    assert [differing(found, wanted) for found in ranks] == [[]] * (world + 2)
