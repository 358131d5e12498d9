"""How layers are cut over tensor-parallel ranks: the styles of plans, and which slice of a dim each rank has.

The names are those of transformers' `tp_plan`. A layer's features are divided by groups, heads say, so that what
belongs together stays on one rank; parts differ by at most one group.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

from zero.plan.cut import Box, Cut


class Style(NamedTuple):
    """How a plan cuts a module, or a parameter that it names.

    dim: which features of the weights are cut: "out", "in", the "rows" of a table, or none; "sums": whole, and its
    gradient is a part of a sum over the ranks; packs: equal tensors that are fused along that dim; takes: what the
    forward's input goes through; gives: what its output does; alone: no other layer has to be cut like it.
    """

    dim: str = ""
    takes: str = ""
    gives: str = ""
    packs: int = 1
    alone: bool = False


STYLES = {
    "colwise": Style("out", takes="copy"),
    "rowwise": Style("in", gives="sum"),
    "packed_colwise": Style("out", takes="copy", packs=2),
    "packed_rowwise": Style("in", packs=2),
    "colwise_gather_output": Style("out", takes="copy", gives="gather", alone=True),
    "colwise_rep": Style("out", takes="copy", gives="gather", alone=True),
    "rowwise_split_input": Style("in", takes="split", gives="sum", alone=True),
    "rowwise_rep": Style("in", takes="split", gives="sum", alone=True),
    "embedding_rowwise": Style("rows", takes="ids", gives="sum", alone=True),
    "embedding_colwise": Style("out", gives="gather", alone=True),
    "sequence_parallel": Style("sums"),
    "replicated_with_grad_allreduce": Style("sums"),
    "mla_kv_a_proj": Style(gives="rope"),
    "all_reduce": Style(gives="sum"),
    "moe_tp_experts": Style(takes="routed", gives="sum"),
    "moe_identity_expert": Style(takes="divide"),
    "local_params": Style(),
    "replicate": Style(),
}
OF_EXPERTS = ("grouped_gemm", "ep_dispatch_experts")  # which divide experts among ranks, not the layers in them


class Share(NamedTuple):
    """The groups [start, start + count) of `groups`, and over how many ranks these are repeated."""

    start: int
    count: int
    groups: int
    repeats: int = 1

    def of(self, numel: int) -> tuple[int, int]:
        """Its start and size of a dim of `numel` elements that the groups divide."""
        each = numel // self.groups
        return self.start * each, self.count * each


WHOLE = Share(0, 1, 1)


def share_of(groups: int, rank: int, ranks: int) -> Share:
    """The share of a rank: parts differ by at most one group; fewer groups than ranks are repeated.

    Raises ValueError where there are fewer, and the ranks are no multiple of them.
    """
    if groups < ranks:
        if ranks % groups:
            raise ValueError(f"{groups} do not fit {ranks} ranks")
        repeats = ranks // groups
        return Share(rank // repeats, 1, groups, repeats)
    each, more = divmod(groups, ranks)
    return Share(rank * each + min(rank, more), each + (rank < more), groups)


def sizes_of(numel: int, ranks: int) -> list[int]:
    """The sizes of even parts of a dim of `numel` elements, the larger ones first; some may be 0."""
    each, more = divmod(numel, ranks)
    return [each + (rank < more) for rank in range(ranks)]


def ranges_of(packs: Sequence[int], share: Share) -> list[tuple[int, int]]:
    """Starts and sizes of a share of a dim along which tensors of the sizes `packs` are fused."""
    firsts = itertools.accumulate(packs, initial=0)
    return [(first + share.of(numel)[0], share.of(numel)[1]) for first, numel in zip(firsts, packs, strict=False)]


def slice_of(shape: Sequence[int], dim: int, ranges: Sequence[tuple[int, int]]) -> Cut:
    """The cut of a tensor that has these ranges of `dim`, one after the other; boxes in the order of its elements."""
    outer = shape[:dim] if len(ranges) > 1 else ()
    boxes = []
    for at in itertools.product(*map(range, outer)):
        where, rows = (at, (1,) * dim) if outer else ((0,) * dim, tuple(shape[:dim]))
        for start, size in ranges:
            boxes.append(Box((*where, start, *(0,) * (len(shape) - dim - 1)), (*rows, size, *shape[dim + 1 :])))
    return Cut(tuple(shape), tuple(boxes))


def common_groups(numels: Sequence[int]) -> int:
    """The most groups that divide all these numbers of features, each into whole ones."""
    return math.gcd(*numels) if numels else 1


def fitting(groups: int, most: int = 1 << 10) -> list[int]:
    """The numbers of ranks that so many groups, of heads say, can be divided among evenly."""
    return [ranks for ranks in range(1, min(groups, most) + 1) if groups % ranks == 0]
