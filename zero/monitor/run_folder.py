"""The run folder: what a run writes into `"zero": {"report": "DIR"}` while it goes on, and others read.

DIR/run.json        by rank 0 at the start: {"time": seconds since 1970, "configuration": the JSON with its defaults,
                    "world": ranks, "stage": 0-3, "device": text, "versions": {name: text},
                    "crowding": on a CPU, threads of ranks for each core; 0 on a GPU,
                    "units": [{"name", "numel", "bytes" of the whole parameters, "dtype"}, ...] as registered,
                    "plan": {kind: bytes per rank at the end of a step}}
DIR/rank-N.jsonl    by each rank: one JSON object on a line, flushed with it, so that SIGKILL loses at most one. In a
                    run that goes on with the same folder its lines follow those that are there, after another "start".
                    While one goes on, another engine, or job, that is given DIR writes into DIR-2, and so on.
                    Numbers that are not finite are null; what is not known is left out. "time" is seconds since 1970.

Each line has "event":
    start       time
    step        see `StepReport`: step, time, seconds, samples, tokens, global_samples, skipped, loss, norm, lr [..],
                scale, phases {name: seconds}, waits seconds, bytes {kind: bytes}, sent bytes, values {name: value}.
                On rank 0 loss, samples and tokens are over all ranks; on the others the rank's own, and no norm, lr or
                scale
    warning     time, text: what the log warned of
    unit_norms  time, step, units {name: [gradient, parameter, update]}: L2 norms over all ranks; rank 0 only
    timeline    time, step, spans [[stream, name, start_s, end_s], ...], counted from the begin of the step
    phase       time, phase: the call of the engine that the rank is in, waits: the collective that it waits for;
                written when nothing else was for a second, and only when it has changed
    end         time, status "ended" | "failed", error: text, with "failed"
A run without "end" was killed, or still goes on.
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
from zero.monitor.step_report import Line, Told


def free_number(folder: str | Path | None, rank: int) -> int:
    """Of DIR, DIR-2, DIR-3, ... (`numbered`) the first into which nobody writes, as far as that is known; 1 of None.

    The first rank's counts for all, whose folders may differ, or be None.
    """
    if folder is None:
        return 1
    return next(number for number in itertools.count(1) if not _is_written(numbered(folder, number), rank))


def numbered(folder: str | Path, number: int) -> Path:
    """DIR itself for 1, and else DIR-number beside it."""
    path = Path(folder)
    return path if number == 1 else path.with_name(f"{path.name}-{number}")


def _is_written(path: Path, rank: int) -> bool:
    # Locks are those of processes, which children do not inherit, and of a killed run none is left. So those of this
    # process are looked for otherwise, and first: to close a file that it has locked would end the lock.
    if any(isinstance(each, RunFolder) and each.path.resolve() == path.resolve() for each in logger.handlers):
        return True
    try:
        with (path / f"rank-{rank}.jsonl").open("r+") as file:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # there is none, or its file system has no locks; what is wrong is said when it is opened
        return False
    return False


class RunFolder(logging.Handler):
    """The file of one rank, and on rank 0 run.json; it also takes what the log warns of.

    Raises OSError where the folder cannot be made or written.
    """

    def __init__(self, folder: str | Path, rank: int, run: Mapping[str, Any], tell: Callable[[Told], None]) -> None:
        """`run`: what stands in run.json; `tell`: takes warnings, which come back as lines from the thread."""
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
        """Tell of a warning."""
        self._tell(Line("warning", {"text": record.getMessage()}))

    def write_line(self, line: Mapping[str, Any] | None) -> None:
        """Append a line, if there is one, and hand it to the system."""
        if line is not None:
            self._file.write(json.dumps(line, allow_nan=False) + "\n")
            self._file.flush()

    def close(self) -> None:
        """Take no more warnings, and close the file."""
        logger.removeHandler(self)
        self._file.close()
        super().close()
