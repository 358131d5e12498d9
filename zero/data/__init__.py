"""The training data of one rank: torch's DataLoader over its share, with the epochs counted for the user."""

from zero.data.loader import Loader, RepeatingLoader

__all__ = ["Loader", "RepeatingLoader"]
