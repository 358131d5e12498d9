"""Finds accesses that nothing orders in a recorded program of streams: vector clocks, as race detectors have them.

Actors are the streams of a device and the threads of its host. What one actor does is in order. Of different ones an
access happens before another only by events, by what a thread hands to another one, and by the launch: work that is
queued comes after all that its thread has done or waited for.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Collection, Iterable
from typing import NamedTuple


class Span(NamedTuple):
    """Bytes of a buffer."""

    buffer: int
    start: int
    end: int


class Launch(NamedTuple):
    """`thread` has `stream` run an operation; without a stream it does so itself, now."""

    thread: str
    stream: str | None
    what: str
    reads: tuple[Span, ...] = ()
    writes: tuple[Span, ...] = ()


class Record(NamedTuple):
    """An event after all that the actor does until here; a thread's is something that it hands to another one."""

    actor: str
    event: int


class Wait(NamedTuple):
    """The actor goes on after an event; `site` in the product says so, "" for what the backend or Python does."""

    thread: str
    actor: str
    event: int
    site: str = ""


class Take(NamedTuple):
    """Memory for a buffer comes from what was given back to the pool of a stream, if the allocator likes.

    Who uses it on another stream must come after this moment of the pool's.
    """

    thread: str
    stream: str
    buffer: int
    nbytes: int = 0


class Keep(NamedTuple):
    """`record_stream`: the buffer, when given back, is not handed on before the stream has got so far."""

    buffer: int
    stream: str
    site: str = ""


class Free(NamedTuple):
    """The memory of a buffer goes back to the pool of the stream that it was taken in."""

    buffer: int


Program = list[Launch | Record | Wait | Take | Keep | Free]
Clock = dict[str, int]


def join(clock: Clock, other: Clock) -> None:
    """Everything before `other` is before `clock`."""
    for actor, count in other.items():
        clock[actor] = max(clock.get(actor, 0), count)


def races(program: Iterable[object], without: Collection[str] = ()) -> list[str]:
    """What is not ordered, in words, each kind once; `without` the waits, or keeps, of these sites."""
    clocks: dict[str, Clock] = defaultdict(dict)
    events: dict[int, Clock] = {}
    # By buffer: the last access of each kind to each span by each actor, with the actor's count at it.
    seen: dict[int, dict[tuple[int, int, str, bool], tuple[int, str]]] = defaultdict(dict)
    pool_of: dict[int, str] = {}
    free: dict[str, list[int]] = defaultdict(list)
    kept: dict[int, set[str]] = defaultdict(set)
    found: dict[str, None] = {}

    for entry in program:
        if getattr(entry, "site", None) in without:
            continue
        match entry:
            case Launch(thread, stream, what, reads, writes):
                actor = stream or thread
                clock = clocks[actor]
                join(clock, clocks[thread])
                clock[actor] = clock.get(actor, 0) + 1
                for span, write in [(span, False) for span in reads] + [(span, True) for span in writes]:
                    of_buffer = seen[span.buffer]
                    for (start, end, other, wrote), (count, before) in of_buffer.items():
                        apart = end <= span.start or span.end <= start or not (write or wrote)
                        if not apart and clock.get(other, 0) < count:
                            verb, done = "writes" if write else "reads", "wrote" if wrote else "read"
                            found[f"{actor} {verb} in {what} what {other} {done} in {before}"] = None
                    of_buffer[span.start, span.end, actor, write] = clock[actor], what
            case Record(actor, event):
                events[event] = dict(clocks[actor])
            case Wait(thread, actor, event):
                join(clocks[actor], clocks[thread])
                join(clocks[actor], events.get(event, {}))
            case Keep(buffer, stream):
                kept[buffer].add(stream)
            case Free(buffer):
                if buffer in pool_of:
                    free[pool_of[buffer]].append(buffer)
            case Take(thread, stream, buffer, _):
                pool_of[buffer] = stream
                clock = clocks[stream]
                join(clock, clocks[thread])
                clock[stream] = clock.get(stream, 0) + 1
                seen[buffer][0, sys.maxsize, stream, True] = clock[stream], "the allocator"
                for other_buffer in free.pop(stream, ()):
                    for (_, _, other, wrote), (count, before) in seen.pop(other_buffer, {}).items():
                        if other not in kept[other_buffer] and clock.get(other, 0) < count:
                            done = "wrote" if wrote else "read"
                            found[f"the pool of {stream} hands on what {other} {done} in {before}"] = None
    return list(found)


def sites(program: Iterable[object]) -> set[str]:
    """Where the product waits, or has memory kept."""
    return {entry.site for entry in program if getattr(entry, "site", "")}
