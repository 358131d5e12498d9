"""No process is left behind: whatever the ranks started ends with them when a run fails or is stopped."""

import contextlib
import ctypes
import sys

_PR_SET_CHILD_SUBREAPER = 36
_GRACE = 3  # seconds between asking a process to end and killing it; with those that the ranks have, under 10


def begin() -> frozenset[int]:
    """Become the one that orphans fall to, and return the processes that exist below us already."""
    if sys.platform == "linux":
        # A data loader whose rank was killed would fall to init otherwise, where nobody finds it.
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    return frozenset(process.pid for process in _below())


def end(others: frozenset[int], grace: float = _GRACE) -> None:
    """End every process below this one but `others`: ask first, kill after `grace` seconds."""
    import psutil

    left = [process for process in _below() if process.pid not in others]
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    _, alive = psutil.wait_procs(left, timeout=grace)
    # What was started in the meantime goes too.
    for process in {*alive, *(found for found in _below() if found.pid not in others)}:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _below() -> list:
    import psutil

    return psutil.Process().children(recursive=True)
