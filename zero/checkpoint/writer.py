"""One save on one rank: a plan of what it writes where, and the writer that does it, at once or from a snapshot."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from zero.checkpoint import folder
from zero.checkpoint.consistency import problems
from zero.checkpoint.index import Line, Part, assemble, file_name
from zero.checkpoint.retention import Retention, tidy
from zero.checkpoint.safe_file import NAMES, TensorChunk, Writing
from zero.checkpoint.staging import Staging
from zero.log import logger
from zero.memory.streams import Event, record_event
from zero.plan.layout import round_up
from zero.plan.memory import LINE
from zero.watchdog.store_barrier import Lost, StoreBarrier

APPEARS = 10.0  # seconds that another host's file may take to be seen
WRITES = "writing a checkpoint"
_BY_NAME = ("known", "tied", "extra_state")
FILES = {"weight": "weights", "buffer": "weights", "master": "masters", "tensor": "state"}  # all others: moments


@dataclass(frozen=True)
class SavePlan:
    """The files of one rank in one save.

    place:  the folder of the tag; save: see `Index`; latest: whether the file of that name will name it;
    forms:  all chunks of this rank; the values may be on the meta device;
    own:    what this rank keeps for itself, as JSON;
    model:  of the index, what no rank before this one has: "known" as of `assemble`, "tied", "excluded", "extra_state";
    fields: the rest of it, on rank 0 only;
    retention, began: of `tidy`, which comes after the save.
    """

    place: Path
    save: str
    latest: bool
    forms: Sequence[TensorChunk]
    own: Any
    model: Mapping[str, Any]
    fields: Mapping[str, Any]
    retention: Retention
    began: float


class CheckpointWriter:
    """Writes what a plan says. Chunks come through `put`, in any order; `finish` does the rest, in any thread.

    failure: why this rank's part cannot be written, or None.
    """

    def __init__(self, plan: SavePlan, barrier: StoreBarrier) -> None:
        self.plan = plan
        self.failure: BaseException | None = None
        self.moved = barrier.moved
        self._barrier = barrier
        self._writings: list[Writing] = []
        self._homes: dict[tuple[str, str, int], Writing] = {}

    def begin(self) -> None:
        """Make the files, one for each kind of chunks. Raises OSError."""
        plan, barrier, staging = self.plan, self._barrier, Staging()
        made = "the folder that rank 0 has made"
        self._wait_for(plan.place, made, lambda: "" if plan.place.is_dir() else ": nothing")
        by_file: dict[str, list[TensorChunk]] = {}
        for form in plan.forms:
            by_file.setdefault(FILES.get(form.kind, "moments"), []).append(form)
        for kind, forms in by_file.items():
            path = plan.place / file_name(kind, barrier.rank, len(barrier.ranks), plan.save)
            with _naming(path):
                writing = Writing(path, forms, {}, self.moved, staging)
            self._writings.append(writing)
            self._homes |= {(form.kind, form.name, form.start): writing for form in forms}

    def put(self, chunk: TensorChunk) -> None:
        """Write one chunk. Raises OSError."""
        writing = self._homes[chunk.kind, chunk.name, chunk.start]
        with _naming(writing.path):
            writing.put(chunk)

    def fail(self, error: BaseException) -> None:
        """This rank's part cannot be written; `finish` will tell the others."""
        self.failure = self.failure or error

    def finish(self, rest: Iterable[TensorChunk] = (), in_call: bool = False) -> None:
        """Write what is left, and end the save with the other ranks; `in_call`: as of `StoreBarrier.settle`.

        Raises OSError or RuntimeError, the same on all ranks, naming rank and file; nothing of this save is left then,
        and what was there before is there.
        """
        report: Any = self.failure
        try:
            if report is None:
                for chunk in rest:
                    self.put(chunk)
                report = self._report()
        except BaseException as error:
            report = self.failure = error
        agreed = False
        try:
            self._barrier.settle(report, self._publish, WRITES, in_call)
        except Exception as error:
            agreed = not isinstance(error, Lost) or self._barrier.rank == 0
            if not isinstance(report, BaseException) or isinstance(report, Exception):
                raise
        finally:
            self._discard(agreed)
            self._writings.clear()
        if self.failure is not None:
            raise self.failure

    def _report(self) -> dict[str, Any]:
        """End this rank's files, and say what is in them."""
        lines: list[Line] = []
        for writing in self._writings:
            with _naming(writing.path):
                lines += [line_of(*found) for found in writing.finish()]
        if self._writings:
            folder.sync(self.plan.place)
        files = {writing.path.name: writing.nbytes for writing in self._writings}
        return {"lines": lines, "files": files, "own": self.plan.own, "model": self.plan.model}

    def _discard(self, agreed: bool) -> None:
        """Close the files; where all have `agreed` that nothing is saved, remove them, else a later save does.

        A rank that has only waited too long must not: rank 0 may write an index that names them yet.
        """
        for writing in self._writings:
            with contextlib.suppress(OSError):
                writing.discard()
                if agreed:
                    writing.path.unlink(missing_ok=True)
        if agreed:
            with contextlib.suppress(OSError):
                self.plan.place.rmdir()  # where nothing else is in it

    def _publish(self, reports: list[dict[str, Any]]) -> None:
        """On rank 0: see that everything is there, write the index, then `latest`, and then clean up."""
        plan = self.plan
        files = {name: size for report in reports for name, size in report["files"].items()}
        for rank, report in enumerate(reports):
            for name, size in report["files"].items():
                path = plan.place / name
                self._wait_for(path, f"what rank {rank} has written, {size} bytes,", partial(_lacks, path, size))
        lines = (line for report in reports for line in report["lines"])
        ranks = tuple(report["own"] for report in reports)
        models = [report["model"] for report in reports]
        known, tied, extra = ({name: value for one in models for name, value in one[key].items()} for key in _BY_NAME)
        shared = {**plan.fields["shared"], "extra_state": extra}
        excluded = tuple(sorted(name for one in models for name in one["excluded"]))
        more = {"tied": tied, "shared": shared, "excluded": excluded, "files": files, "ranks": ranks}
        index = assemble(lines, known, {**plan.fields, **more})
        if found := problems(index):
            raise RuntimeError(f"the ranks have not written a whole checkpoint: {'; '.join(found[:5])}")
        self.moved(1)
        self._name(index.to_json())
        try:
            tidy(plan.place.parent, plan.place.name, plan.retention, plan.began, self.moved)
        except (OSError, ValueError) as error:  # nothing that a run depends on
            logger.warning("checkpoint '%s' is saved, but what is old could not be removed: %s", plan.place.name, error)
        except BaseException as error:
            self.failure = error  # for this rank's caller; saved is saved

    def _name(self, text: str) -> None:
        """The index, which makes it a checkpoint, and `latest`; both or neither."""
        place, root, renames = self.plan.place, self.plan.place.parent, []
        index = place / folder.INDEX
        before = index.read_text(encoding="utf-8") if index.exists() else None
        contents = {index: text}
        if self.plan.latest:
            contents[root / folder.LATEST] = f"{place.name}\n"
        try:
            for path, content in contents.items():
                with _naming(path):
                    renames.append((folder.prepare(path, content), path))
            try:
                for beside, path in renames:
                    with _naming(path):
                        os.replace(beside, path)
                        for changed in (place, root) if path == index else ():
                            folder.sync(changed)
            except BaseException:
                if before is None:
                    index.unlink(missing_ok=True)
                else:
                    folder.publish(index, before)
                raise
        finally:
            for beside, _ in renames:
                beside.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            folder.sync(root)

    def _wait_for(self, path: Path, what: str, lacks: Callable[[], str]) -> None:
        """Until nothing `lacks` of what another rank has made; network file systems may take a moment."""
        end = time.monotonic() + APPEARS
        while text := lacks():
            if time.monotonic() > end:
                shared = "the folder of a checkpoint must be shared by all ranks"
                raise RuntimeError(f"{path} does not show {what} to rank {self._barrier.rank}{text}; {shared}")
            self.moved(1)
            time.sleep(0.1)


class Snapshot:
    """A copy of what a save will write, in host memory that is taken once and used again by the next save.

    pinned: whether a GPU copies into it.
    """

    def __init__(self, pinned: bool = False) -> None:
        self._pinned = pinned
        self._memory: torch.Tensor | None = None
        self._used = 0
        self._mark: Event | None = None
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


def _lacks(path: Path, size: int) -> str:
    try:
        with open(path, "rb") as file:  # which has caches look again, as stat need not
            nbytes = os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        return ": nothing"
    return "" if nbytes == size else f": {nbytes} bytes of {size}"


@contextlib.contextmanager
def _naming(path: Path) -> Any:
    """An OSError that leaves names the file, also where the system call knew a number only."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def line_of(chunk: TensorChunk, part: Part) -> Line:
    """What a rank tells of a chunk that it has written."""
    return [
        chunk.kind,
        chunk.name,
        NAMES[chunk.values.dtype],
        list(chunk.shape),
        list(chunk.boxes),
        chunk.signed,
        *part,
    ]
