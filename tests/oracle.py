"""The oracle: training in plain torch, in one process on the data of all ranks, and how near to it ours must be.

The truth is fp64. Plain torch trains in the same precision, too, and our error is at most twice its own (closeness.py).
What `exact` and `limits` give is computed once in a process for equal trainings.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from closeness import allowed, error, twice
from device import moved
from models import batch, make_net
from torch import nn

from zero.core.comm import local_device

LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}


def backward(loss: torch.Tensor, factor: float) -> torch.Tensor:
    """Backward of `factor` times the loss; the loss."""
    (loss * factor).backward()
    return loss.detach()


def net_backward(model: nn.Module, number: int, rank: int, world: int, factor: float) -> torch.Tensor:
    """One micro-batch of a `models.Net`."""
    part = slice(2 * rank, 2 * rank + 2)
    tokens, targets = batch(number, 2 * world)
    return backward(model(tokens[part], targets[part]), factor)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of `models.config`."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.1)


class Training(NamedTuple):
    """What is trained, how and on what.

    `micro(model, number, rank, world, factor)` runs forward and backward of one rank's micro-batch, of which the
    training has `steps * accumulation`, multiplies the loss by `factor` before, and returns it without the factor.
    """

    world: int
    steps: int
    accumulation: int = 1
    clipping: float = 0.0
    build: Callable[[], nn.Module] = make_net  # with the same weights each time
    micro: Callable[[Any, int, int, int, float], torch.Tensor] = net_backward
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw
    before_step: Callable[[torch.optim.Optimizer, int], None] | None = None  # of each step of the optimizer
    scale: float = 1.0  # of the loss under fp16


class Trained(NamedTuple):
    """Losses by micro-batch and rank, and parameters as forward sees them."""

    losses: list[list[float]]
    params: dict[str, torch.Tensor]


class Autocast(nn.Module):
    """A model whose forward runs under autocast, and nothing else does."""

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.module = module
        self.dtype = dtype

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(next(self.module.parameters()).device.type, self.dtype):
            return self.module(*args, **kwargs)


def train(training: Training, precision: str) -> Trained:
    """In fp64, fp32, bf16, fp16 (the last two: a 16-bit copy of fp32 masters), "autocast bf16" or "autocast fp16".

    Gradients are added up in the masters' dtype, ranks first, then micro-batches, then divided; none counts as zero.
    """
    masters = training.build().to(device := local_device(), torch.float64 if precision == "fp64" else torch.float32)
    model = masters
    if precision in LOW:
        model = training.build().to(device, LOW[precision])
    called = Autocast(model, LOW[precision.split()[1]]) if precision.startswith("autocast") else model
    if device.type != "cpu":
        called.register_forward_pre_hook(lambda _, *inputs: moved(inputs, device), with_kwargs=True)
    pairs = [pair for pair in zip(masters.parameters(), model.parameters(), strict=True) if pair[0].requires_grad]
    optimizer, scale = training.optimizer(masters), training.scale if "fp16" in precision else 1.0
    losses: list[list[float]] = []
    for step in range(training.steps):
        totals = [torch.zeros_like(master) for master, _ in pairs]
        for number in range(step * training.accumulation, (step + 1) * training.accumulation):
            losses.append([])
            sums = [torch.zeros_like(master) for master, _ in pairs]
            for rank in range(training.world):
                losses[-1].append(training.micro(called, number, rank, training.world, scale).item())
                for (master, param), total in zip(pairs, sums, strict=True):
                    if param.grad is not None:
                        total += param.grad.to(master.dtype) / scale
                        param.grad = None
            for total, more in zip(totals, sums, strict=True):
                total += more
        for (master, _), total in zip(pairs, totals, strict=True):
            master.grad = total / (training.world * training.accumulation)
        if training.clipping:
            nn.utils.clip_grad_norm_(masters.parameters(), training.clipping)
        if training.before_step:
            training.before_step(optimizer, step)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for master, param in pairs:
                if param is not master:
                    param.copy_(master)
    return Trained(losses, {name: param.detach().cpu() for name, param in model.named_parameters()})


@functools.cache
def exact(training: Training) -> Trained:
    """The training in fp64."""
    return train(training, "fp64")


@functools.cache
def limits(training: Training, precision: str) -> tuple[float, float]:
    """The errors of losses and of parameters that are allowed in this precision."""
    plain, truth = twice(lambda: train(training, precision)), exact(training)
    return tuple(allowed(getattr(truth, key), *(getattr(one, key) for one in plain)) for key in Trained._fields)


def near(params: Any, training: Training, precision: str = "fp32", losses: Any = None) -> bool:
    """Whether parameters, and losses[micro-batch][rank] where they are given, are as near to the truth as allowed."""
    of_losses, of_params = limits(training, precision)
    good = error(params, exact(training).params) <= of_params
    return good and (losses is None or error(losses, exact(training).losses) <= of_losses)
