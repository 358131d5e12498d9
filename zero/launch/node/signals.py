"""The signals that end a job."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator

NAMES = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")


def handle(handler: Callable) -> None:
    """Have `handler` called for each of them."""
    for name in NAMES:
        signal.signal(getattr(signal, name), handler)


def ignore() -> None:
    """Go on when they come again: a second Ctrl-C must not interrupt the clean-up."""
    for name in NAMES:
        signal.signal(getattr(signal, name), signal.SIG_IGN)


@contextlib.contextmanager
def restored() -> Iterator[None]:
    """Put the handlers back that there are now."""
    before = {name: signal.getsignal(getattr(signal, name)) for name in NAMES}
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(getattr(signal, name), handler)
