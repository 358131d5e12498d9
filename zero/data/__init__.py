"""The training data of one rank: torch's DataLoader over its share, with the epochs counted for the user."""

from zero.data.loader import Loader, RepeatingLoader, skip_first_batches
from zero.data.packing import pack
from zero.data.seeds import random_split, seed_everything
from zero.data.token_batches import TokenBatchSampler

__all__ = [
    "Loader",
    "RepeatingLoader",
    "TokenBatchSampler",
    "pack",
    "random_split",
    "seed_everything",
    "skip_first_batches",
]
