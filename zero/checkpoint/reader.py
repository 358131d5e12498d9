"""The tensors of one checkpoint, range by range: each file opened once, large reads by a few threads.

Who reads many ranges asks for them, with what to call when they are there, and reads them together.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from zero.checkpoint.index import CHUNK, ITEMSIZE, Damaged, Index, Part, Stored
from zero.checkpoint.safe_file import DTYPES, read_part
from zero.checkpoint.staging import host_bytes
from zero.kernels.moments import BLOCK, Moment, blocks_of
from zero.kernels.remainder import join
from zero.memory.available import host_threads
from zero.plan.cut import Box, Cut, places, whole
from zero.plan.layout import round_up

T = TypeVar("T")
Taker = Callable[[torch.Tensor], Any]  # of what was read

SLICE = 1 << 22  # elements that are converted, or copied to another device, at a time; a multiple of BLOCK

_TASK = 16 * CHUNK  # bytes that one thread reads at a time
_STAGED = 64 * CHUNK  # bytes of host memory for what does not go straight to its place
_OPEN = 128  # files that stay open
_THREADS = 4  # reading and checking more would only share one memory


class Task(NamedTuple):
    """The arguments of `read_part`; the tensor of the target is kept alive by the `Reader`."""

    file: int
    part: Part
    skip: int
    target: memoryview
    itemsize: int
    what: str


class Reader:
    """Collects what is wanted by `ask` and reads it in `finish`; to be used by one thread, in a `with` statement.

    What has a `then` is handed over by `finish`, on the CPU; names are those of `index`. Elements are those of the
    flattened tensor or, with a `cut`, of its boxes, one after the other. They may have been saved in other boxes.
    """

    def __init__(self, folder: Path, index: Index) -> None:
        self.folder = folder
        self.index = index
        self._files: dict[str, int] = {}
        self._tasks: list[Task] = []
        self._then: list[Callable[[], None]] = []
        self._alive: list[torch.Tensor] = []
        self._staged = 0
        self._pool: ThreadPoolExecutor | None = None

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *error: object) -> None:
        """Close all files; what was asked for and not read is forgotten."""
        if self._pool is not None:
            self._pool.shutdown()
        self._tasks, self._then, self._alive = [], [], []
        self._close_files()

    def read(self, stored: Stored, start: int, numel: int, what: str) -> torch.Tensor:
        """Elements [start, start + numel) of a tensor, [numel] in the stored dtype, at once; raises Damaged."""
        out = torch.empty(numel, dtype=DTYPES[stored.dtype])
        self.ask(stored, start, out, what)
        self.finish()
        return out

    def whole(self, stored: Stored, what: str) -> torch.Tensor:
        """All of a tensor, in its shape, at once."""
        return self.read(stored, 0, stored.numel, what).view(stored.shape)

    def fill(self, out: torch.Tensor, stored: Stored, start: int, what: str, cut: Cut | None = None) -> None:
        """Fill `out` [n], contiguous and of the stored dtype, on any device, with the elements from `start` on."""
        if out.device.type == "cpu":
            self.ask(stored, start, out, what, cut=cut)
            return
        for begin in range(0, out.numel(), SLICE):
            place = out[begin : begin + SLICE]
            self._stage(stored, start + begin, place.numel(), what, place.copy_, cut)

    def exact(
        self,
        name: str,
        start: int,
        numel: int,
        then: Taker,
        masters: bool = True,
        cut: Cut | None = None,
    ) -> None:
        """The exact values of a parameter, fp32 [numel] (of one in fp64 or of integers: in its dtype).

        `masters`: those of the optimizer, where they are there, and not what the model computed with.
        """
        parameter, parts = self.index.parameters[name], []
        master = parameter.master if masters else None
        wanted = [] if master is not None and master.dtype == "fp32" else [("weight", parameter.weight)]
        wanted += [] if master is None else [("master", master)]

        def came(values: torch.Tensor) -> None:
            parts.append(values)
            if len(parts) == len(wanted):
                then(_exact(parts))

        for kind, stored in wanted:
            self._stage(stored, start, numel, f"{kind} of '{name}'", came, cut)

    def moment(self, name: str, key: str, start: int, numel: int, then: Taker, cut: Cut | None = None) -> None:
        """State `key` of elements [start, start + numel), fp32 [numel], converted from the format in the file."""
        parameter = self.index.parameters[name]
        stored, signed = parameter.moments[key], bool(self.index.signed.get(key, True))
        what = f"{key} of '{name}'"
        if stored.dtype != "uint8":
            self._stage(stored, start, numel, what, lambda values: then(Moment(values).decode(signed)), cut)
            return
        if cut is not None:  # blocks are of neighbours in the full tensor; what lies between the boxes is read, too
            full, wanted = whole(cut.shape), list(places(cut.boxes, start, numel))
            first = min((full.index(box.offset) for box, _ in wanted), default=0)
            stop = max((full.index(_last(box)) + 1 for box, _ in wanted), default=0)
            self.moment(name, key, first, stop - first, lambda values: then(_taken(values, full, first, wanted, numel)))
            return
        first = start // BLOCK * BLOCK  # whole blocks, as a scale is that of one
        count = min(round_up(start + numel, BLOCK), stored.numel) - first
        codes: list[torch.Tensor] = []
        self._stage(stored, first, count, what, codes.append)

        def came(scales: torch.Tensor) -> None:
            then(Moment(codes[0], scales).decode(signed)[start - first :][:numel])

        self._stage(parameter.scales[key], first // BLOCK, blocks_of(count), f"scales of {what}", came)

    def ask(
        self,
        stored: Stored,
        start: int,
        out: torch.Tensor,
        what: str,
        then: Callable[[], None] | None = None,
        cut: Cut | None = None,
    ) -> None:
        """Have `out` (contiguous, on the CPU, of the stored dtype) filled with the elements from `start` on.

        `then` is called when it and all that was asked for before are there, in this thread and in order. Such an `out`
        is memory for the meantime: when there is much of it, `finish` comes by itself. Raises Damaged as `finish` does.
        """
        if stored.boxes or cut is not None:
            boxes = [whole(stored.shape)] if cut is None else cut.boxes
            there = stored.boxes or [whole(stored.shape if cut is None else cut.shape)]
            self._ask_boxes(stored, there, places(boxes, start, out.numel()), out, what)
        else:
            self._ask_range(stored, start, out, what)
        if then is not None:
            self._then.append(then)
            self._staged += out.nbytes
        if self._staged >= _STAGED:
            self.finish()

    def _ask_boxes(
        self, stored: Stored, there: Sequence[Box], wanted: Iterable[tuple[Box, int]], out: torch.Tensor, what: str
    ) -> None:
        """The same of boxes of the tensor, each for its place in `out`; what lies between their rows is read, too."""
        for box, at in wanted:
            begin = 0
            for other in there:
                common = box.intersect(other)
                if common is not None:
                    first, stop = other.index(common.offset), other.index(_last(common)) + 1
                    read = torch.empty(stop - first, dtype=out.dtype)
                    offset = out.storage_offset() + at + box.index(common.offset)
                    place = out.as_strided(common.sizes, box.strides, offset)
                    rows = read.as_strided(common.sizes, other.strides)
                    self._ask_range(stored, begin + first, read, what)
                    self._then.append(partial(place.copy_, rows))
                    self._staged += read.nbytes
                begin += other.numel

    def _ask_range(self, stored: Stored, start: int, out: torch.Tensor, what: str) -> None:
        """The same of elements as parts count them."""
        size, target = ITEMSIZE[stored.dtype], host_bytes(out)
        self._alive.append(out)
        for part, first, count in stored.cover(start, out.numel()):
            begin, skip, nbytes = (first - start) * size, (first - part.start) * size, count * size
            done = 0
            while done < nbytes:
                # Ends on a chunk of the part, so that no two tasks read the same one.
                step = min(nbytes - done, _TASK - (skip + done) % CHUNK)
                place = target[begin + done : begin + done + step]
                self._tasks.append(Task(self._open(part.file, what), part, skip + done, place, size, what))
                done += step

    def finish(self) -> None:
        """Read all that was asked for. Raises Damaged, naming tensor and file, for what is not as it was saved."""
        tasks, then, alive = self._tasks, self._then, self._alive
        self._tasks, self._then, self._alive, self._staged = [], [], [], 0
        if sum(task.target.nbytes for task in tasks) <= _TASK:
            _run(tasks)
        else:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(max(2, min(_THREADS, host_threads())), "zero-read")
            groups = grouped(tasks, lambda task: task.target.nbytes, _TASK)  # so that a thread has enough to do
            failed = [done.exception() for done in [self._pool.submit(_run, group) for group in groups]]
            for error in failed:
                if error is not None:
                    raise error
        for call in then:
            call()
        del alive  # the memory that the tasks wrote to

    def _stage(self, stored: Stored, start: int, numel: int, what: str, then: Taker, cut: Cut | None = None) -> None:
        out = torch.empty(numel, dtype=DTYPES[stored.dtype])
        self.ask(stored, start, out, what, lambda: then(out), cut)

    def _open(self, name: str, what: str) -> int:
        if name not in self._files:
            if len(self._files) >= _OPEN:
                _run(self._tasks)  # before the files are closed
                self._tasks = []
                self._close_files()
            try:
                self._files[name] = os.open(self.folder / name, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                raise Damaged(f"{what}: {name} is missing in {self.folder}") from None
            except OSError as error:
                raise Damaged(f"{what}: {self.folder / name} cannot be read: {error.strerror}") from None
        return self._files[name]

    def _close_files(self) -> None:
        while self._files:
            os.close(self._files.popitem()[1])


def _run(tasks: list[Task]) -> None:
    for task in tasks:
        read_part(*task)


def grouped(items: Iterable[T], nbytes: Callable[[T], int], limit: int) -> list[list[T]]:
    """Neighbours together, of at most `limit` bytes where single ones are not larger."""
    groups: list[list[T]] = [[]]
    size = 0
    for item in items:
        if groups[-1] and size + nbytes(item) > limit:
            groups.append([])
            size = 0
        groups[-1].append(item)
        size += nbytes(item)
    return groups


def _last(box: Box) -> tuple[int, ...]:
    """The coordinates of its last element."""
    return tuple(first + size - 1 for first, size in zip(box.offset, box.sizes, strict=True))


def _taken(values: torch.Tensor, full: Box, first: int, wanted: Iterable[tuple[Box, int]], numel: int) -> torch.Tensor:
    """What boxes hold of a tensor, [numel], from its `values` from element `first` on."""
    out = values.new_empty(numel)
    for box, at in wanted:
        out[at : at + box.numel].view(box.sizes).copy_(
            values.as_strided(box.sizes, full.strides, values.storage_offset() + full.index(box.offset) - first)
        )
    return out


def _exact(parts: list[torch.Tensor]) -> torch.Tensor:
    """Exact values of a weight and its remainder, or of the one tensor that has them."""
    if len(parts) == 2:
        return join(*parts)
    return parts[0].float() if parts[0].dtype in (torch.bfloat16, torch.float16) else parts[0]
