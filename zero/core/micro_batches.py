"""The weights of the running step's micro-batches in its mean.

The weight multiplies the loss, not the gradients that land on a rank: where the graph of a loss crosses ranks, as with
shared sequences or gathered keys, these are parts of several ranks' losses, each of which has its own weight.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any, NamedTuple

import torch

from zero.config import Config
from zero.core.torch_private import after_backward
from zero.log import log_once

NO_TOKENS = (
    'a backward without tokens, and the JSON says "zero": {"mean": "tokens"}: call engine.backward(loss, tokens=n) or '
    "engine.scale(loss, tokens=n).backward(), n being the number of tokens that the loss of the micro-batch counts. "
    "A loss that is divided by the tokens of the whole step already, as those of TRL are, needs no such key"
)


class Weight(NamedTuple):
    """One micro-batch's share of the mean: the factor of its loss, and what it adds to the divisor."""

    factor: float = 1.0
    count: float = 1.0


ONE = Weight()


@dataclass
class Weights:
    """Those of the backwards of one engine.

    needed: a backward whose loss brings no count is an error; counts: of each backward since the last step.
    """

    needed: bool = False
    counts: list[float] = field(default_factory=list)


class Weighing:
    """Weighs the micro-batches of one engine.

    items: `num_items_in_batch` that transformers gives a model, of the last forward, where the mean is over tokens. The
    loss of that is a sum divided by it: by the tokens of the micro-batch or, under Trainer, of the whole step.
    """

    def __init__(self, config: Config) -> None:
        self.items: Any = None
        self._by_tokens = config.zero.mean == "tokens"

    def forward(self, kwargs: Mapping[str, Any]) -> None:
        """The keywords of a forward in training."""
        self.items = kwargs.get("num_items_in_batch") if self._by_tokens else None

    def weight(self, tokens: float | torch.Tensor | None, reduction: str, items_counted: bool) -> Weight:
        """Of a micro-batch whose loss is the mean ("mean") over its `tokens`, or their sum ("sum").

        items_counted: without tokens, another micro-batch of the step has counted the items already. Raises ValueError
        for wrong arguments, RuntimeError where neither tokens nor items are known.
        """
        if reduction not in ("mean", "sum"):
            raise ValueError(f'backward(reduction=...): got {reduction!r}, wanted "mean" or "sum"')
        if not self._by_tokens:
            if reduction == "sum":
                raise ValueError('backward(reduction="sum") is for "zero": {"mean": "tokens"} in the JSON')
            if tokens is not None:
                text = (
                    'tokens= of backward() is for the log; "zero": {"mean": "tokens"} makes it the weight of the loss'
                )
                log_once(logging.INFO, text)
            return ONE
        if tokens is None:
            if self.items is None:
                raise RuntimeError(NO_TOKENS)
            return Weight(float(self.items), 0.0 if items_counted else float(self.items))
        count = float(tokens)
        if not 0 <= count < inf:
            raise ValueError(f"backward(tokens=...): got {tokens}, wanted a number of at least 0")
        return Weight(count if reduction == "mean" or not count else 1.0, count)


def weighted(loss: torch.Tensor, factor: float) -> torch.Tensor:
    """The loss times `factor`, in fp32 at least, since fp16 ends at 65504.

    A factor of 0 makes zeros of the gradients that the loss sends, whatever a mean over nothing is. All of its graph
    runs nevertheless, for what other ranks' losses send through it where it crosses ranks; no node may make a NaN of a
    zero then, as the division by a count of 0 does.
    """
    wide = loss if loss.dtype in (torch.float32, torch.float64) else loss.float()
    if factor:
        return wide * factor
    finite = wide.nan_to_num()

    def begins(grad: torch.Tensor) -> None:
        handles, seen, nodes = [], set(), [wide.grad_fn]
        while nodes:
            node = nodes.pop()
            if node is None or node in seen or hasattr(node, "variable"):  # a leaf's node outlives the graph
                continue
            seen.add(node)
            handles.append(node.register_hook(_without_nan))
            nodes += [before for before, _ in node.next_functions]
        after_backward(lambda: [handle.remove() for handle in handles])

    if finite.requires_grad:
        finite.register_hook(begins)
    return finite * factor


def _without_nan(sent: tuple[torch.Tensor | None, ...], _: Any) -> tuple[torch.Tensor | None, ...]:
    return tuple(grad if grad is None else grad.nan_to_num(nan=0.0, posinf=inf, neginf=-inf) for grad in sent)
