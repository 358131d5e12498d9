"""The end of a job: the failure that came first, in words, and the exit status that follows from it."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from zero.launch.contract import SAVED


@dataclass(frozen=True)
class Failure:
    """A rank that ended other than well."""

    rank: int
    exitcode: int  # below 0: minus the number of the signal that killed it
    pid: int
    node: int = 0
    host: str | None = None  # None: this machine, the only one
    message: str | None = None  # the last that it said
    log: str | None = None  # the file of its stderr, where that stays
    alike: bool = False  # all ranks of this host ended so, and it has been said


@dataclass(frozen=True)
class AttemptEnd:
    """What all hosts of a job are told about the end of an attempt."""

    text: str
    status: int  # what the launcher exits with, unless the ranks are started again
    node: int | None = None  # the host that is to say it; None: nobody, as it is known already
    restart: bool = False
    signal: int = signal.SIGTERM  # what the ranks are asked to end with
    stopped: bool = False  # by a signal from outside, at which ranks may have more to do than to end


def cause(failures: Sequence[Failure]) -> Failure:
    """The one of `failures` that led to the others; they are in the order in which they were seen.

    Of those that died about together, the one that was killed is the cause: who loses its peer raises an exception,
    and exits. SIGTERM is no such cause, as it is what the others of a job are ended with.
    """
    killed = [failure for failure in failures if failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM]
    return (killed or list(failures))[0]


def end_of(failures: Sequence[Failure], restart: str | None = None, restarts: int = 0) -> AttemptEnd:
    """The outcome of an attempt that ended with `failures`.

    `restart` says which restart of how many follows, None that none is left of `restarts`.
    """
    first = cause(failures)
    after = restart or (f"no restart is left of {restarts}" if restarts else None)
    text = words(first) if after is None else f"{words(first)}; {after}"
    status = 128 - first.exitcode if first.exitcode < 0 else first.exitcode
    return AttemptEnd(text, status, first.node, restart is not None)


def words(failure: Failure) -> str:
    """`failure` in one line."""
    who = "all ranks" if failure.alike else f"rank {failure.rank}"
    who += "" if failure.host is None else f" on host {failure.host}"
    if failure.exitcode < 0:
        number = -failure.exitcode
        why = " (the kernel does that when memory runs out)" if number == signal.SIGKILL else ""
        text = f"{who} was killed by {signal_name(number)}{why}, pid {failure.pid}"
    elif failure.exitcode == SAVED:
        return f"{who} ended with exit code {SAVED}, to go on later"
    elif failure.alike:
        text = f"{who} failed, with exit code {failure.exitcode}"
    else:
        text = f"{who} failed first, with exit code {failure.exitcode} (pid {failure.pid})"
    message = f": {failure.message}" if failure.message else ""
    return f"{text}{message}" + (f"; its output is in {failure.log}" if failure.log else "")


def signal_name(number: int) -> str:
    """The name of the signal `number`, also of one that has none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
