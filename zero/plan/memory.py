"""Bytes of model state per rank: their kinds, and what the formula of the ZeRO paper says."""

from __future__ import annotations

from typing import NamedTuple

from zero.plan.formats import ITEMSIZE, Formats
from zero.plan.sharding import Sharding

ADAM = Formats()  # of the ZeRO paper: fp32 masters and two fp32 moments


class StateBytes(NamedTuple):
    """Bytes of the three kinds of model state. Masters count as optimizer state, as in the ZeRO paper."""

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """All three together."""
        return sum(self)


def replica_nbytes(numel: int, dtype: str, formats: Formats = ADAM, compact: int | None = None) -> StateBytes:
    """What one unsharded replica of `numel` parameters holds: under Adam 2+2+12 bytes each in 16 bit, 4+4+8 in fp32.

    In fp32 the parameter is its own master; in 16 bit the fp32 master is a third optimizer state
    (Rajbhandari et al. 2020, section 3.1: K = 12). `formats` may make less of it: with remainders K = 10, with
    moments in bf16 besides 6, in 8 bit 4 + 2/64. `compact`: how many of the parameters are large enough for
    moments in such a format; default all.
    """
    size = ITEMSIZE[dtype]
    compact = numel if compact is None else compact
    moments = formats.moments_nbytes(compact) + formats.moments_nbytes(numel - compact, "fp32")
    return StateBytes(size * numel, size * numel, moments + formats.master_nbytes(numel, dtype))


def formula_nbytes(
    numel: int, dtype: str, stage: int, world_size: int, formats: Formats = ADAM, compact: int | None = None
) -> StateBytes:
    """ZeRO's formula 2Psi + 2Psi + K Psi (fp32: 4 + 4 + 8): each term over `world_size` where the stage cuts it."""
    whole = replica_nbytes(numel, dtype, formats, compact)
    cut = Sharding.of_stage(stage)
    return StateBytes(
        whole.parameters // world_size if cut.params else whole.parameters,
        whole.gradients // world_size if cut.grads else whole.gradients,
        whole.optimizer // world_size if cut.optim else whole.optimizer,
    )
