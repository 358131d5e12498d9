"""Seeds, and splits that are the same on every rank."""

from __future__ import annotations

import hashlib
import logging
import random
import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch.utils.data import Dataset, Subset
from torch.utils.data import random_split as split_of_torch

from zero import log

T = TypeVar("T")


def seed_everything(seed: int, by_rank: bool = False) -> int:
    """Seed Python's `random`, NumPy and torch, all devices; returns `seed`, an integer of 0 to 2**63 - 1.

    The same on all ranks by default, for common draws. With `by_rank` each rank (by the launcher's variable `RANK`)
    has different random numbers: for dropout and augmentation, once the model is built. ValueError for other seeds.
    """
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise ValueError(f"seed_everything(seed=...): got {seed!r}, wanted an integer from 0 to 2**63 - 1")
    import numpy.random  # noqa: F401 - so that it is seeded, even if it is first used later

    seed_generators(mixed(seed, log.rank()) if by_rank else seed, torch.manual_seed)
    return seed


def random_split(dataset: Dataset[T], lengths: Sequence[int | float], seed: int = 0) -> list[Subset[T]]:
    """torch's `random_split` with the same split on all ranks: it depends only on `seed`.

    lengths: numbers of samples that add up to the dataset's, or fractions that add up to 1. ValueError for others.
    """
    return split_of_torch(dataset, lengths, torch.Generator().manual_seed(seed))


def digest_of_split(dataset: object) -> str:
    """A digest that tells one `Subset` from another; empty for other datasets."""
    parts = []
    while isinstance(dataset, Subset):
        parts.append(hashlib.blake2b(repr(list(dataset.indices)).encode(), digest_size=16).hexdigest())
        dataset = dataset.dataset
    return "".join(parts)


def warn_of_splits(digests: Sequence[str]) -> None:
    """Warn if ranks have other parts of a dataset, of each of which the others would never see most samples."""
    if len(set(digests)) > 1:
        log.rank_zero(
            logging.WARNING,
            "data: training_data is not the same part of the dataset on all ranks, and each trains on 1/%d of its own; "
            "zero.random_split(dataset, lengths, seed) is the same on all, torch's without a seeded generator is not",
            len(digests),
        )


def mixed(*numbers: int) -> int:
    """A 63-bit seed that depends on each of the numbers."""
    digest = hashlib.blake2b(",".join(map(str, numbers)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_generators(seed: int, of_torch: Callable[[int], object] = torch.default_generator.manual_seed) -> None:
    """Seed Python's generator, NumPy's if it is imported, and torch's: that of the CPU, or by another function."""
    of_torch(seed)
    random.seed(seed)
    if "numpy.random" in sys.modules:
        # One more word: from the same words it would draw the same numbers as Python's generator.
        sys.modules["numpy.random"].seed([seed & 0xFFFFFFFF, seed >> 32, 1])
