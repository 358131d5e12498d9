"""A bar on the terminal while bytes move."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def bar(about: str) -> Iterator[Callable[[int], Callable[[int], None]]]:
    """Gives a function that is told a number of bytes, and returns what is told how many more of them are done.

    Nothing is shown where the standard error is no terminal.
    """
    if not sys.stderr.isatty():
        yield lambda total: _nothing
        return
    from tqdm import tqdm

    with tqdm(desc=about, unit="B", unit_scale=True, leave=False) as shown:

        def start(total: int) -> Callable[[int], None]:
            shown.reset(total)
            return shown.update

        yield start


def _nothing(nbytes: int) -> None:
    """Shows nothing."""
