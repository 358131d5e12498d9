"""Stands in for the library `evaluate`, whose metrics come from the hub: accuracy, as GLUE's MRPC counts it."""

from __future__ import annotations

from collections.abc import Iterable


class Accuracy:
    """Collects batches until `compute`."""

    def __init__(self) -> None:
        self._right: list[bool] = []

    def add_batch(self, *, predictions: Iterable[int], references: Iterable[int]) -> None:
        """One batch, of as many predictions as references."""
        self._right += [int(given) == int(wanted) for given, wanted in zip(predictions, references, strict=True)]

    def compute(self) -> dict[str, float]:
        """The share of right answers among what was added since the last call."""
        right, self._right = self._right, []
        return {"accuracy": sum(right) / len(right)}


def load(path: str, config_name: str | None = None) -> Accuracy:
    """The metric of ("glue", "mrpc"); there is no other."""
    if (path, config_name) != ("glue", "mrpc"):
        raise ValueError(f"evaluate.load: got {(path, config_name)}; this stand-in has ('glue', 'mrpc') only")
    return Accuracy()
