"""The run folder `"zero": {"report": "DIR"}`: files that a run writes and others read.

DIR/run.json        by rank 0 at the start: {"time": seconds since 1970, "configuration": the JSON with its defaults,
                    "world": ranks, "stage": 0-3, "device": text, "versions": {name: text},
                    "crowding": on a CPU, threads of ranks for each core; 0 on a GPU,
                    "units": [{"name", "numel", "bytes" of the whole parameters, "dtype"}, ...] as registered,
                    "plan": {kind: bytes per rank at the end of a step}}
DIR/rank-N.jsonl    by each rank: one JSON object per line, flushed at once, so that SIGKILL loses at most one. A
                    run that continues in the same folder appends its lines, after another "start".
                    While a run writes to DIR, another engine or job with the same DIR writes to DIR-2, and so on.
                    Numbers that are not finite are null; unknown values are left out. "time" is seconds since 1970.

Each line has "event":
    start       time
    step        see `StepRecord`: step, time, seconds, samples, tokens, global_samples, skipped, loss, norm, lr [..],
                scale, phases {name: seconds}, waits seconds, bytes {kind: bytes}, sent bytes, values {name: value}.
                On rank 0 loss, samples and tokens are over all ranks; on the others the rank's own, and no norm, lr or
                scale
    log         time, step, values: given to engine.log for a step that had ended, or behind the last one
    warning     time, text: what the log warned of
    unit_norms  time, step, units {name: [gradient, parameter, update]}: L2 norms over all ranks; rank 0 only
    experts     time, step, tokens {module: [of each expert]}: over all ranks, since the last such line; rank 0 only
    timeline    time, step, spans [[stream, name, start_s, end_s], ...], from the beginning of the step
    phase       time, phase: the call of the engine that the rank is in, waits: the collective that it waits for;
                written after a second without other lines, and only if it has changed
    end         time, status "ended" | "failed", error: text, with "failed"
A run without "end" was killed, or still runs.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from zero.log import logger
from zero.monitor.step_record import Line, Record


def free_number(folder: str | Path | None, rank: int) -> int:
    """The first of DIR, DIR-2, DIR-3, ... (`numbered`) that no run writes to, as far as is known; 1 for None.

    The first rank's number counts for all ranks, whose folders may differ, or be None.
    """
    if folder is None:
        return 1
    return next(number for number in itertools.count(1) if not _is_written(numbered(folder, number), rank))


def numbered(folder: str | Path, number: int) -> Path:
    """DIR itself for 1, else DIR-number beside it."""
    path = Path(folder)
    return path if number == 1 else path.with_name(f"{path.name}-{number}")


def _is_written(path: Path, rank: int) -> bool:
    # Locks belong to processes; children do not inherit them, and a killed run leaves none. Those of this
    # process are checked separately, and first: closing a file that it has locked would end the lock.
    if any(isinstance(each, RunFolder) and each.path.resolve() == path.resolve() for each in logger.handlers):
        return True
    try:
        with (path / f"rank-{rank}.jsonl").open("r+") as file:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # the file is missing, or its file system has no locks; opening it will report an error
        return False
    return False


class RunFolder(logging.Handler):
    """The file of one rank, and on rank 0 run.json; it also records the log's warnings.

    Raises OSError if the folder cannot be made or written.
    """

    def __init__(self, folder: str | Path, rank: int, run: Mapping[str, Any], tell: Callable[[Record], None]) -> None:
        """`run`: the contents of run.json; `tell`: queues warnings, which the thread passes to `write_line`."""
        super().__init__(logging.WARNING)
        self.path = Path(folder)
        self._tell = tell
        self.path.mkdir(parents=True, exist_ok=True)
        if rank == 0:
            (self.path / "run.json").write_text(json.dumps(run, indent=1, allow_nan=False, default=str))
        self._file = (self.path / f"rank-{rank}.jsonl").open("a")
        with contextlib.suppress(OSError):
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        tell(Line("start"))
        logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a warning."""
        self._tell(Line("warning", {"text": record.getMessage()}))

    def write_line(self, line: Mapping[str, Any] | None) -> None:
        """Append a line, if there is one, and flush it."""
        if line is not None:
            self._file.write(json.dumps(line, allow_nan=False) + "\n")
            self._file.flush()

    def close(self) -> None:
        """Take no more warnings, and close the file."""
        logger.removeHandler(self)
        self._file.close()
        super().close()
