"""Ring attention: each rank keeps its queries, and keys and values go from rank to rank.

Blockwise attention with an online softmax (Liu et al., "Ring Attention with Blockwise Transformers", 2023), over the
flash operators of torch, which give the log-sum-exp of each row. Differences to the paper: a rank sends straight to the
one whose queries see the keys, and only those that they see; and of two halves each rank has one from the front and one
from the back, so that all have the same causal work. While a block is computed the next one arrives.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad

from zero.core.p2p import Passage, send_on
from zero.parallel.sequence import Sequence
from zero.plan.sequences import ALL, CAUSAL, Block, Step, ring

_ops = torch.ops.aten


class Masking(NamedTuple):
    """The mask besides documents; window: so many keys up to the query, itself included, 0 for all."""

    causal: bool
    window: int = 0


Tensors = list[torch.Tensor]
_LOST: list[Passage] = []  # what no other rank ends any more; its buffers stay


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sequence: Sequence, masking: Masking, scale: float
) -> torch.Tensor:
    """Attention of this rank's queries [rows, heads, size, dim] to the whole sequence.

    key, value: this rank's [rows, heads or a divisor of them, size, dim]. In fp32, or fp64 where they are.
    """
    own = value.shape[-1]
    if query.shape[-1] == own:
        return _Ring.apply(query, key, value, sequence, masking, scale)
    wide = max(query.shape[-1], own)  # as of latent attention: the operators want one size
    query, key, value = (pad(each, (0, wide - each.shape[-1])) for each in (query, key, value))
    return _Ring.apply(query, key, value, sequence, masking, scale)[..., :own]


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sequence: Sequence,
        masking: Masking,
        scale: float,
    ) -> torch.Tensor:
        ctx.turns = turns = _Turns(sequence, masking)
        ctx.scale = scale
        exact = torch.promote_types(query.dtype, torch.float32)
        rows, heads, size = query.shape[:3]
        # Positions outside of heads, as what follows wants them: else it would keep a copy.
        out = torch.zeros(rows, size, heads, value.shape[-1], dtype=exact, device=query.device).transpose(1, 2)
        lse = torch.full(query.shape[:-1], -torch.inf, dtype=exact, device=query.device)
        with turns:
            for step, parts in turns.parts([key, value]):
                for index, block in step.blocks:
                    at, seen = turns.places(step, index, block)
                    key_there, value_there = (each[seen] for each in parts[index])
                    part, part_lse = _forward(query[at], key_there, value_there, block, scale)
                    total = torch.logaddexp(lse[at], part_lse)
                    out[at] = out[at] * (lse[at] - total).exp()[..., None] + part * (part_lse - total).exp()[..., None]
                    lse[at] = total
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        turns: _Turns = ctx.turns
        of_query, of_key, of_value = (torch.zeros_like(each, dtype=lse.dtype) for each in (query, key, value))
        with turns:
            for step, parts in turns.parts([key, value]):
                found = [[torch.zeros_like(each, dtype=lse.dtype) for each in part] for part in parts]
                for index, block in step.blocks:
                    at, seen = turns.places(step, index, block)
                    there = out[at], lse[at], query[at], *(each[seen] for each in parts[index])
                    of_block = _backward(grad[at], *there, block, ctx.scale)
                    totals = of_query[at], *(each[seen] for each in found[index])
                    for total, part in zip(totals, of_block, strict=True):
                        total += part
                turns.give_back(step, found, [of_key, of_value])
            turns.take_back([of_key, of_value])
        grads = of_query.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype)
        return *grads, None, None, None


class _Turns:
    """The steps of one attention on this rank, and what travels in them; as a context, its end also after an error."""

    def __init__(self, sequence: Sequence, masking: Masking) -> None:
        self._sequence = sequence
        rows = list(sequence.rows())
        self._rows = [each for each, _ in rows]
        self._steps = ring(sequence.by_rank, sequence.axis.rank, tuple(borders for _, borders in rows), *masking)
        self._coming: Passage | None = None
        self._returning: tuple[Step, Passage] | None = None

    def __enter__(self) -> None:
        self._coming = self._returning = None

    def __exit__(self, kind: Any, *_: Any) -> None:
        # The other side has begun, too, or will: gloo does not get over buffers that are gone before their message.
        begun = [self._coming, self._returning and self._returning[1]] if kind is not None else []
        for passage in filter(None, begun):
            try:
                if self._sequence.axis.watchdog.broken:
                    raise RuntimeError
                passage.wait()
            except RuntimeError:
                _LOST.append(passage)

    def parts(self, tensors: Tensors) -> Iterator[tuple[Step, list[Tensors]]]:
        """Each step, and the parts of these tensors that its `receives` say; those of the next are on their way."""
        parts = [[each[self._own(one)] for each in tensors] for one in self._steps[0].receives]
        for step, following in zip_longest(self._steps, self._steps[1:]):
            self._coming = None if following is None else self._start(following, tensors)
            yield step, parts
            if self._coming is not None:
                came = self._coming.wait()
                parts = [came[at : at + len(tensors)] for at in range(0, len(came), len(tensors))]

    def places(self, step: Step, index: int, block: Block) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """Where the queries of a block lie in this rank's tensors, and its keys in what has come."""
        group, positions = step.receives[index]
        begin = block.keys.start - positions.start
        seen = slice(None), slice(None), slice(begin, begin + len(block.keys))
        return (self._rows[group], slice(None), self._sequence.at(block.queries)), seen

    def give_back(self, step: Step, found: list[Tensors], totals: Tensors) -> None:
        """Send gradients to where their keys and values came from, and begin to take those of what was sent."""
        self.take_back(totals)
        if step.to == self._sequence.axis.rank:
            for one, part in zip(step.receives, found, strict=True):
                for total, each in zip(totals, part, strict=True):
                    total[self._own(one)] += each
            return
        shapes = [total[self._own(one)].shape for one in step.sends for total in totals]
        ends = [each for part in found for each in part], step.source, shapes, step.to
        what = "gradients of keys and values"
        self._returning = step, send_on(*ends, self._sequence.axis, what, totals[0])

    def take_back(self, totals: Tensors) -> None:
        """Add up the gradients that are on their way here."""
        if self._returning is not None:
            step, passage = self._returning
            places = (total[self._own(one)] for one in step.sends for total in totals)
            for place, part in zip(places, passage.wait(), strict=True):
                place += part
            self._returning = None

    def _start(self, step: Step, tensors: Tensors) -> Passage:
        outgoing = [each[self._own(one)].contiguous() for one in step.sends for each in tensors]
        shapes = []
        for group, positions in step.receives:
            rows = self._rows[group].stop - self._rows[group].start
            shapes += [(rows, each.shape[1], len(positions), each.shape[3]) for each in tensors]
        ends = outgoing, step.to, shapes, step.source
        return send_on(*ends, self._sequence.axis, "keys and values", tensors[0])

    def _own(self, one: tuple[int, range]) -> tuple[slice, slice, slice]:
        group, positions = one
        return self._rows[group], slice(None), self._sequence.at(positions)


def _forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, block: Block, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention to the keys of a block alone, and the log-sum-exp of its rows [rows, heads, queries]."""
    bias = _bias(block, query)
    if query.device.type == "cpu":
        operator, own = _ops._scaled_dot_product_flash_attention_for_cpu, {"attn_mask": bias, "scale": scale}
        return operator(query, key, value, 0.0, block.visible == CAUSAL, **own)
    key, value = (_repeated(each, query.shape[1]) for each in (key, value))
    if bias is None and query.dtype.itemsize == 2:
        return _ops._scaled_dot_product_flash_attention(query, key, value, 0.0, block.visible == CAUSAL, scale=scale)[
            :2
        ]
    operator = _ops._scaled_dot_product_efficient_attention
    out, lse, *_ = operator(query, key, value, bias, True, 0.0, block.visible == CAUSAL, scale=scale)
    return out, lse[..., : query.shape[2]]  # rounded up to 32 rows


def _backward(
    grad: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    block: Block,
    scale: float,
) -> tuple[torch.Tensor, ...]:
    """Gradients of queries, keys and values through a block; out, lse: of the whole attention, of its rows."""
    bias, causal = _bias(block, query), block.visible == CAUSAL
    if query.device.type == "cpu":
        operator, own = _ops._scaled_dot_product_flash_attention_for_cpu_backward, {"attn_mask": bias, "scale": scale}
        return operator(grad, query, key, value, out, lse, 0.0, causal, **own)
    heads, rows, none = key.shape[1], query.shape[2], torch.zeros((), dtype=torch.int64)
    key, value = (_repeated(each, query.shape[1]) for each in (key, value))
    if bias is None and query.dtype.itemsize == 2:
        operator, sizes = _ops._scaled_dot_product_flash_attention_backward, (None, None, rows, key.shape[2])
        given = grad, query, key, value, out, lse.contiguous()
        grads = operator(*given, *sizes, 0.0, causal, none, none, scale=scale)
    else:
        operator = _ops._scaled_dot_product_efficient_attention_backward
        given = grad, query, key, value, bias, out, pad(lse, (0, -rows % 32)), none, none
        grads = operator(*given, 0.0, [True, True, True, False], causal, scale=scale)
    of_query, *others = grads[:3]
    return of_query, *(each.unflatten(1, (heads, -1)).sum(2) for each in others)


def _repeated(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    return tensor.repeat_interleave(heads // tensor.shape[1], 1)


def _bias(block: Block, query: torch.Tensor) -> torch.Tensor | None:
    """0 where a query of the block sees a key and -inf elsewhere [queries, keys]; None where that is all, or causal."""
    if block.visible in (ALL, CAUSAL):
        return None
    queries, keys = (torch.arange(each.start, each.stop, device=query.device) for each in (block.queries, block.keys))
    before = queries[:, None] - keys
    hidden = (before < 0) | (before >= block.visible)
    # Rows of whole 16 elements, as the operator on a GPU wants them.
    bias = torch.zeros(len(queries), -(-len(keys) // 16) * 16, dtype=query.dtype, device=query.device)
    return bias[:, : len(keys)].masked_fill_(hidden, -torch.inf)
