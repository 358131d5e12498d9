"""Bytes per rank, computed before anything runs: what the paper's formula says, and what this engine holds."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from zero.plan.sharding import Sharding
from zero.plan.units import UnitPlan

ITEMSIZE = {"fp32": 4, "bf16": 2, "fp16": 2, "fp64": 8, "int8": 1, "uint8": 1}
MOMENTS = 2  # Adam's exp_avg and exp_avg_sq, fp32


class StateBytes(NamedTuple):
    """Bytes of the three kinds of model state. Masters count as optimizer state, as in the ZeRO paper."""

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """All three together."""
        return sum(self)


def replica_nbytes(numel: int, dtype: str) -> StateBytes:
    """What one unsharded replica of `numel` parameters holds under Adam: 2+2+12 bytes each in 16 bit, 4+4+8 in fp32.

    In fp32 the parameter is its own master; in 16 bit the fp32 master is a third optimizer state
    (Rajbhandari et al. 2020, section 3.1: K = 12).
    """
    size = ITEMSIZE[dtype]
    return StateBytes(size * numel, size * numel, (4 * MOMENTS + (4 if size < 4 else 0)) * numel)


def formula_nbytes(numel: int, dtype: str, stage: int, world_size: int) -> StateBytes:
    """ZeRO's formula 2Psi + 2Psi + K Psi (fp32: 4 + 4 + 8): each term over `world_size` where the stage cuts it."""
    whole = replica_nbytes(numel, dtype)
    cut = Sharding.of_stage(stage)
    return StateBytes(
        whole.parameters // world_size if cut.params else whole.parameters,
        whole.gradients // world_size if cut.grads else whole.gradients,
        whole.optimizer // world_size if cut.optim else whole.optimizer,
    )


def alive_nbytes(
    units: Sequence[UnitPlan],
    sharding: Sharding,
    parts: int,
    *,
    gathered: Collection[str] = (),
    local_gradients: Collection[str] = (),
    reduced_gradients: Collection[str] = (),
    accumulation: int = 1,
) -> StateBytes:
    """Bytes this engine keeps on one rank at a moment that is told by names of units.

    `parts` is the size of the shard axis. `gathered`: units whose parameters are full although they are cut
    between uses; `local_gradients`: units with a full gradient buffer of this rank; `reduced_gradients`:
    units whose reduced shard exists.
    """
    parameters = gradients = optimizer = 0
    cut = sharding.params and parts > 1
    for unit in units:
        size, full = ITEMSIZE[unit.dtype], unit.layout.numel
        shard = full // parts
        parameters += size * shard if cut else size * full
        parameters += size * full if cut and unit.name in gathered else 0
        if unit.name in local_gradients:
            gradients += gradient_itemsize(unit.dtype, sharding, accumulation) * full
        if unit.name in reduced_gradients:
            gradients += 4 * shard
        if unit.requires_grad and unit.group >= 0:
            optimizer += (4 * MOMENTS + (4 if size < 4 else 0)) * shard
    return StateBytes(parameters, gradients, optimizer)


def gradient_itemsize(dtype: str, sharding: Sharding, accumulation: int) -> int:
    """Bytes per element of the local gradient buffer.

    16-bit gradients travel as they come; where micro-batches add up in the buffer before they are reduced,
    it is fp32.
    """
    return ITEMSIZE[dtype] if sharding.grads or accumulation == 1 else max(4, ITEMSIZE[dtype])
