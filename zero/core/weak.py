"""Callbacks that do not keep their owners alive."""

from __future__ import annotations

import atexit
import os
import sys
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


def before_exit(owner: object, work: Callable[[], None]) -> None:
    """Have `work`, which must not keep `owner` alive, run at the end of this process, unless by an error."""
    process = os.getpid()

    def run() -> None:
        if process == os.getpid() and getattr(sys, "last_value", None) is None:
            work()

    atexit.register(run)
    weakref.finalize(owner, atexit.unregister, run).atexit = False
