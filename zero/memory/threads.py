"""How many threads of this process work on host memory while the device, or nobody, computes."""

from __future__ import annotations

import os


def host_threads() -> int:
    """How many threads one rank's updates use: the cores that this process may use, shared by the ranks of the host.

    OMP_NUM_THREADS, which launchers set to 1, does not count: nothing else needs the cores while the host updates.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    ranks = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return max(1, cores // ranks)
