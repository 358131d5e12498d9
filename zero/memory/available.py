"""Host memory and cores that this process may use, within its limits.

Limits of cgroups are read from files under a root, so that tests can write such files.
"""

from __future__ import annotations

import ctypes
import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

_PAGES_OF_FILES = ("inactive_file", "active_file")  # in memory.stat; the kernel reclaims them when it needs memory


class Version(NamedTuple):
    """One version of cgroups: its mount point, its controller, its limits and usage, and a prefix of stats."""

    mount: str
    controller: str  # in /proc/self/cgroup; version 2 has one tree for all, and names none
    limits: tuple[str, ...]
    usage: str
    prefix: str


_V1 = Version("sys/fs/cgroup/memory", "memory", ("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_")
_V2 = Version("sys/fs/cgroup", "", ("memory.max", "memory.high"), "memory.current", "")


def available_nbytes(ranks_on_host: int = 1) -> int:
    """Bytes of host memory that each of `ranks_on_host` processes like this one may still allocate."""
    return min(host_available() // ranks_on_host, process_available())


def host_available(root: Path = Path("/")) -> int:
    """Bytes that all processes of this host together may still allocate, by free memory and the limits of cgroups."""
    return min([psutil.virtual_memory().available, *left_in_cgroups(root)])


def process_available() -> int:
    """Bytes that this process may still allocate before it reaches its own limit, RLIMIT_AS."""
    limit, taken = resource.getrlimit(resource.RLIMIT_AS)[0], psutil.Process().memory_info().vms
    return sys.maxsize if limit == resource.RLIM_INFINITY else max(0, limit - taken)


def cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def host_threads() -> int:
    """The number of threads of one rank's updates: `cores`, divided by the ranks of the host.

    OMP_NUM_THREADS, which launchers set to 1, does not count: nothing else needs the cores while the host updates.
    """
    ranks = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return max(1, cores() // ranks)


def left_in_cgroups(root: Path) -> Iterator[int]:
    """Bytes left under each limit of this process's cgroups and of those above; pages of files do not count as used."""
    lines = (line.split(":", 2) for line in _read(root / "proc/self/cgroup").splitlines())
    paths = {name: line[2] for line in lines if len(line) == 3 for name in line[1].split(",")}
    for version in (_V1, _V2):
        for folder in _folders(root / version.mount, paths.get(version.controller)):
            left = _left(folder, version)
            if left is not None:
                yield left


def _folders(mount: Path, path: str | None) -> list[Path]:
    """The folder of the cgroup at `path` of the whole tree, and the folders above it.

    A container sees only a part of the tree: then the end of the path is searched, and the mount point stands for all
    folders above it.
    """
    if path is None:
        return []
    parts = Path(path).parts[1:]
    ends = (mount.joinpath(*parts[start:]) for start in range(len(parts) + 1))
    own = next((folder for folder in ends if os.path.isdir(folder)), mount)
    return [own, *(above for above in own.parents if above.is_relative_to(mount))]


def _left(folder: Path, version: Version) -> int | None:
    limits = [_read(folder / name) for name in version.limits]
    numbers = [int(text) for text in limits if text.strip().isdigit()]
    used = _read(folder / version.usage).strip()
    if not numbers or not used.isdigit():
        return None
    rows = (line.split() for line in _read(folder / "memory.stat").splitlines())
    stats = {row[0]: int(row[1]) for row in rows if len(row) == 2 and row[1].isdigit()}
    files = sum(stats.get(version.prefix + name, 0) for name in _PAGES_OF_FILES)
    return max(0, min(numbers) - max(0, int(used) - files))


def _read(path: Path) -> str:
    """The text of a file; empty if it does not exist or may not be read."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


class Freed:
    """Calls `give_back` for each so many freed bytes: small holes between living tensors stay with the C library."""

    STEP = 32 << 20

    def __init__(self) -> None:
        self._nbytes = 0

    def add(self, nbytes: int) -> None:
        """`nbytes` more were freed."""
        self._nbytes += nbytes
        if self._nbytes >= self.STEP:
            self._nbytes = 0
            give_back()


def give_back() -> None:
    """Make the C library return unused memory, such as a model was built in, to the system; others do so themselves."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
