"""The saves of one engine: at most one runs beside the training loop, and how it ended is told to all ranks at once."""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from zero.checkpoint.job import Job
from zero.checkpoint.retention import Retention
from zero.checkpoint.safe_file import TensorChunk
from zero.checkpoint.store_barrier import StoreBarrier
from zero.core.agree import agree
from zero.core.world import Axis
from zero.log import logger
from zero.memory.host_bytes import LINE
from zero.memory.streams import record_event
from zero.plan.layout import round_up


class Outcome(enum.IntEnum):
    """Of the save beside the training loop, as numbers that ranks tell each other."""

    NONE = 0
    RUNS = 1
    SAVED = 2
    FAILED = 3
    RAISED = 4  # failed, and this rank's program knows


class Snapshot:
    """A copy of what a save will write, in host memory that is taken once and used again by the next save.

    pinned: whether a GPU copies into it.
    """

    def __init__(self, pinned: bool = False) -> None:
        self._pinned = pinned
        self._memory: torch.Tensor | None = None
        self._used = 0
        self._mark: torch.cuda.Event | None = None
        self.chunks: list[TensorChunk] = []

    @property
    def nbytes(self) -> int:
        """Bytes of host memory."""
        return 0 if self._memory is None else self._memory.numel()

    def begin(self, forms: Sequence[TensorChunk]) -> None:
        """Make room for these, and forget what was in it; MemoryError where there is none."""
        wanted = max(LINE, sum(round_up(form.values.nbytes, LINE) for form in forms))
        self.clear()
        if wanted > self.nbytes:
            self._memory = None  # before there are two
            try:
                self._memory = torch.empty(wanted, dtype=torch.uint8, pin_memory=self._pinned)
            except RuntimeError as error:
                raise MemoryError(f"an asynchronous save needs {wanted} bytes of host memory: {error}") from None

    def take(self, chunk: TensorChunk) -> None:
        """Copy a chunk; on a GPU behind what its current stream does, which goes on behind the copy."""
        values = chunk.values
        place = self._memory.narrow(0, self._used, values.nbytes).view(values.dtype)
        place.copy_(values, non_blocking=self._pinned)
        self._used = round_up(self._used + values.nbytes, LINE)
        self.chunks.append(chunk._replace(values=place))
        self._mark = record_event(values.device) or self._mark

    def copies(self) -> Iterator[TensorChunk]:
        """The copies, once they are there."""
        if self._mark is not None:
            self._mark.synchronize()
            self._mark = None
        yield from self.chunks

    def clear(self) -> None:
        """Forget the chunks, but keep the memory."""
        self.chunks, self._used, self._mark = [], 0, None


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
        """A new save; see `Job`."""
        return Job(self.barrier, root, tag, save, latest, self._retention, self._began)

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
        return _failure("the last checkpoint", self._error)

    def missed(self) -> None:
        """This rank leaves a save that the others go on with beside their loops, and knows that it fails."""
        self._ended, self._error, self._thread = Outcome.RAISED, None, None

    def heard(self) -> None:
        """All ranks know how the last save ended."""
        self._ended, self._error, self._thread = Outcome.NONE, None, None

    def look(self, axis: Axis, when: str) -> None:
        """At a boundary that all ranks come to: raise, on all of them alike, what the save beside them failed with.

        A collective over `axis` while any rank has not heard how the save ended.
        """
        if self.outcome is Outcome.NONE:
            return
        outcomes = agree(int(self.outcome), axis)
        if Outcome.RUNS in outcomes:
            return
        error = self._error
        self.heard()
        if Outcome.FAILED in outcomes:
            raise _failure("a checkpoint", error, f"; {when}") from error

    def _run(self, job: Job) -> None:
        try:
            job.finish(self.snapshot.copies())
            self._ended, self._error = Outcome.SAVED, None
        except Exception as error:
            self._error = error
            where = f"'{job.tag}' in {job.root}"
            rank = self.barrier.ranks[self.barrier.rank]
            logger.error("rank %d: checkpoint %s could not be saved: %s", rank, where, error)
        finally:
            self.barrier.shut()
            self.snapshot.clear()


def _failure(what: str, error: Exception | None, when: str = "") -> Exception:
    """An exception of the kind of `error`, which another rank has where it is None."""
    # Without the number of an OSError, which stands in front again.
    reason = getattr(error, "strerror", None) or error or "another rank failed"
    text = f"{what} could not be saved beside the training loop: {reason}{when}"
    if isinstance(error, OSError) and error.errno is not None:
        return OSError(error.errno, text)
    return RuntimeError(text)
