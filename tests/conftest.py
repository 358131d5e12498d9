"""Shared by all tests: the pool of ranks."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# Worker processes import test modules by name.
sys.path.insert(0, str(Path(__file__).parent))

from ranks import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Four gloo ranks for the whole session."""
    made = Pool(4)
    yield made
    made.close()
