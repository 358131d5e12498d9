"""Stands in for the library `evaluate`, whose metrics come from the hub: accuracy, which is what MRPC counts."""

from __future__ import annotations

from collections.abc import Iterable


class Accuracy:
    """Collects batches until `compute`."""

    def __init__(self) -> None:
        self._right: list[bool] = []

    def add_batch(self, *, predictions: Iterable[int], references: Iterable[int]) -> None:
        """One batch, of as many predictions as references."""
        self._right += [int(given) == int(wanted) for given, wanted in zip(predictions, references, strict=True)]

    def compute(self, predictions: Iterable[int] = (), references: Iterable[int] = ()) -> dict[str, float]:
        """The share of right answers among these and what was added since the last call."""
        self.add_batch(predictions=predictions, references=references)
        right, self._right = self._right, []
        return {"accuracy": sum(right) / len(right)}


def load(path: str, config_name: str | None = None, cache_dir: str | None = None) -> Accuracy:
    """The metric of ("glue", "mrpc") or of "accuracy"; there is no other."""
    if (path, config_name) not in (("glue", "mrpc"), ("accuracy", None)):
        raise ValueError(f"evaluate.load: got {(path, config_name)}; wanted ('glue', 'mrpc') or 'accuracy'")
    return Accuracy()
