"""What the micro-batches of the running step weigh in its mean.

The weight multiplies the loss, not the gradients that land on a rank: where the graph of a loss crosses ranks, as with
shared sequences or gathered keys, these are parts of several ranks' losses, each of which has its own weight.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import Any, NamedTuple

import torch

from zero.core.torch_private import after_backward

NO_TOKENS = (
    'a backward without tokens, and the JSON says "zero": {"mean": "tokens"}: call engine.backward(loss, tokens=n) or '
    "engine.scale(loss, tokens=n).backward(), n being the number of tokens that the loss of the micro-batch counts. "
    "A loss that is divided by the tokens of the whole step already, as those of TRL are, needs no such key"
)


class Weight(NamedTuple):
    """Of a micro-batch: the factor of its loss, and what it adds to the divisor of the mean."""

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
