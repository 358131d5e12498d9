"""No process is left behind: whatever child processes started ends with them when a run fails or is stopped."""

from __future__ import annotations

import contextlib
import ctypes
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import psutil

_PR_SET_CHILD_SUBREAPER = 36


class Descendants:
    """The processes that come to be below this one from now on.

    adopt: have orphans fall to this process instead of init, where nobody would find them: the data loaders, say, of a
    rank that was killed. Without it, only those are known that `note` saw while their parent was alive.
    """

    def __init__(self, adopt: bool = False) -> None:
        if adopt and sys.platform == "linux":
            with contextlib.suppress(OSError, AttributeError):
                ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._noted: set[psutil.Process] = set()
        self._before = _below()

    def note(self) -> None:
        """Remember the processes that are below this one now."""
        self._noted |= _below() - self._before

    def end(self, grace: float) -> None:
        """End them all: ask first, kill after `grace` seconds; at once where that is 0."""
        import psutil

        self.note()
        if grace:
            for process in self._noted:
                with contextlib.suppress(psutil.Error):
                    process.terminate()
            psutil.wait_procs(self._noted, timeout=grace)
            self.note()  # what was started in the meantime goes too
        for process in self._noted:
            with contextlib.suppress(psutil.Error):
                process.kill()  # checks that the process id still means the same process
        psutil.wait_procs(self._noted, timeout=grace)  # what follows may need their ports
        self._noted.clear()


def _below() -> set[psutil.Process]:
    import psutil

    with contextlib.suppress(psutil.Error):
        return set(psutil.Process().children(recursive=True))
    return set()
