"""The promise: no configuration makes something else of Muon in silence. The numbers are DeepSpeed's issues."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from models import batch, config, make_net
from offload_cases import OPTIMIZER, as_on_a_gpu
from torch import nn

import zero
from zero.optim import matrix

LR = 0.02
MUON = {"type": "Muon", "params": {"muon_lr": LR, "ns_method": "standard"}}


@pytest.fixture
def calls() -> Iterator[list[torch.Size]]:
    """The shapes that Newton-Schulz was run on in this process."""
    found: list[torch.Size] = []
    plain = matrix.torch_newton_schulz
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(matrix, "torch_newton_schulz", lambda *args: found.append(args[0].shape) or plain(*args))
        yield found


def torchs(make: Any = make_net, steps: int = 1, parts: int = 1) -> dict[str, torch.Tensor]:
    """The matrices of hidden layers after plain torch's Muon; nothing else is trained."""
    net = hidden(make())
    params = [param for param in net.parameters() if param.requires_grad]
    optimizer = torch.optim.Muon(params, lr=LR, weight_decay=0.0)
    for step in range(steps):
        for part in range(parts):
            (net(*batch(step * parts + part, 2)) / parts).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: param.detach() for name, param in net.named_parameters() if param.requires_grad}


def hidden(net: nn.Module) -> nn.Module:
    for name, param in net.named_parameters():
        param.requires_grad_("blocks" in name and param.ndim == 2)
    return net


def ours(net: nn.Module, steps: int = 1, parts: int = 1, **settings: Any) -> dict[str, torch.Tensor]:
    engine, *_ = zero.initialize(model=net, config=config(0, 1, accumulation=parts, optimizer=MUON, **settings))
    for number in range(steps * parts):
        engine.backward(engine(*batch(number, 2)))
        engine.step()
    engine.destroy()
    return {name: param.detach() for name, param in net.named_parameters() if param.requires_grad}


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert [name for name, value in wanted.items() if not torch.equal(found[name], value)] == []


def test_8438_shapes_under_init_are_true_ones(calls):
    settings = config(3, 1, optimizer=MUON)
    with zero.Init(config_dict_or_path=settings):
        net = make_net()
    found = ours(hidden(net), zero_optimization={"stage": 3})
    assert calls.count((25, 12)) == calls.count((12, 25)) == 3
    assert_same(found, torchs())


@pytest.mark.parametrize("bf16", [False, True])
def test_8441_8442_stage_0_is_not_sgd(calls, bf16):
    """Nothing is said of ZeRO: every matrix is orthogonalised all the same."""
    net = hidden(make_net())
    before = {name: param.detach().clone() for name, param in net.named_parameters()}
    settings = config(0, 1)
    del settings["zero_optimization"]
    engine, *_ = zero.initialize(model=net, config={**settings, "optimizer": MUON, "bf16": {"enabled": bf16}})
    engine.backward(engine(*batch(0, 2)))
    engine.step()
    masters = {name: zero.utils.safe_get_full_fp32_param(param) for name, param in net.named_parameters()}
    engine.destroy()
    assert len(calls) == 6
    for name, value in torchs().items():
        moved = (before[name] - masters[name]) / (LR * max(1, value.shape[0] / value.shape[1]) ** 0.5)
        singular = torch.linalg.svdvals(moved.double())
        assert singular[0] < 1.3 and (singular > 0.5).sum() >= 5, f"{name}: a gradient has no such singular values"
        if not bf16:
            assert torch.equal(net.get_parameter(name), value)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_8443_8600_newton_schulz_runs_once_a_step_whatever_the_accumulation(calls, stage):
    found = ours(hidden(make_net()), steps=2, parts=4, zero_optimization={"stage": stage}, zero={"reduce": "tree"})
    assert len(calls) == 2 * 6, "matrices x steps"
    # Momentum of four micro-batches one after the other is far off; sums in another order are not.
    for name, value in torchs(steps=2, parts=4).items():
        assert (found[name] - value).norm() < 2e-2 * LR * 2 * value.shape[0] ** 0.5, name


def test_8463_offloaded_state_is_no_other_training(calls):
    for stage in (1, 3):
        with as_on_a_gpu():
            found = ours(hidden(make_net()), steps=2, zero_optimization={"stage": stage, **OPTIMIZER})
        assert_same(found, torchs(steps=2))
    assert len(calls) == 2 * 2 * 6


def test_momentum_is_not_normalised_in_place():
    """torch.optim.Muon does so where parameters are bf16 and Nesterov is off."""
    net = hidden(make_net())
    params = {"ns_method": "standard", "nesterov": False, "momentum": 0.5, "zero": {"master": "fp32"}}
    settings = config(0, 1, optimizer={"type": "Muon", "params": params}, bf16={"enabled": True})
    engine, *_ = zero.initialize(model=net, config=settings)
    engine.backward(engine(*batch(0, 2)))
    weight = net.blocks[0].up.weight
    grad = zero.utils.safe_get_full_grad(weight)
    engine.step()
    momentum = zero.utils.safe_get_full_optimizer_state(weight, "momentum_buffer")
    engine.destroy()
    assert torch.equal(momentum, 0.5 * grad)
