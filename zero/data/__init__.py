"""The training data of one rank: torch's DataLoader over its share, with the epochs counted for the user."""

from zero.data.dealing import MicroBatches, Samples
from zero.data.loader import Loader, RepeatingLoader
from zero.data.shares import RankShare, WholeShare

__all__ = ["Loader", "MicroBatches", "RankShare", "RepeatingLoader", "Samples", "WholeShare"]
