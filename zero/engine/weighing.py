"""What a micro-batch weighs in the mean of its step: one, or as much as it has tokens."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

import torch

from zero.config import Config
from zero.core.micro_batches import NO_TOKENS, ONE, Weight
from zero.log import log_once


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
        if not 0 <= count < math.inf:
            raise ValueError(f"backward(tokens=...): got {tokens}, wanted a number of at least 0")
        return Weight(count if reduction == "mean" or not count else 1.0, count)
