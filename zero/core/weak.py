"""Callbacks that do not keep their owners alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable


def while_alive(method: Callable[[], object]) -> Callable[[], None]:
    """What calls this bound method as long as its object lives, and does nothing afterwards."""
    ref = weakref.WeakMethod(method)

    def call() -> None:
        bound = ref()
        if bound is not None:
            bound()

    return call
