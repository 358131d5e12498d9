"""Shared by all tests: one thread for torch, and the pool of ranks."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

# Worker processes import test modules by name.
sys.path.insert(0, str(Path(__file__).parent))

from ranks import Pool

# As in the ranks: on a busy machine, more threads than one stall thousands of small operations.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Up to four gloo ranks for the whole session."""
    made = Pool(4)
    yield made
    made.close()
