"""The saves of one engine: at most one runs beside the training loop, and how it ended is told to all ranks at once."""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from zero.checkpoint.job import Job, Target
from zero.checkpoint.retention import Retention
from zero.checkpoint.safe_file import TensorChunk
from zero.checkpoint.snapshot import Snapshot
from zero.checkpoint.store_barrier import StoreBarrier
from zero.log import logger


class Outcome(enum.IntEnum):
    """Of the save beside the training loop, as numbers that ranks tell each other."""

    NONE = 0
    RUNS = 1
    SAVED = 2
    FAILED = 3
    RAISED = 4  # failed, and this rank's program knows


class Saver:
    """Makes jobs, and runs at most one beside the caller.

    asynchronous: whether saves are to run beside the training loop, from the snapshot.
    """

    def __init__(self, barrier: StoreBarrier, retention: Retention, asynchronous: bool, pinned: bool) -> None:
        self.barrier = barrier
        self.asynchronous = asynchronous
        self.snapshot = Snapshot(pinned)
        self._retention = retention
        self._began = time.time()
        self._thread: threading.Thread | None = None
        self._ended = Outcome.NONE
        self._error: Exception | None = None

    @property
    def outcome(self) -> Outcome:
        """Of the save that runs, or ran, beside the training loop."""
        return Outcome.RUNS if self.running else self._ended

    @property
    def running(self) -> bool:
        """Whether a save runs beside the caller."""
        return self._thread is not None and self._thread.is_alive()

    def job(self, root: Path, tag: str, save: str, latest: bool) -> Job:
        """A new save; see `Target`."""
        return Job(Target(root, tag, save, latest, self._retention, self._began), self.barrier)

    def begin(self, job: Job) -> None:
        """Have the snapshot written beside the caller; at the interpreter's end it is waited for."""
        self._ended, self._error = Outcome.FAILED, RuntimeError("its thread has ended")  # unless it says otherwise
        # Not a daemon: the interpreter joins it before it takes anything apart, after an exception, too.
        self._thread = threading.Thread(target=self._run, args=(job,), name="zero-save")
        self._thread.start()

    def join(self) -> None:
        """Wait until nothing runs beside the caller."""
        # Not forgotten then: while one thread waits here, another may begin the next.
        while (thread := self._thread) is not None and thread.is_alive():
            thread.join()

    def error(self) -> Exception | None:
        """What the last save beside the loop failed with, once; None if it did not, or runs."""
        if self.outcome is not Outcome.FAILED:
            return None
        self._ended = Outcome.RAISED
        return _like(
            self._error, f"the last checkpoint could not be saved beside the training loop: {_text(self._error)}"
        )

    def missed(self) -> None:
        """This rank leaves a save that the others go on with beside their loops, and knows that it fails."""
        self._ended, self._error, self._thread = Outcome.RAISED, None, None

    def heard(self) -> None:
        """All ranks know how the last save ended."""
        self._ended, self._error, self._thread = Outcome.NONE, None, None

    def look(self, gather: Callable[[int], list[int]], when: str) -> None:
        """At a boundary that all ranks come to: raise, on all of them alike, what the save beside them failed with.

        gather: every rank's number, in order; called by all ranks while any of them has not heard how the save ended.
        """
        if self.outcome is Outcome.NONE:
            return
        told = gather(int(self.outcome))
        if Outcome.RUNS in told:
            return
        error, failed = self._error, Outcome.FAILED in told
        self.heard()
        if failed:
            text = f"a checkpoint could not be saved beside the training loop: {_text(error)}; {when}"
            raise _like(error, text) from error

    def _run(self, job: Job) -> None:
        try:
            job.finish(_copies(self.snapshot))
            self._ended, self._error = Outcome.SAVED, None
        except Exception as error:
            self._error = error
            where = f"'{job.target.tag}' in {job.target.root}"
            rank = self.barrier.ranks[self.barrier.rank]
            logger.error("rank %d: checkpoint %s could not be saved: %s", rank, where, error)
        finally:
            self.barrier.shut()
            self.snapshot.clear()


def _copies(snapshot: Snapshot) -> Iterator[TensorChunk]:
    """Those of the snapshot; what fails on the way fails where they are written."""
    yield from snapshot.wait()


def _text(error: Exception | None) -> str:
    """Without the number of an OSError, which stands in front again."""
    if error is None:
        return "another rank failed"
    return str(error.strerror if isinstance(error, OSError) and error.strerror else error)


def _like(error: Exception | None, text: str) -> Exception:
    """An exception of the same kind with another text."""
    if isinstance(error, OSError) and error.errno is not None:
        return OSError(error.errno, text)
    return RuntimeError(text)
