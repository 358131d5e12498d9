"""What every rank does by itself and all must succeed in: looking at a checkpoint, and reading their parts of it."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

from zero.checkpoint.differences import Ask, Match
from zero.checkpoint.index import Damaged, Index
from zero.core.agree import agree
from zero.core.world import Axis

T = TypeVar("T")

# What one rank may find wrong alone, and tells the others, so that none waits for it.
REFUSALS = (ValueError, OSError, RuntimeError, MemoryError)


class LoadPlan(NamedTuple):
    """A checkpoint that fits, and what is loaded from where; `near`: all ranks read it through one page cache."""

    place: Path
    index: Index
    match: Match
    ask: Ask
    near: bool = False


class CollectiveRead:
    """The ranks of `axis`; `what` they do is said in errors.

    Methods are collectives.
    """

    def __init__(self, what: str, axis: Axis) -> None:
        self._what = what
        self._axis = axis

    def find(self, look: Callable[[], LoadPlan | None]) -> LoadPlan | None:
        """What all ranks find alike; raises on all of them where one cannot load it, or finds another save."""
        plan = self.read(look)
        save = None if plan is None else f"'{plan.index.tag}' saved as {plan.index.save}"
        place = None if plan is None else str(plan.place)
        answers = agree([save, place, _host()], self._axis)
        if len({save for save, *_ in answers}) > 1:
            ranks = zip(self._axis.ranks, answers, strict=True)
            each = "; ".join(f"rank {rank}: {save} in {place}" for rank, (save, place, _) in ranks)
            raise ValueError(f"{self._what}: the ranks would load different checkpoints: {each}")
        near = len({(place, host) for _, place, host in answers}) == 1
        return None if plan is None else plan._replace(near=near)

    def read(self, work: Callable[[], T], after: Callable[[bool], None] | None = None) -> T:
        """The result of `work`; raises on all ranks where it fails on one.

        All call `after` in any case, and tell it whether it succeeded on all of them.
        """
        result, problem = None, None
        try:
            result = work()
        except REFUSALS as error:
            problem = error
        # What the other ranks are told: a text, and whether the checkpoint is damaged.
        answers = agree(None if problem is None else [str(problem), isinstance(problem, Damaged)], self._axis)
        if after is not None:
            after(all(answer is None for answer in answers))
        if problem is not None:
            raise problem
        for rank, answer in zip(self._axis.ranks, answers, strict=True):
            if answer is not None:
                text, damaged = answer
                raise (Damaged if damaged else ValueError)(f"{self._what}: rank {rank}: {text}")
        return result


def _host() -> str:
    """What ranks have in common whose files come from one page cache: the kernel that was booted."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname()
