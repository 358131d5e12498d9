"""The stage, read once: three booleans about lifetimes. No other file knows the word."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sharding:
    """What is cut in 1/n over the data-parallel ranks (ZeRO, Rajbhandari et al. 2020, sections 5 and 7.1).

    optim:  optimizer state (and masters) exist once over all ranks instead of once per rank;
    grads:  gradients are reduced after every micro-batch and only the own shard is kept; otherwise they
            gather in a full local buffer until the accumulation boundary;
    params: parameters exist in full only while they are used.
    """

    optim: bool
    grads: bool
    params: bool

    @classmethod
    def of_stage(cls, stage: int, reduce_every_micro_batch: bool = False) -> Sharding:
        """The booleans of ZeRO stage 0 to 3; `reduce_every_micro_batch` lifts `grads` for stages 0 and 1."""
        if stage not in (0, 1, 2, 3):
            raise ValueError(f"zero_optimization.stage: {stage!r} is no ZeRO stage; it is one of 0, 1, 2, 3")
        return cls(optim=stage >= 1, grads=stage >= 2 or reduce_every_micro_batch, params=stage >= 3)
