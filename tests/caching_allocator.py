"""What torch's allocator of a GPU asks the device for: its rules, applied to a recorded program.

Of each stream it keeps what was given back, whole pieces of the device's memory that are cut and joined again, the
small ones apart; a request takes the least that has room, and only where there is none the device is asked. After
c10/cuda/CUDACachingAllocator.cpp of torch 2.11, with its defaults. Memory that a stream was to keep (`record_stream`)
is handed on later: how much later depends on how far the host is ahead of the device.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from stream_order import Free, Keep, Take

UNIT, SMALL, MIDDLE, EVEN = 512, 1 << 20, 10 << 20, 2 << 20  # bytes
SMALL_PIECE, MIDDLE_PIECE = 2 << 20, 20 << 20  # what the device is asked for where less is wanted


@dataclass(eq=False)
class Block:
    """A part of a piece of the device's memory, between its neighbours; `pool`: that it goes back to."""

    nbytes: int
    pool: tuple[str, bool]
    before: Block | None = None
    after: Block | None = None


class CachingAllocator:
    """asked: bytes of each piece that the device was asked for."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self._free: dict[tuple[str, bool], list[Block]] = defaultdict(list)

    def take(self, stream: str, nbytes: int) -> Block:
        """A block of at least so many bytes."""
        nbytes = -(-nbytes // UNIT) * UNIT
        small = nbytes <= SMALL
        free = self._free[stream, small]
        block = min((each for each in free if each.nbytes >= nbytes), key=lambda each: each.nbytes, default=None)
        if block is None:
            piece = SMALL_PIECE if small else MIDDLE_PIECE if nbytes < MIDDLE else -(-nbytes // EVEN) * EVEN
            self.asked.append(piece)
            block = Block(piece, (stream, small))
        else:
            free.remove(block)
        rest = block.nbytes - nbytes
        if rest >= UNIT if small else rest > SMALL:
            block.nbytes = nbytes
            behind = Block(rest, block.pool, block, block.after)
            if block.after is not None:
                block.after.before = behind
            block.after = behind
            free.append(behind)
        return block

    def give(self, block: Block) -> None:
        """Back, together with neighbours that are free."""
        free = self._free[block.pool]
        if block.after in free:
            self._join(block, block.after)
        if block.before in free:
            block = self._join(block.before, block)
        free.append(block)

    def _join(self, first: Block, second: Block) -> Block:
        """Two neighbours, of which one is free and is taken out of its pool; the first becomes both."""
        pool = self._free[first.pool]
        pool.remove(first if first in pool else second)
        first.nbytes, first.after = first.nbytes + second.nbytes, second.after
        if first.after is not None:
            first.after.before = first
        return first


def asked(program: Iterable[object], ends: Iterable[int], held: Mapping[int, int], times: int, ahead: int) -> list[int]:
    """How often the device was asked in each step of a program whose steps have these `ends`.

    held: bytes of the buffers that are there before, by number; times: as large as these all are; ahead: by how many
    steps the host is, when memory that other streams have used is handed on.
    """
    allocator = CachingAllocator()
    blocks = {number: allocator.take("computes", times * nbytes) for number, nbytes in held.items()}
    kept: set[int] = set()
    waiting: dict[int, list[Block]] = defaultdict(list)
    counts, ends = Counter[int](), list(ends)
    allocator.asked.clear()
    step = 0
    for at, entry in enumerate(program):
        if step < len(ends) and at == ends[step]:
            step += 1
            for block in waiting.pop(step - ahead, ()):
                allocator.give(block)
        match entry:
            case Take(_, stream, buffer, nbytes) if nbytes:
                blocks[buffer] = allocator.take(stream, times * nbytes)
                counts[step] += len(allocator.asked)
                allocator.asked.clear()
            case Keep(buffer, _):
                kept.add(buffer)
            case Free(buffer) if buffer in blocks:
                block = blocks.pop(buffer)
                if buffer in kept and ahead:
                    waiting[step].append(block)
                else:
                    allocator.give(block)
    return [counts[step] for step in range(len(ends))]
