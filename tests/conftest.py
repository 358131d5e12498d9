"""Shared by all tests: one thread for torch, and the pool of ranks."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

# Worker processes import test modules by name.
sys.path.insert(0, str(Path(__file__).parent))

from nodes import UNTESTED
from ranks import Pool

# As in the ranks: on a busy machine, more threads than one stall thousands of small operations.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Up to four gloo ranks for the whole session."""
    made = Pool(4)
    yield made
    made.close()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say once, at the end, why nothing ran over real nodes; under xdist only the process that prints comes here."""
    reasons = {str(report.longrepr[-1]) for report in terminalreporter.stats.get("skipped", ())}
    for reason in sorted(reasons):
        if UNTESTED in reason:
            terminalreporter.write_line(reason.removeprefix("Skipped: "), yellow=True)
