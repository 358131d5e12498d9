"""What the micro-batches of the running step weigh in its mean."""

from __future__ import annotations

from typing import NamedTuple

NO_TOKENS = (
    'a backward without tokens, and the JSON says "zero": {"mean": "tokens"}: call engine.backward(loss, tokens=n) or '
    "engine.scale(loss, tokens=n).backward(), n being the number of tokens that the loss of the micro-batch counts. "
    "A loss that is divided by the tokens of the whole step already, as those of TRL are, needs no such key"
)


class Weight(NamedTuple):
    """Of a micro-batch: the factor of its gradients, and what it adds to the divisor of the mean."""

    factor: float = 1.0
    count: float = 1.0


ONE = Weight()


class Weights:
    """Those of the backwards of one engine.

    needed: a backward whose weight was not said is an error; counts: of each backward since the last step.
    """

    def __init__(self) -> None:
        self.needed = False
        self.counts: list[float] = []
        self._next: Weight | None = None

    def say(self, weight: Weight) -> None:
        """Of the backward that comes next."""
        self._next = weight

    def take(self) -> Weight:
        """Of the backward that begins. Raises RuntimeError where that had to be said, and was not."""
        weight, self._next = self._next, None
        if weight is None and self.needed:
            raise RuntimeError(NO_TOKENS)
        return weight or ONE

    def forget(self) -> None:
        """The gradients are gone."""
        self.counts, self._next = [], None
