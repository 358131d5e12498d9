"""The records that ranks publish of themselves, and what a waiting rank concludes from them. Plain values only."""

from __future__ import annotations

import dataclasses
import enum
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

MOST_GROUPS = 6  # a report stays readable at any world size
MOST_RANGES = 8
MOST_LETTERS = 500  # of another rank's message


class Phase(enum.Enum):
    """Which call of the engine a rank is in."""

    INITIALIZE = "initialize()"
    OUTSIDE = "outside"
    FORWARD = "forward"
    BACKWARD = "backward"
    STEP = "step"
    SAVE = "save_checkpoint()"
    DESTROYED = "destroyed"
    ENDED = "ended"


class Blocked(NamedTuple):
    """A wait of a training loop: its begin, by the clock of that rank; among, turn, needs: as in `Collective`.

    owes: waits of other ranks, by rank and begin, for what this one has not begun, and will not inside of its wait.
    """

    since: float
    among: int
    turn: int
    needs: tuple[int, ...] = ()
    owes: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Record:
    """One rank's published state.

    beat:    grows with every record; a rank whose beat does not grow is stopped or dead;
    steps:   optimizer steps it has done;
    number:  collectives it has begun, and `last` the text of the last one;
    waits:   text of the collective that it waits for, "" when it does not wait; `wait` its number, `seconds` how long;
    error:   the last exception that left the engine, as text; kept when the rank continues;
    fault:   0, or the place of that exception among those of all ranks, until the rank continues;
    missing: the ranks whose absence made it give up; empty if the exception is its own;
    progress: grows while it writes a checkpoint;
    forwards: that built a graph and have had no backward, since the last one;
    blocked: what its training loop waits for, where others can tell whether they have begun it.
    """

    rank: int
    beat: int = 0
    phase: Phase = Phase.OUTSIDE
    steps: int = 0
    number: int = 0
    last: str = ""
    waits: str = ""
    wait: int = 0
    seconds: float = 0.0
    error: str = ""
    fault: int = 0
    missing: tuple[int, ...] = ()
    gave_up: bool = False
    progress: int = 0
    forwards: int = 0
    blocked: Blocked | None = None

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(dataclasses.asdict(self) | {"phase": self.phase.value}, separators=(",", ":"))


def record_of(text: str | bytes) -> Record:
    """The record from the text of `to_json`."""
    values = json.loads(text)
    if blocked := values["blocked"]:
        *plain, needs, owes = blocked
        values["blocked"] = Blocked(*plain, tuple(needs), tuple(map(tuple, owes)))
    return Record(**values | {"phase": Phase(values["phase"]), "missing": tuple(values["missing"])})


class Seen(NamedTuple):
    """Another rank's record, and the seconds since its beat last grew."""

    record: Record
    silent: float


class View(NamedTuple):
    """A rank's knowledge of the others.

    others:  by rank; a rank that never wrote is missing;
    peers:   the other ranks;
    silence: seconds without a beat after which a rank counts as stopped or dead;
    store:   seconds since the store last answered; inf if its connection is closed;
    keeper:  the rank whose process runs the store, or None if it is no rank's.
    """

    others: Mapping[int, Seen]
    peers: tuple[int, ...]
    silence: float
    store: float
    keeper: int | None = None


def ranks_text(ranks: Iterable[int]) -> str:
    """`rank 3` or `ranks 0-2, 5`."""
    ordered = sorted(set(ranks))
    ranges: list[list[int]] = []
    for rank in ordered:
        if ranges and ranges[-1][1] == rank - 1:
            ranges[-1][1] = rank
        else:
            ranges.append([rank, rank])
    parts = []
    for first, last in ranges[:MOST_RANGES]:
        parts += [str(first)] if first == last else [f"{first}, {last}"] if last == first + 1 else [f"{first}-{last}"]
    if len(ranges) > MOST_RANGES:
        parts.append("...")
    return f"{'rank' if len(ordered) == 1 else 'ranks'} {', '.join(parts)}"


def clipped(text: str) -> str:
    """The first line of a message, shortened."""
    line = text.strip().partition("\n")[0]
    return line if len(line) <= MOST_LETTERS else line[: MOST_LETTERS - 3] + "..."


def where(record: Record) -> str:
    """Where a responding rank is, as a phrase after its name and a colon."""
    last = f", last the {record.last}" if record.last else ""
    if record.gave_up and record.fault:
        blamed = f" for want of {ranks_text(record.missing)}" if record.missing else ""
        return f"gave up{blamed}: {record.error}"
    if record.fault:
        return f"raised {record.error}{last}"
    if record.phase is Phase.ENDED:
        fatal = f" with {record.error}" if record.error else ""
        return f"has ended its program{fatal} after {_steps(record)}{last}"
    if record.phase is Phase.DESTROYED:
        return f"has let go of its engine after {_steps(record)}{last}"
    went_on = f"; earlier it raised {record.error} and went on" if record.error and not record.fault else ""
    if record.waits:
        return f"waiting for the {record.waits}, {_within(record.phase)}after {_steps(record)}{went_on}"
    if record.phase is Phase.OUTSIDE:
        since = f"step {record.steps}" if record.steps else "start"
        return f"outside the engine since its {since}{last}{went_on}"
    return f"computing {_within(record.phase)}after {_steps(record)}{last}{went_on}"


def hang_report(view: View, waits: str) -> str:
    """Where every other rank is, in groups; `waits` is the text of this rank's wait."""
    groups: dict[str, list[int]] = {}
    for rank, seen in sorted(view.others.items()):
        groups.setdefault(_phrase(seen, waits, view.silence), []).append(rank)
    # Ranks in the same wait first; then the smallest groups, which are the interesting ones.
    ordered = sorted(groups.items(), key=lambda item: (item[0] != _SAME, len(item[1]), item[1]))
    parts = [f"{ranks_text(ranks)}: {phrase}" for phrase, ranks in ordered[:MOST_GROUPS]]
    if len(ordered) > MOST_GROUPS:
        parts.append(f"{ranks_text(rank for _, ranks in ordered[MOST_GROUPS:] for rank in ranks)}: elsewhere")
    if any(_diverged(waits, seen.record) for seen in view.others.values() if seen.silent < view.silence):
        parts.append(REMEDY)
    if any(seen.record.phase is Phase.SAVE and not seen.record.fault for seen in view.others.values()):
        parts.append(f"either {SAVES}, or {FEWER}")
    if view.store > view.silence:
        parts.append(store_text(view))
    elif missing := set(view.peers) - view.others.keys():
        parts.append(f"{ranks_text(missing)}: never heard of")
    return "; ".join(parts)


REMEDY = (
    "ranks that run different blocks gather different units: make the module around these blocks a leaf "
    "(zero_optimization.leaf_module) or name it in zero.units, and generate texts with engine.generate()"
)

FEWER = "ranks had different numbers of batches, which a loader of initialize(training_data=...) gives all alike"
SAVES = "save_checkpoint() was called on some ranks only: it is for all, so not inside of `if rank == 0:`"


def _diverged(waits: str, record: Record) -> bool:
    """Whether that rank waits in vain like this one, but for another unit."""
    both = (waits, record.waits)
    return (
        not record.fault
        and waits != record.waits
        and all(" of unit " in each for each in both)
        and (any(each.startswith("gather") for each in both))
    )


def store_text(view: View) -> str:
    """The explanation of a store that does not answer."""
    since = "its connection is closed" if view.store == math.inf else f"it has not answered for {view.store:.1f} s"
    if view.keeper is None:
        return f"the store of the process group is out of reach ({since})"
    return f"rank {view.keeper} is stopped or dead, and with it the store of the process group ({since})"


def wanted(view: View, waits: str) -> tuple[int, ...]:
    """The ranks whose absence keeps the collective from ending."""
    ranks = [rank for rank, seen in view.others.items() if _phrase(seen, waits, view.silence) != _SAME]
    lost = view.keeper is not None and view.store > view.silence
    return tuple(sorted(ranks)) or ((view.keeper,) if lost else ())


def cause(view: View, number: int, perhaps: str = FEWER) -> str:
    """Why waiting for collective `number` is in vain, or "" if it may still end.

    perhaps: the possible reason if another rank has ended without an error.
    A rank that has failed or ended matters only if it has not begun that collective; else its part is sent.
    """
    for record in _faults(view):
        if not record.gave_up and record.number < number:
            return _told(record)
    if gone := [rank for rank in _ended(view) if view.others[rank].record.number < number]:
        return _gone(view, gone, perhaps)
    # A rank that gave up has closed its connections, or is about to.
    return next((_told(record) for record in _faults(view) if record.gave_up), "")


def deadlock(view: View, own: Record) -> dict[int, float]:
    """The ranks that wait for each other for ever, this one among them, with the begin of their waits; {} if none do.

    A rank's wait can not end before all that it needs have begun their part, and who waits begins nothing. So if each
    of some ranks waits for one of them that has not begun its part, none of these waits ends.
    """
    records = {record.rank: record for record in (own, *(seen.record for seen in view.others.values()))}
    stuck = {rank: record.blocked.since for rank, record in records.items() if record.blocked}
    while True:
        owed = {(rank, since) for other in stuck for rank, since in records[other].blocked.owes}
        left = {rank: since for rank, since in stuck.items() if (rank, since) in owed}
        if left == stuck:
            return stuck if own.rank in stuck else {}
        stuck = left


def blame(view: View, own: Record, stuck: Iterable[int]) -> str:
    """Why these ranks wait for each other, as far as their records tell."""
    others = [view.others[rank].record for rank in stuck if rank != own.rank]
    records = sorted([own, *others], key=lambda record: record.rank)
    if raised := [record for record in records if record.error]:
        return "; ".join(f"rank {record.rank} raised {record.error} and went on" for record in raised)
    most = max(record.forwards for record in records)
    if skipped := [record.rank for record in records if record.forwards < most]:
        skipped = [rank for rank in sorted(stuck) if rank not in skipped]
        return f"{ranks_text(skipped)} went on after a forward without its backward"
    return f"{ranks_text(stuck)} run different parts of the program"


UNKNOWN = "a message failed though every other rank still speaks"


def cause_of_loss(view: View, seconds: float) -> str:
    """Why a connection was lost `seconds` ago; "" while that is unknown, UNKNOWN after 1.25 x silence."""
    faults, ended = _faults(view), _ended(view)
    for record in faults:
        if not record.gave_up:
            return _told(record)
    # A rank that has ended is silent, too, but announced it before.
    silent = sorted(rank for rank, seen in view.others.items() if seen.silent >= view.silence and rank not in ended)
    if silent:
        return f"{ranks_text(silent)} gone: {_silence(view.others[silent[0]])}"
    if view.store == math.inf:
        return store_text(view)
    if seconds < 1.25 * view.silence and not faults:
        return ""
    if ended:
        return _gone(view, ended, FEWER)
    if faults:
        return _told(faults[0])
    return store_text(view) if view.store > view.silence else UNKNOWN


def first_difference(lists: Sequence[Sequence[str]]) -> tuple[int, list[str]]:
    """The first index at which lists of different ranks differ, and their items there; "" if a list has ended."""
    for index in range(max(map(len, lists))):
        there = [texts[index] if index < len(texts) else "" for texts in lists]
        if len(set(there)) > 1:
            return index, there
    return -1, []


def difference_text(there: Sequence[str], nothing: str, ranks: Sequence[int] | None = None) -> str:
    """The item of each of `ranks` (0, 1, ...) where they differ, with equal ranks grouped."""
    groups: dict[str, list[int]] = {}
    for rank, text in zip(range(len(there)) if ranks is None else ranks, there, strict=True):
        groups.setdefault(clipped(text) or nothing, []).append(rank)
    parts = [f"{ranks_text(alike)}: {text}" for text, alike in list(groups.items())[:MOST_GROUPS]]
    return "; ".join(parts) + ("; and others" if len(groups) > MOST_GROUPS else "")


_SAME = "waiting for the same"


def _phrase(seen: Seen, waits: str, silence: float) -> str:
    record = seen.record
    if record.phase not in (Phase.ENDED, Phase.DESTROYED) and seen.silent >= silence:
        return _silence(seen)
    if waits and record.waits == waits and not record.fault:
        return _SAME
    return where(record)


def _silence(seen: Seen) -> str:
    return f"not heard of for {seen.silent:.0f} s, stopped or dead (when last heard: {where(seen.record)})"


def _faults(view: View) -> list[Record]:
    """The records of ranks that raised or gave up, in order of the faults."""
    return sorted((seen.record for seen in view.others.values() if seen.record.fault), key=lambda record: record.fault)


def _ended(view: View) -> list[int]:
    return sorted(rank for rank, (record, _) in view.others.items() if record.phase in (Phase.ENDED, Phase.DESTROYED))


def _gone(view: View, ranks: list[int], perhaps: str) -> str:
    record = view.others[ranks[0]].record
    return f"{ranks_text(ranks)} {where(record)}" + (f"; perhaps {perhaps}" if not record.error else "")


def _told(record: Record) -> str:
    return f"rank {record.rank} {where(record)}"


def _steps(record: Record) -> str:
    return f"{record.steps} step{'' if record.steps == 1 else 's'}"


def _within(phase: Phase) -> str:
    return "" if phase is Phase.OUTSIDE else f"in {phase.value} "
