"""One save on one rank: what it writes, what it tells the others, and what rank 0 makes of that."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from zero.checkpoint import folder
from zero.checkpoint.index import Index, Parameter, Part, Stored
from zero.checkpoint.retention import Retention, tidy
from zero.checkpoint.safe_file import NAMES, TensorChunk, Writing
from zero.checkpoint.staging import Staging
from zero.checkpoint.store_barrier import Lost, StoreBarrier
from zero.log import logger
from zero.plan.cut import Box

APPEARS = 10.0  # seconds that another host's file may take to be seen
WRITES = "writing a checkpoint"
Boxes = tuple[Box, ...]
Line = list[Any]  # [kind, name, dtype, shape, boxes, start, numel, file, offset, checksums], as JSON carries it


class Job:
    """The files of this rank in one save, and how it ends.

    Chunks come through `put`, as many and in whatever order they become readable; `finish` does the rest, in any
    thread.

    root, tag: where it goes; save: see `Index`; latest: whether the file of that name will name it;
    fields, known: of the index, see `assemble`; used on rank 0 only. own: what this rank keeps for itself, as JSON;
    failure: why this rank's part cannot be written, or None.
    """

    def __init__(
        self, barrier: StoreBarrier, root: Path, tag: str, save: str, latest: bool, retention: Retention, began: float
    ) -> None:
        """`began`: time.time() of the start of the run, as of `tidy`."""
        self.root = root
        self.tag = tag
        self.save = save
        self.latest = latest
        self.place = root / tag
        self.fields: dict[str, Any] = {}
        self.known: dict[str, dict[str, Any]] = {}
        self.signed: dict[str, bool] = {}
        self.own: Any = {}
        self.failure: BaseException | None = None
        self.moved = barrier.moved
        self._barrier = barrier
        self._retention = retention
        self._began = began
        self._writings: list[Writing] = []
        self._homes: dict[tuple[str, str, int], Writing] = {}

    def begin(self, kinds: Mapping[str, Sequence[TensorChunk]]) -> None:
        """Make the files, each for chunks like these, whose values may be on the meta device. Raises OSError."""
        rank, world_size, staging = self._barrier.rank, self._barrier.world_size, Staging()
        self._wait_for(
            self.place, "the folder that rank 0 has made", lambda: "" if self.place.is_dir() else ": nothing"
        )
        for kind, forms in kinds.items():
            path = self.place / file_name(kind, rank, world_size, self.save)
            with _naming(path):
                writing = Writing(path, forms, {}, self.moved, staging)
            self._writings.append(writing)
            self._homes |= {(form.kind, form.name, form.start): writing for form in forms}

    def put(self, chunk: TensorChunk) -> None:
        """Write one chunk. Raises OSError."""
        writing = self._homes[chunk.kind, chunk.name, chunk.start]
        with _naming(writing.path):
            writing.put(chunk)

    @property
    def interrupted(self) -> bool:
        """Whether it failed with what is no error, such as Ctrl-C, and must reach the caller at once."""
        return self.failure is not None and not isinstance(self.failure, Exception)

    def fail(self, error: BaseException) -> None:
        """This rank's part cannot be written; `finish` will tell the others."""
        self.failure = self.failure or error

    def finish(self, rest: Iterable[TensorChunk] = (), in_call: bool = False) -> None:
        """Write what is left, and end the save with the other ranks; `in_call`: as of `StoreBarrier.settle`.

        Raises OSError or RuntimeError, the same on all ranks, naming rank and file; nothing of this save is left then,
        and what was there before is there.
        """
        report: Any
        try:
            if self.failure is not None:
                raise self.failure
            for chunk in rest:
                self.put(chunk)
            report = self._said()
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

    def _said(self) -> dict[str, Any]:
        """Ends this rank's files, and says what is in them."""
        lines: list[Line] = []
        for writing in self._writings:
            with _naming(writing.path):
                lines += [line_of(*found) for found in writing.finish()]
        if self._writings:
            folder.sync(self.place)
        files = {writing.path.name: writing.nbytes for writing in self._writings}
        return {"lines": lines, "files": files, "signed": self.signed, "own": self.own}

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
                self.place.rmdir()  # where nothing else is in it

    def _publish(self, reports: list[dict[str, Any]]) -> None:
        """On rank 0: see that everything is there, write the index, then `latest`, and then clean up."""
        files = {name: size for report in reports for name, size in report["files"].items()}
        for rank, report in enumerate(reports):
            for name, size in report["files"].items():
                path = self.place / name
                self._wait_for(path, f"what rank {rank} has written, {size} bytes,", partial(_lacks, path, size))
        signed = {key: value for report in reversed(reports) for key, value in report["signed"].items()}
        more = {"files": files, "signed": signed, "ranks": tuple(report["own"] for report in reports)}
        lines = (line for report in reports for line in report["lines"])
        index = assemble(lines, self.known, self.fields | more)
        if problems := index.problems():
            raise RuntimeError(f"the ranks have not written a whole checkpoint: {'; '.join(problems[:5])}")
        self.moved(1)
        self._name(index.to_json())
        try:
            tidy(self.root, self.tag, self._retention, self._began, self.moved)
        except (OSError, ValueError) as error:  # nothing that a run depends on
            logger.warning("checkpoint '%s' is saved, but what is old could not be removed: %s", self.tag, error)
        except BaseException as error:
            self.failure = error  # for this rank's caller; saved is saved

    def _name(self, text: str) -> None:
        """The index, which makes it a checkpoint, and `latest`; both or neither."""
        path, latest = self.place / folder.INDEX, self.root / folder.LATEST
        before = path.read_text(encoding="utf-8") if path.exists() else None
        prepared = []
        try:
            with _naming(path):
                prepared.append(folder.prepare(path, text))
            if self.latest:
                with _naming(latest):
                    prepared.append(folder.prepare(latest, self.tag + "\n"))
            try:
                with _naming(path):
                    os.replace(prepared[0], path)
                    folder.sync(self.place)
                    folder.sync(self.root)
                if self.latest:
                    os.replace(prepared[1], latest)
            except BaseException:
                if before is None:
                    path.unlink(missing_ok=True)
                else:
                    folder.publish(path, before)
                raise
        finally:
            for beside in prepared:
                beside.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            folder.sync(self.root)

    def _wait_for(self, path: Path, what: str, lacks: Callable[[], str]) -> None:
        """Until nothing `lacks` of what another rank has made; network file systems may take a moment."""
        end = time.monotonic() + APPEARS
        while text := lacks():
            if time.monotonic() > end:
                shared = "the folder of a checkpoint must be shared by all ranks"
                raise RuntimeError(f"{path} does not show {what} to rank {self._barrier.rank}{text}; {shared}")
            self.moved(1)
            time.sleep(0.1)


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
    return [chunk.kind, chunk.name, NAMES[chunk.values.dtype], list(chunk.shape), list(chunk.boxes), *part]


def assemble(lines: Iterable[Line], known: Mapping[str, Mapping[str, Any]], values: Mapping[str, Any]) -> Index:
    """The index of everything that `lines` of all ranks say.

    known:  for each parameter its "group", "numbers", "dtype" and "shape".
    values: the other fields of `Index`.
    """
    by_kind: dict[str, dict[str, Stored]] = {}
    cuts: dict[tuple[str, str], dict[Boxes, int]] = {}  # the boxes of each part of a tensor, with where these begin
    for kind, name, dtype, shape, boxes, start, numel, file, offset, sums in lines:
        tensors = by_kind.setdefault(kind, {})
        before = tensors.get(name, Stored(dtype, tuple(shape), ()))
        of_rank, begins = boxes_of_json(boxes), cuts.setdefault((kind, name), {})
        if of_rank not in begins:
            begins[of_rank] = sum(box.numel for box in before.boxes)
            before = replace(before, boxes=before.boxes + of_rank)
        part = Part(begins[of_rank] + start, numel, file, offset, tuple(sums))
        tensors[name] = replace(before, parts=tuple(sorted((*before.parts, part))))
    weights, masters = by_kind.pop("weight", {}), by_kind.pop("master", {})
    buffers, tensors = by_kind.pop("buffer", {}), by_kind.pop("tensor", {})
    scales = {kind.removeprefix("scales."): by_kind.pop(kind) for kind in list(by_kind) if kind.startswith("scales.")}
    parameters = {
        name: Parameter(
            weight=weights.get(name, Stored(more["dtype"], tuple(more["shape"]), ())),  # one without elements
            master=masters.get(name),
            moments=_of(by_kind, name),
            scales=_of(scales, name),
            numbers=more["numbers"],
            group=more["group"],
        )
        for name, more in known.items()
    }
    return Index(parameters=parameters, buffers=buffers, tensors=tensors, **values)


def _of(kinds: Mapping[str, Mapping[str, Stored]], name: str) -> dict[str, Stored]:
    return {kind: tensors[name] for kind, tensors in kinds.items() if name in tensors}


def boxes_of_json(boxes: Iterable[Any]) -> Boxes:
    """Boxes as a rank has told of them."""
    return tuple(Box(tuple(offset), tuple(sizes)) for offset, sizes in boxes)


def file_name(kind: str, rank: int, world_size: int, save: str) -> str:
    """What a rank's file of one kind is called; `save` keeps it apart from those of an earlier save of the tag."""
    return f"{kind}-{rank:05d}-of-{world_size:05d}.{save}.safetensors"
