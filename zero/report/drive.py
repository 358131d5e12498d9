"""`zero report --io DIR`: how fast the drive of a folder writes and reads, and the section `aio` that suits it."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import psutil
import torch

from zero.kernels.aio import ALIGN, Aio, Request, ScratchFile, aligned

SECONDS = 12.0
ROUNDS = 2  # over all settings, so that what disturbs the drive for a moment does not hit one setting alone
CHUNK = 32 << 20  # bytes of one request
CHUNKS = 2  # requests in flight
LARGEST = 1 << 30  # bytes of the file
IN_MEMORY = ("tmpfs", "ramfs")
# A setting that asks more of the machine must be better by more than this to be proposed.
WORTH = 1.05


class Setting(NamedTuple):
    """A section `aio`, in the order of the arguments of :class:`zero.kernels.aio.Aio`.

    It is that of preference, too: few workers, few blocks in flight, small blocks.
    """

    intra_op_parallelism: int
    queue_depth: int
    block_size: int


SETTINGS = tuple(itertools.starmap(Setting, itertools.product((1, 2), (4, 8, 32), (256 << 10, 1 << 20, 4 << 20))))


@dataclass(frozen=True)
class Trial:
    """A setting, and GB/s (1e9 bytes) under it: medians over the rounds."""

    setting: Setting
    write: float
    read: float

    @property
    def both(self) -> float:
        """GB/s of reading everything and writing everything back, one after the other."""
        return 2 / (1 / self.write + 1 / self.read)


@dataclass(frozen=True)
class Drive:
    """What was found. `nbytes` of a file were written and read; `why`: see :class:`zero.kernels.aio.Aio`."""

    folder: str
    filesystem: str
    free_nbytes: int
    nbytes: int
    backend: str
    why: str
    direct: bool
    trials: tuple[Trial, ...]
    best: Trial


def run(folder: str, as_json: bool) -> int:
    """Measure and print; returns the exit status 0. Raises OSError naming what is wrong with the folder."""
    drive = measure(Path(folder))
    print(json.dumps({**asdict(drive), "aio": section(drive)}, indent=2) if as_json else "\n".join(lines(drive)))
    return 0


def section(drive: Drive) -> dict[str, int]:
    """The proposed section `aio`."""
    return drive.best.setting._asdict()


def lines(drive: Drive) -> list[str]:
    """The report as text."""
    kind = f"{drive.filesystem}, {drive.free_nbytes / 2**30:.1f} GiB free"
    notes = []
    if drive.filesystem in IN_MEMORY:
        notes = [f"note: {drive.folder} is in memory ({drive.filesystem}): these are no figures of a drive"]
    elif not drive.direct:
        notes = ["note: this file system has no O_DIRECT: these figures hold what the page cache does"]
    header = f"{'block':>9} {'depth':>5} {'workers':>7} {'write GB/s':>10} {'read GB/s':>9}"
    rows = [
        f"{trial.setting.block_size >> 10:>5} KiB {trial.setting.queue_depth:>5} "
        f"{trial.setting.intra_op_parallelism:>7} {trial.write:>10.2f} {trial.read:>9.2f}"
        + ("  <- proposed" if trial is drive.best else "")
        for trial in drive.trials
    ]
    return [
        *notes,
        f"folder    {drive.folder} ({kind})",
        f"backend   {drive.backend}{f': {drive.why}' if drive.why else ''}; "
        f"O_DIRECT {'in use' if drive.direct else 'not there'}",
        f"measured  in a file of {drive.nbytes / 2**20:.0f} MiB, which is gone again",
        "",
        header,
        *rows,
        "",
        "for the config:",
        f'"aio": {json.dumps(section(drive))}',
    ]


def measure(
    folder: Path,
    seconds: float = SECONDS,
    settings: Sequence[Setting] = SETTINGS,
    chunk: int = CHUNK,
    largest: int = LARGEST,
) -> Drive:
    """Write and read a scratch file in an existing folder under each setting, for about `seconds` in all.

    Each setting moves at least one chunk per round and direction, however long that takes.
    chunk: bytes of one request, a multiple of ALIGN. largest: bytes of the file at most; it takes an eighth of the free
    space at most. Raises OSError where the folder is missing or not writable, has too little space, or the drive fails.
    """
    system = os.statvfs(folder)
    free = system.f_bavail * system.f_frsize
    chunk = max(ALIGN, min(chunk, free // 32 // ALIGN * ALIGN))
    whole = max(CHUNKS, min(largest, free // 8) // chunk) * chunk
    file = ScratchFile(folder, whole, "zero-report")
    buffers = [aligned(chunk).random_(0, 256) for _ in range(CHUNKS)]
    with contextlib.closing(Aio()) as first:
        # What was reserved but never written is not read from the drive at all.
        filled = _move(first, file, buffers, whole, True, seconds / 7, whole)[0]
    rates: dict[tuple[Setting, bool], list[float]] = {}
    slot = seconds / (len(settings) * ROUNDS * 2)
    for _, setting in itertools.product(range(ROUNDS), settings):
        with contextlib.closing(Aio(*setting)) as aio:
            for write in (True, False):
                moved, took = _move(aio, file, buffers, filled, write, slot)
                rates.setdefault((setting, write), []).append(moved / took / 1e9)
    trials = [Trial(key, *(statistics.median(rates[key, write]) for write in (True, False))) for key in settings]
    kind = _filesystem(folder)
    return Drive(
        str(folder), kind, free, filled, first.backend, first.why, file.direct, tuple(trials), proposed(trials)
    )


def proposed(trials: Sequence[Trial]) -> Trial:
    """Of those that are nearly as fast as the fastest the one that asks least of the machine."""
    fastest = max(trial.both for trial in trials)
    return min((trial for trial in trials if trial.both * WORTH >= fastest), key=lambda trial: trial.setting)


def _move(
    aio: Aio,
    file: ScratchFile,
    buffers: Sequence[torch.Tensor],
    filled: int,
    write: bool,
    seconds: float,
    most: int | None = None,
) -> tuple[int, float]:
    """Go round in the first `filled` bytes for so long, or up to `most` bytes; returns bytes and seconds."""
    chunk, begun = buffers[0].nbytes, 0
    flying: list[Request] = []
    begin = time.perf_counter()
    while begun < len(buffers) or (time.perf_counter() - begin < seconds and (most is None or begun * chunk < most)):
        if len(flying) == len(buffers):
            flying.pop(0).wait()
        start = aio.write if write else aio.read
        flying.append(start(file, buffers[begun % len(buffers)], begun * chunk % filled))
        begun += 1
    for request in flying:
        request.wait()
    return begun * chunk, time.perf_counter() - begin


def _filesystem(folder: Path) -> str:
    """Its type, such as ext4, as the mount table says it."""
    here = folder.resolve()
    mounts = {part.mountpoint: part.fstype for part in psutil.disk_partitions(all=True)}  # the last one lies on top
    return next((mounts[str(path)] for path in (here, *here.parents) if str(path) in mounts), "unknown file system")
