"""The signals that end a job."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator, Sequence

NAMES = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")


def heeded(tied: bool) -> tuple[str, ...]:
    """Those of them that end this job: one that is ignored stays so, as SIGHUP under nohup.

    tied: by all, as the tie to the launcher pulls at this process with them.
    """
    return tuple(name for name in NAMES if tied or signal.getsignal(getattr(signal, name)) != signal.SIG_IGN)


def handle(handler: Callable, names: Sequence[str]) -> None:
    """Have `handler` called for each of `names`."""
    for name in names:
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
