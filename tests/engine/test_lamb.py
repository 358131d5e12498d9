"""The promise: LAMB on shards scales by norms of whole parameters, alike on every stage, and gathers none for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from marks import longer
from offload_cases import BOTH, OPTIMIZER, as_on_a_gpu
from oracle import Training, near
from scenario import Record, differences, run, same
from torch import nn

from zero.optim import lamb

STEPS, PARTS = 3, 4
TREE = {"zero": {"reduce": "tree"}}
TIGHT = {"max_coeff": 0.4, "min_coeff": 0.3, "bias_correction": False}
LAMB = {"lr": 1e-2, "weight_decay": 0.1}


class Lamb:
    """You et al. 2019, algorithm 2, as the kernels of DeepSpeed's FusedLamb have it, in the precision of the model."""

    def __init__(self, net: nn.Module, most: float = 10.0, least: float = 0.01, corrected: bool = True) -> None:
        self.params = [param for param in net.parameters() if param.requires_grad]
        self.means, self.squares = ([torch.zeros_like(param) for param in self.params] for _ in range(2))
        self.coefficients, self.corrected, self.steps = (least, most), corrected, 0

    @torch.no_grad()
    def step(self) -> None:
        self.steps += 1
        size = 1e-2 * ((1 - 0.999**self.steps) ** 0.5 / (1 - 0.9**self.steps) if self.corrected else 1.0)
        for param, mean, square in zip(self.params, self.means, self.squares, strict=True):
            mean.copy_(0.9 * mean + 0.1 * param.grad)
            square.copy_(0.999 * square + 0.001 * param.grad * param.grad)
            update = mean / (square.sqrt() + 1e-8) + 0.1 * param
            norm, of_update = param.norm(), update.norm()
            ratio = (norm / of_update).clamp(*self.coefficients) if norm > 0 and of_update > 0 else 1.0
            param -= size * ratio * update

    def zero_grad(self) -> None:
        for param in self.params:
            param.grad = None


def tight(net: nn.Module) -> Lamb:
    return Lamb(net, TIGHT["max_coeff"], TIGHT["min_coeff"], TIGHT["bias_correction"])


def every_stage(params: dict[str, Any]) -> list[Record]:
    """A net under each stage; what travels for norms is counted."""
    json = {"optimizer": {"type": "Lamb", "params": params}, "accumulation": 2, **TREE}
    sent, plain = [], lamb.gather_scalars
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lamb, "gather_scalars", lambda row, *rest: sent.append(row.numel()) or plain(row, *rest))
        found = [run("dealt", json, STEPS, stage=stage, gradient_clipping=0.5) for stage in range(4)]
    parameters = len(found[0].weights)
    assert sent == [2 * parameters] * (4 * STEPS), "two numbers of each parameter, once per step"
    return found


@pytest.mark.parametrize(("world", "arguments", "reference"), [(2, {}, Lamb), *longer((4, TIGHT, tight))])
def test_every_stage_is_as_near_to_the_truth_as_plain_torch(pool, world, arguments, reference):
    training = Training(world, STEPS, 2, 0.5, optimizer=reference)
    for stages in pool.run(world, every_stage, {**LAMB, **arguments}):
        assert near(stages[3].weights, training)
        assert all(same(one, stages[3]) for one in stages)


def trained(stage: int, section: dict[str, Any], **states: str) -> Record:
    """The same micro-batches on any number of ranks, added in the order of the tree."""
    optimizer = {"type": "Lamb", "params": {**LAMB, "zero": states}}
    json = {"stage": stage, "section": section, "precision": "bf16", "optimizer": optimizer, **TREE}
    with as_on_a_gpu(bool(section)):
        return run("wide", json, STEPS, parts=PARTS)


@pytest.mark.parametrize(
    ("world", "stage", "section"),
    [(2, 1, OPTIMIZER), *longer((2, 0, {}), (4, 3, BOTH))],
)
def test_bits_depend_neither_on_ranks_nor_on_places_nor_on_the_form_of_masters(pool, world, stage, section):
    (wanted,) = pool.run(1, trained, 0, {}, master="fp32", moments="8bit")
    for found in pool.run(world, trained, stage, section, moments="8bit"):
        assert not differences(found, wanted, "weights")
