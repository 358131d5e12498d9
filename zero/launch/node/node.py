"""The launcher on one host: it starts the ranks of this host, again where that was asked for, and ends them."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from zero.launch.args.run import RunRequest
from zero.launch.contract import LOST, SHUTDOWN, SILENCE
from zero.launch.launch_messages import LaunchError, say
from zero.launch.node.attempt_end import signal_name
from zero.launch.node.launcher_pipe import LauncherPipe, first_of_tasks, take_stdin
from zero.launch.node.node_plan import THREADS, NodePlan, command, gpu_count, lines, plan
from zero.launch.node.rank import RankProcess, environment
from zero.launch.node.rendezvous_client import Attempt, RendezvousClient, client
from zero.launch.process.group import PASSED, Descendants, ProcessGroup, caught
from zero.launch.process.output import OutputPump, prefixed
from zero.launch.process.process import Command, Process

_POLL = 0.02
_ANSWER = 1.5  # seconds for the first host to answer
_GRACE = 2.0  # seconds for what the ranks leave to end; with theirs less than the launcher of several hosts waits
_LAST_LINES = 2.0  # seconds for what reads our output to take the end of it, where something else ends the job
# The same for a host that was out of touch for a while before it knew.
_PATIENCE_CUT_OFF, _GRACE_CUT_OFF, _LAST_LINES_CUT_OFF = 0.5, 1.5, 0.5


def run(request: RunRequest, groups: Callable[[Sequence[int]], list[str]] = lambda hosts: []) -> int:
    """Do what `zero run` was asked to on this host; the exit status is that of the first rank that failed.

    groups: lines of a dry run about so many ranks on each host.
    """
    # Where the hosts are known, GPUs are only compared with their slots: a dry run need not wait for that.
    node_plan = plan(request, 0 if request.dry_run and request.hosts.world else gpu_count())
    for note in node_plan.notes:
        # What is the same on every host is said once.
        if node_plan.node == 0 or not note.startswith(THREADS):
            say(note)
    if request.dry_run:
        print("\n".join([*groups(node_plan.world.counts), *lines(request, node_plan)]))
        return 0
    return Node(request, node_plan, client(request, node_plan)).run()


class Node:
    """The launcher on one host, and what it has to look after.

    outputs: where the lines of the ranks go; None where they write to our own stdout and stderr.
    signals: those that have come and were not acted on yet.
    descendants: the ranks, and all that they start.
    stopped_by: the signal that ended it; None so far.
    """

    def __init__(self, request: RunRequest, plan: NodePlan, rendezvous: RendezvousClient) -> None:
        self.rendezvous = rendezvous
        self.outputs = OutputPump() if request.log_dir or rendezvous.host else None
        self.signals: list[int] = []
        self.descendants = Descendants(adopt=True)
        self.stopped_by: int | None = None
        self.shutdown_timeout = request.elastic.shutdown_timeout
        self._request = request
        self._plan = plan
        # srun and mpirun hand the launcher's stdin on to one of their processes.
        by_ssh = request.hosts.launcher == "ssh"
        self._started_by_launcher = request.hosts.stdin and (by_ssh or first_of_tasks(os.environ))
        self._hears_always = plan.node == 0 or not by_ssh
        rendezvous.signals = self.signals

    def run(self) -> int:
        """Run the ranks until those of all hosts have succeeded, or have failed for the last time; the exit status."""
        with caught(self.signals, *PASSED), tempfile.TemporaryDirectory() as scratch:
            try:
                return self._attempts(scratch)
            except BaseException as error:
                self.rendezvous.stop(f"the launcher on host {self.rendezvous.host} failed: {error!r}", 1)
                raise
            finally:
                if self.outputs is not None:
                    seconds = _LAST_LINES_CUT_OFF if self.cut_off else _LAST_LINES
                    self.outputs.finish(lambda: self.cut_off or self.signals or self.stopped_by is not None, seconds)
                self.rendezvous.close()

    def _attempts(self, scratch: str) -> int:
        rendezvous = self.rendezvous
        rendezvous.open()
        # Take stdin from the ranks of several hosts, and hear there the launcher that has started this one.
        if self._started_by_launcher:
            LauncherPipe(self.signals, rendezvous.relay, SILENCE if self._hears_always else None)
        elif rendezvous.host is not None:
            os.close(take_stdin())
        if not self._wait(lambda: rendezvous.run_id):
            return self._ended()
        shared = {**self._plan.shared, **rendezvous.environment()}
        folder = self._log_folder(scratch)
        number = rendezvous.first - 1
        while True:
            number += 1
            rendezvous.ready(number)
            if (attempt := self._wait(rendezvous.attempt)) is None:
                return self._ended()
            ranks = self._ranks(attempt, shared, folder / f"attempt_{number}")
            RankGroup(ranks, self).run()
            if rendezvous.over and self.stopped_by is None:
                alone = attempt.world.size == 1 or self._request.no_python
                if attempt.node == 0 and not (alone or any(rank.initialized for rank in ranks)):
                    who = f"{attempt.world.size} ranks ran, and none called zero.initialize()"
                    self._say(f"warning: {who}: nothing was shared out by zero")
                return 0
            self.descendants.end(_GRACE_CUT_OFF if self.cut_off else _GRACE)
            outcome = rendezvous.outcome
            if self.stopped_by is not None or outcome is None or not outcome.restart:
                return self._ended()
            self._say_outcome()

    def _wait(self, ready: Callable[[], object]) -> object:
        """What `ready` returns once that is something; None where a signal or the end of the job comes first."""
        while self.rendezvous.end is None:
            if any(each not in PASSED for each in self.signals):  # those are for ranks, which there are not yet
                break
            if value := ready():
                return value
            time.sleep(_POLL)
        return None

    def _log_folder(self, scratch: str) -> Path:
        """A new folder for this run's logs, or for error files only, which end with the run."""
        if self._request.log_dir is None:
            return Path(scratch)
        # Hosts may share the folder, and number their ranks alike.
        folder = Path(self._request.log_dir, self.rendezvous.host or "")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            return Path(tempfile.mkdtemp(prefix=f"{self.rendezvous.run_id}_", dir=folder))
        except OSError as error:
            raise LaunchError(f"--log_dir: cannot make a folder in {folder}: {error.strerror}") from error

    def _ranks(self, attempt: Attempt, shared: dict[str, str], folder: Path) -> list[RankProcess]:
        run_id, most = self.rendezvous.run_id, self.rendezvous.max_restarts
        ranks = []
        for local, rank in enumerate(attempt.world.ranks(attempt.node)):
            own = folder / str(local)
            variables = {**shared, **environment(attempt, local, run_id, most, own)}
            captured = self.outputs is not None
            words = command(self._request, self._plan, local, ends=self.rendezvous.host is not None)
            ranks.append(RankProcess(rank, Command(words, None, variables), own, captured, bool(self._request.log_dir)))
        return ranks

    def stop(self, number: int) -> None:
        """A signal ends this host: tell the others."""
        self.stopped_by = number
        if self._lost_launcher:
            self.rendezvous.leave("it lost the connection to the launcher", LOST)
        else:
            self.rendezvous.stop(self._why(), 128 + number, number if number == signal.SIGINT else signal.SIGTERM)

    def _ended(self) -> int:
        """Say what ended the job, where that falls to this host; the exit status."""
        rendezvous = self.rendezvous
        ours = [each for each in self.signals if each not in PASSED]
        if ours and self.stopped_by is None and rendezvous.end is None:
            self.stop(ours[0])
        if self.stopped_by is None:
            self._say_outcome()
            return rendezvous.outcome.status
        if not self._lost_launcher:  # else there is nobody to tell
            end = time.monotonic() + _ANSWER
            while rendezvous.end is None and time.monotonic() < end:
                time.sleep(_POLL)
            if rendezvous.end is None or rendezvous.end.node == rendezvous.node:
                self._say(self._why())
        return 128 + self.stopped_by

    def _say_outcome(self) -> None:
        outcome = self.rendezvous.outcome
        # The launcher of all hosts has lost the first one, too, and says so.
        known = self._started_by_launcher and self._plan.node != 0 and outcome.status == LOST
        if outcome.node == self.rendezvous.node and not known:
            self._say(outcome.text)

    def _say(self, text: str) -> None:
        """One line of our own, after those of the ranks."""
        if self.outputs is None:
            say(text)
        else:
            self.outputs.put(True, f"zero run: {text}\n".encode(errors="surrogateescape"))

    @property
    def _lost_launcher(self) -> bool:
        """Whether it is the end of its launcher that ends this host."""
        return self._started_by_launcher and self.stopped_by == signal.SIGHUP

    @property
    def cut_off(self) -> bool:
        """Whether the other hosts go on or end without this one, which was out of touch for a while already."""
        outcome = self.rendezvous.outcome
        return self.stopped_by == signal.SIGHUP or (outcome is not None and outcome.status == LOST)

    def _why(self) -> str:
        host = self.rendezvous.host
        return f"stopped by {signal_name(self.stopped_by or 0)}" + (f" on host {host}" if host else "")


class RankGroup(ProcessGroup):
    """The ranks of this host in one attempt, which ends as the rendezvous decides for all hosts."""

    def __init__(self, ranks: Sequence[RankProcess], node: Node) -> None:
        super().__init__(ranks, node.outputs, node.signals, node.descendants)
        self._node = node
        self._rendezvous = node.rendezvous
        self._ending = False
        self._failed = False
        self._left = len(ranks)
        host = f"{node.rendezvous.host} " if node.rendezvous.host else ""
        self._prefixes = {rank: f"[{host}{rank.name}]: ".encode() for rank in ranks}

    @property
    def patience(self) -> float:
        """Seconds between asking the ranks to end and ending them, which the group does in a second more."""
        if self._node.cut_off or self.stopped_by == signal.SIGHUP:
            return _PATIENCE_CUT_OFF
        end = self._rendezvous.outcome
        stopped = self.stopped_by is not None or (end is not None and end.stopped)
        return (self._node.shutdown_timeout if stopped else SHUTDOWN) - 1

    def received(self, process: Process, is_stderr: bool, lines: bytes) -> None:
        """Hand it on, line by line. A progress bar's line ends here: another rank's may be the next on the screen."""
        plain = lines.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        self.outputs.put(is_stderr, prefixed(self._prefixes[process], plain))

    def ended(self, process: Process) -> None:
        """Tell of a rank that failed, or that all have succeeded."""
        self._left -= 1
        if process.status and not self._ending:
            self._failed = True
            self._rendezvous.failed([process.failure(self._rendezvous.node, self._rendezvous.host)])
        elif not self._left and not self._failed:
            self._rendezvous.done()

    def tick(self) -> None:
        """A signal, or what the rendezvous has decided, ends the ranks."""
        if self._ending:
            return
        if self.stopped_by is not None:  # the group has begun to end
            self._ending = True
            self._node.stop(self.stopped_by)
        elif self._rendezvous.outcome is not None:
            self._ending = True
            self.end(self._rendezvous.outcome.signal)

    def finished(self) -> bool:
        """Whether it is decided how the attempt ends."""
        return self._ending or self._rendezvous.over
