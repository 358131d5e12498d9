"""The stage, read once: three booleans about lifetimes. No other file knows the word."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sharding:
    """The kinds of state sharded over the data-parallel ranks (ZeRO, Rajbhandari et al. 2020, sections 5 and 7.1).

    optim:  optimizer state (and masters) exist once over all ranks instead of once per rank;
    grads:  gradients are reduced after every micro-batch and only the own shard is kept; otherwise they
            gather in a full local buffer until the accumulation boundary;
    params: parameters exist in full only while they are used.
    """

    optim: bool
    grads: bool
    params: bool

    @classmethod
    def of_stage(cls, stage: int, reduce_every_micro_batch: bool = False, managed: bool = True) -> Sharding:
        """The booleans of ZeRO stage 0 to 3; `reduce_every_micro_batch` lifts `grads` for stages 0 and 1.

        Not `managed`: ranks run different numbers of micro-batches in a step. Stage 2 reduces them once then, as 0 and
        1 do, so that no rank waits for one that has more.
        """
        if stage not in (0, 1, 2, 3):
            raise ValueError(f"zero_optimization.stage: {stage!r} is no ZeRO stage; it is one of 0, 1, 2, 3")
        return cls(optim=stage >= 1, grads=stage >= 2 + (not managed) or reduce_every_micro_batch, params=stage >= 3)


def summed_here(reduce: str, together: bool) -> int:
    """Over NCCL: the largest element size in bytes whose rows we add up, in fp32; NCCL adds larger ones.

    reduce: `zero.reduce`; together: the ranks share a machine. There an all-to-all moves as much as a reduce-scatter,
    and "auto" uses it for 16 bits, which NCCL would round after each addition, in an order that depends on its version,
    the number of ranks and the size of the message. To another machine a ring sends data once for all its ranks, an
    all-to-all once for each.
    """
    return {"auto": 2 if together else 0, "backend": 0, "ranks": 8, "tree": 8}[reduce]
