"""The launcher on one host: it starts the ranks of this host, again where that was asked for, and ends them."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from zero.launch.args.run import Request
from zero.launch.contract import LOST
from zero.launch.errors import LaunchError
from zero.launch.node.client import Attempt, client
from zero.launch.node.heartbeat import HeartbeatReader, take_stdin
from zero.launch.node.one_host import OneHost
from zero.launch.node.outcome import signal_name
from zero.launch.node.plan import THREADS, Plan, command, gpu_count, lines, plan
from zero.launch.node.ranks import Rank, RankGroup, Rendezvous, environment
from zero.launch.process.descendants import Descendants
from zero.launch.process.group import caught
from zero.launch.process.output import OutputPump
from zero.launch.process.process import Command
from zero.launch.say import say

_POLL = 0.02
_ANSWER = 1.5  # seconds for the first host to answer
_GRACE = 2.0  # seconds for what the ranks leave to end; with theirs less than the launcher of several hosts waits
_GRACE_CUT_OFF = 1.5  # the same for a host that was out of touch for a while before it knew
_LAST_LINES = 2.0  # seconds for what reads our output to take the end of it, where something else ends the job
_LAST_LINES_CUT_OFF = 0.5


def run(request: Request) -> int:
    """Do what `zero run` was asked to on this host; the exit status is that of the first rank that failed."""
    request.check()
    made = plan(request, gpu_count())
    for note in made.notes:
        # What is the same on every host is said once.
        if made.node == 0 or not note.startswith(THREADS):
            say(note)
    if request.dry_run:
        print("\n".join(lines(request, made)))
        return 0
    rendezvous = client(request, made) if len(made.world.hosts) > 1 else OneHost(request, made)
    return Node(request, made, rendezvous).run()


class Node:
    """The launcher on one host, and what it has to look after.

    Attributes:
        stopped_by: the signal that ended it; None so far.
    """

    def __init__(self, request: Request, plan: Plan, rendezvous: Rendezvous) -> None:
        self.stopped_by: int | None = None
        self._request = request
        self._plan = plan
        self._rendezvous = rendezvous
        self._outputs = OutputPump() if request.log_dir or rendezvous.host else None
        self._signals: list[int] = []
        self._descendants = Descendants(adopt=True)
        self._heartbeat: HeartbeatReader | None = None

    def run(self) -> int:
        """Run the ranks until those of all hosts have succeeded, or have failed for the last time; the exit status."""
        with caught(self._signals), tempfile.TemporaryDirectory() as scratch:
            if self._request.hosts.heartbeat_timeout is not None:
                self._heartbeat = HeartbeatReader(self._request.hosts.heartbeat_timeout, self._signals)
            elif self._rendezvous.host is not None:
                os.close(take_stdin())
            try:
                return self._attempts(scratch)
            except BaseException as error:
                self._rendezvous.stop(f"the launcher on host {self._rendezvous.host} failed: {error!r}", 1, quiet=True)
                raise
            finally:
                if self._outputs is not None:
                    self._outputs.finish(self._hurries, _LAST_LINES_CUT_OFF if self._cut_off else _LAST_LINES)
                self._rendezvous.close()

    def _attempts(self, scratch: str) -> int:
        rendezvous = self._rendezvous
        rendezvous.open()
        if not self._wait(lambda: rendezvous.joined):
            return self._ended()
        shared = {**self._plan.shared, **rendezvous.environment()}
        folder = self._log_folder(scratch)
        number = -1
        while True:
            number += 1
            rendezvous.ready(number)
            if (attempt := self._wait(rendezvous.attempt)) is None:
                return self._ended()
            ranks = self._ranks(attempt, number, shared, folder / f"attempt_{number}")
            group = RankGroup(ranks, rendezvous, self._outputs, self._signals, self._descendants, self._stop)
            group.run()
            if rendezvous.over and self.stopped_by is None:
                return 0
            self._descendants.end(_GRACE_CUT_OFF if self._cut_off else _GRACE)
            outcome = rendezvous.outcome
            if self.stopped_by is not None or outcome is None or not outcome.restart:
                return self._ended()
            self._say_outcome()

    def _wait(self, ready: Callable[[], object]) -> object:
        """What `ready` returns once that is something; None where a signal or the end of the job comes first."""
        while not self._signals and self._rendezvous.end is None:
            if value := ready():
                return value
            time.sleep(_POLL)
        return None

    def _log_folder(self, scratch: str) -> Path:
        """A new folder for this run's logs, or for error files only, which end with the run."""
        if self._request.log_dir is None:
            return Path(scratch)
        # Hosts may share the folder, and number their ranks alike.
        folder = Path(self._request.log_dir, self._rendezvous.host or "")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            return Path(tempfile.mkdtemp(prefix=f"{self._rendezvous.run_id}_", dir=folder))
        except OSError as error:
            raise LaunchError(f"--log_dir: cannot make a folder in {folder}: {error.strerror}") from error

    def _ranks(self, attempt: Attempt, number: int, shared: dict[str, str], folder: Path) -> list[Rank]:
        words = command(self._request, self._plan, ends=self._rendezvous.host is not None)
        run_id, most = self._rendezvous.run_id, self._rendezvous.max_restarts
        ranks = []
        for local, rank in enumerate(attempt.world.ranks(attempt.node)):
            own = folder / str(local)
            variables = {**shared, **environment(attempt, local, run_id, number, most, own)}
            captured = self._outputs is not None
            ranks.append(Rank(rank, Command(words, None, variables), own, captured, bool(self._request.log_dir)))
        return ranks

    def _stop(self, number: int) -> None:
        """A signal ends this host: tell the others."""
        self.stopped_by = number
        if self._asked and number == signal.SIGHUP:
            self._rendezvous.leave(self._why(), 128 + number)
        else:
            self._rendezvous.stop(self._why(), 128 + number, self._asked)

    def _ended(self) -> int:
        """Say what ended the job, where that falls to this host; the exit status."""
        rendezvous = self._rendezvous
        if self._signals and self.stopped_by is None:
            self._stop(self._signals[0])
        if self.stopped_by is None:
            self._say_outcome()
            return rendezvous.outcome.status
        if not self._asked:  # by the launcher, which knows
            end = time.monotonic() + _ANSWER
            while rendezvous.end is None and time.monotonic() < end:
                time.sleep(_POLL)
            if rendezvous.end is None or rendezvous.end.node == rendezvous.node:
                self._say(self._why())
        return 128 + self.stopped_by

    def _say_outcome(self) -> None:
        outcome = self._rendezvous.outcome
        known = outcome.quiet and self._heartbeat is not None
        if outcome.node == self._rendezvous.node and not known:
            self._say(outcome.text)

    def _say(self, text: str) -> None:
        """One line of our own, after those of the ranks."""
        if self._outputs is None:
            say(text)
        else:
            self._outputs.put(True, f"zero run: {text}\n".encode(errors="surrogateescape"))

    @property
    def _asked(self) -> bool:
        """Whether it was the launcher of all hosts that ends this one."""
        return self._heartbeat is not None and self._heartbeat.request is not None

    @property
    def _cut_off(self) -> bool:
        """Whether the other hosts go on or end without this one, which was out of touch for a while already."""
        outcome = self._rendezvous.outcome
        return self.stopped_by == signal.SIGHUP or (outcome is not None and outcome.status == LOST)

    def _hurries(self) -> bool:
        """Whether a slow reader of our output is to be waited for no longer than for moments."""
        return self._cut_off or bool(self._signals) or self.stopped_by is not None

    def _why(self) -> str:
        if self._asked and self.stopped_by == signal.SIGHUP:
            return "it lost the connection to the launcher"
        host = self._rendezvous.host
        return f"stopped by {signal_name(self.stopped_by or 0)}" + (f" on host {host}" if host else "")
