"""The promise: Muon on shards is torch.optim.Muon, bit by bit, wherever its state rests and whatever is cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from marks import longer
from models import batch, config, make_net
from offload_cases import BOTH, OPTIMIZER, as_on_a_gpu
from torch import nn

import zero
from zero.optim import matrix

STEPS, PARTS = 3, 4  # micro-batches of a step, whatever the ranks
MATRICES = 6
MUON = {"lr": 1e-2, "muon_lr": 2e-2, "weight_decay": 0.1, "ns_method": "standard"}


def matrices_only(net: nn.Module) -> nn.Module:
    for name, param in net.named_parameters():
        param.requires_grad_("blocks" in name and param.ndim == 2)
    return net


def torch_muon(clipping: float = 0.0, **arguments: Any) -> dict[str, torch.Tensor]:
    """Plain torch in one process; gradients are added in the order of the tree."""
    net = matrices_only(make_net())
    params = [param for param in net.parameters() if param.requires_grad]
    optimizer = torch.optim.Muon(params, **({"lr": 2e-2, "weight_decay": 0.1} | arguments))
    for step in range(STEPS):
        grads = []
        for part in range(PARTS):
            net(*batch(PARTS * step + part, 2)).backward()
            grads.append([param.grad for param in params])
            optimizer.zero_grad()
        for param, (a, b, c, d) in zip(params, zip(*grads, strict=True), strict=True):
            param.grad = ((a + b) + (c + d)) * 0.25
        optimizer.step()
        optimizer.zero_grad()
    return {name: param.detach() for name, param in net.named_parameters()}


def trained(
    stage: int, *, section: dict[str, Any] | None = None, params: dict[str, Any] | None = None, **more: Any
) -> Any:
    """The same under an engine; its parameters, and how often this rank has run Newton-Schulz."""
    rank, world = dist.get_rank(), dist.get_world_size()
    settings = config(stage, world, accumulation=PARTS // world, zero={"reduce": "tree"}, **more)
    settings["zero_optimization"] |= section or {}
    settings["optimizer"] = {"type": "Muon", "params": MUON | (params or {})}
    model, calls = matrices_only(make_net()), []
    with pytest.MonkeyPatch.context() as patch:
        plain = matrix.torch_newton_schulz
        patch.setattr(matrix, "torch_newton_schulz", lambda *args: calls.append(args[0].shape) or plain(*args))
        engine, *_ = zero.initialize(model=model, config=settings)
        for step in range(STEPS):
            for part in range(rank, PARTS, world):
                engine.backward(engine(*batch(PARTS * step + part, 2)))
                engine.step()
        engine.destroy()
    return {name: param.detach() for name, param in model.named_parameters()}, len(calls)


def every_stage(stages: tuple[int, ...] = (0, 1, 2, 3), section: dict[str, Any] | None = None) -> list[Any]:
    with as_on_a_gpu(section is not None):
        return [trained(stage, section=section) for stage in stages]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_stage_and_world_is_torchs_bit_by_bit(pool, world):
    wanted = torch_muon()
    ranks = pool.run(world, every_stage)
    for rank in ranks:
        for stage, (found, _) in enumerate(rank):
            wrong = [name for name, value in wanted.items() if not torch.equal(found[name], value)]
            assert wrong == [], f"stage {stage}"
    for stage in range(4):
        calls = sum(rank[stage][1] for rank in ranks)
        whole = world if stage == 0 else 1  # where nothing is cut, every rank does all
        assert calls == whole * MATRICES * STEPS, f"stage {stage}"


NVME = {"offload_optimizer": {"device": "nvme"}}


@pytest.mark.parametrize(
    ("world", "stages", "section"),
    [(2, (1,), OPTIMIZER), (1, (3,), BOTH), *longer((2, (3,), BOTH), (4, (2, 3), OPTIMIZER), (2, (3,), NVME))],
)
def test_offloaded_state_trains_alike(pool, world, stages, section, tmp_path):
    if section is NVME:
        section = {"offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}}
    wanted = torch_muon()
    for rank in pool.run(world, every_stage, stages, section):
        for found, _ in rank:
            assert all(torch.equal(found[name], value) for name, value in wanted.items())
