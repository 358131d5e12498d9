"""Running the ranks under torch's elastic agent. torch is imported only once something is to start."""

import contextlib
import gc
import json
import logging
import os
import signal
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from zero.launch import processes
from zero.launch.args.run import Request
from zero.launch.contract import LOST
from zero.launch.node import signals
from zero.launch.node.output import Output
from zero.launch.node.places import Attempt, Ended, OneMachine, SeveralMachines
from zero.launch.node.plan import THREADS, Plan, command, lines, plan
from zero.launch.node.tie import Tie, take_stdin
from zero.launch.node.verdict import Failure, Verdict, signal_name
from zero.launch.say import say

_POLL = 0.05  # seconds between two looks at the ranks; two that die within it cannot be told apart
_GRACE = 4  # seconds between asking the ranks to end and killing them
_GRACE_REST = 2  # the same for what the ranks leave; with theirs less than the launcher of several hosts waits
_GRACE_ALONE = 1.5  # both for a host that was cut off for a while before it knew
_LAST_LINES = 2.0  # seconds for what reads our output to take the end of it
_LAST_LINES_ALONE = 0.5
# The agent must not share its store with the ranks: with gloo a restart then reads stale addresses.
_ALWAYS = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
_HEEDED = "TORCHELASTIC_SIGNALS_TO_HANDLE"  # read by torch, which puts its own handlers there before ours

Place = OneMachine | SeveralMachines


def run(request: Request) -> int:
    """Do what `zero run` was asked to; the exit status is that of the first rank that failed."""
    request.check()
    made = plan(request, gpus())
    for note in made.notes:
        # What is the same on every host is said once.
        if made.node == 0 or not note.startswith(THREADS):
            say(note)
    if request.dry_run:
        print("\n".join(lines(request, made)))
        return 0
    kind = SeveralMachines if len(made.world.hosts) > 1 else OneMachine
    return start(request, made, kind(request, made))


def gpus() -> int:
    """The number of GPUs that this machine lets us see. All of torch that the launcher needs is imported here."""
    # Nothing of it is garbage: to look for some costs a quarter of the import, and again when the process ends.
    gc.disable()
    try:
        import torch
        import torch.distributed.elastic.agent.server.local_elastic_agent
    finally:
        gc.freeze()
        gc.enable()
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def start(request: Request, made: Plan, place: Place) -> int:
    """Start the ranks of this machine, watch over them and end all that they leave; the exit status."""
    from torch.distributed.elastic.multiprocessing.api import SignalException

    _quiet()
    heeded = signals.heeded(request.hosts.tied is not None)
    always = {**_ALWAYS, _HEEDED: ",".join(heeded), **made.shared}
    with _environment(always), signals.restored(), tempfile.TemporaryDirectory() as scratch:
        node = _Node(request, made, place, scratch, heeded)
        status = 1  # whatever ends this other than below is an error of the launcher itself
        try:
            node.begin()
            with _environment(place.join()):
                status = node.run()
        except Ended as error:
            node.say(error.verdict)
            status = error.verdict.status
        except SignalException:
            status = node.stopped()
        except BaseException as error:
            place.stop(f"the launcher on host {place.host} failed: {error!r}", 1, False, True)
            raise
        finally:
            if status:
                signals.ignore()
                node.clear()
            place.close()
    return status


class _Node:
    """The launcher on one machine, and what it has to look after.

    Attributes:
        stopped_by: the signal that this process got; None so far.
    """

    def __init__(self, request: Request, made: Plan, place: Place, scratch: str, heeded: Sequence[str]) -> None:
        self.request = request
        self.made = made
        self.place = place
        self.scratch = scratch
        self.stopped_by: int | None = None
        self.output = Output(scratch, self._prefix) if request.log_dir or place.host else None
        self._heeded = heeded
        self._tie: Tie | None = None
        self._others: frozenset[int] = frozenset()

    def begin(self) -> None:
        """Take charge of signals, of stdin and of what the ranks leave."""
        self._others = processes.begin()
        self.handle_signals()
        if self.request.hosts.tied is not None:
            self._tie = Tie(self.request.hosts.tied)
            self._tie.start()
        elif self.place.host is not None:
            os.close(take_stdin())

    def run(self) -> int:
        """Until the ranks of all machines have succeeded, or have failed for the last time; the exit status."""
        result = _agent(self).run()
        if not result.is_failed():
            return 0
        found = self.place.verdict()
        if found is None:
            raise RuntimeError("torch's agent ended without a reason")
        self.clear()
        self.say(found)
        return found.status

    def handle_signals(self) -> None:
        """Have a signal raise torch's exception, and those after it do nothing."""
        from torch.distributed.elastic.multiprocessing.api import SignalException

        def stop(number: int, frame: object) -> None:
            signals.ignore()
            self.stopped_by = number
            raise SignalException(f"got signal {number}", signal.Signals(number))

        signals.handle(stop, self._heeded)

    def stopped(self) -> int:
        """Say what signal ended this, if nobody else has; the exit status."""
        self.tell()
        status = 128 + (self.stopped_by or 0)
        if self._asked:  # by the launcher, which knows
            return status
        found = self.place.last_word()
        if found is None or found.node == self.place.node:
            say(self._why())
        return status

    def tell(self) -> None:
        """Tell the other machines of the signal that this process got, if it did."""
        if self.stopped_by is not None:
            leave = self._asked and self.stopped_by == signal.SIGHUP
            self.place.stop(self._why(), 128 + self.stopped_by, leave, self._asked)

    def failure(self, local: int, rank: int, code: int, pid: int, error_file: str) -> Failure:
        """What is known of a rank that ended with `code`."""
        message, log = _message(error_file), None
        if self.output is not None:
            message = message or self.output.last_line(local)
            log = self.output.logs.get(local)
        return Failure(rank, code, pid, self.place.node, self.place.host, message, log)

    def say(self, found: Verdict) -> None:
        """Say `found` if it falls to this machine."""
        known = found.quiet and self._tie is not None
        if found.node == self.place.node and not known:
            say(found.text)

    def clear(self) -> None:
        """End all that the ranks have left: data loaders and the like, which may hold memory, files or the port."""
        processes.end(self._others, _GRACE_ALONE if self.cut_off else _GRACE_REST)

    @property
    def cut_off(self) -> bool:
        """Whether the other machines go on or end without this one, which was out of touch for a while already."""
        found = self.place.verdict()
        return self.stopped_by == signal.SIGHUP or (found is not None and found.status == LOST)

    @property
    def _asked(self) -> bool:
        return self._tie is not None and self._tie.pulled is not None

    def _why(self) -> str:
        if self._asked and self.stopped_by == signal.SIGHUP:
            return "it lost the connection to the launcher"
        name = signal_name(self.stopped_by or 0)
        return f"stopped by {name}" + (f" on host {self.place.host}" if self.place.host else "")

    def _prefix(self, rank: int) -> str:
        return f"[{self.place.host} rank {rank}]: " if self.place.host else f"[rank {rank}]: "


def _agent(node: _Node) -> Any:
    from torch.distributed.elastic.agent.server import WorkerSpec

    request, made = node.request, node.made
    rendezvous = _Rendezvous(node)
    program, *args = command(request, made, ends=node.place.host is not None)
    spec = WorkerSpec(
        role="rank",
        local_world_size=made.ranks,
        rdzv_handler=rendezvous,
        entrypoint=program,
        # "$$" because the agent fills in ${local_rank} as a template does, and would eat a user's dollar.
        args=tuple(arg.replace("$", "$$") for arg in args),
        max_restarts=node.place.restarts,
        monitor_interval=_POLL,
    )
    return _agent_class()(spec, _logs(node), node, rendezvous)


def _logs(node: _Node) -> Any:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

    class Logs(DefaultLogsSpecs):
        """Torch's, which makes the folders; the output goes through our pipes."""

        def reify(self, envs: Any) -> Any:
            found = super().reify(envs)
            if node.output is not None:
                folders = {local: str(Path(file).parent) for local, file in found.error_files.items()}
                ranks = {local: int(variables["RANK"]) for local, variables in envs.items()}
                pipes = node.output.open(ranks, folders if node.request.log_dir else {})
                found.stdouts = {local: pipe for local, (pipe, _) in pipes.items()}
                found.stderrs = {local: pipe for local, (_, pipe) in pipes.items()}
            return found

    # Without --log_dir a folder that ends with the run, for error files; the agent would leave one of its own behind.
    folder = node.request.log_dir or node.scratch
    # Hosts may share the folder, and number their ranks alike.
    return Logs(log_dir=os.path.join(folder, node.place.host) if node.place.host else folder)


def _agent_class() -> Any:
    from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerState
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

    class Agent(LocalElasticAgent):
        """Torch's, with ranks and an end that are decided for all machines alike.

        It looks at the ranks itself: torch's own look, when it finds one that failed, waits for the others half a
        minute before it says so.
        """

        def __init__(self, spec: Any, logs: Any, node: _Node, rendezvous: _Rendezvous) -> None:
            super().__init__(spec, logs)
            self._node = node
            self._rendezvous_of_node = rendezvous
            self._failed: set[int] = set()

        def _assign_worker_ranks(self, store: Any, group_rank: int, group_world_size: int, spec: Any) -> list[Any]:
            ranks, size = self._rendezvous_of_node.ranks()
            # Local and global rank, the one among those of its kind, and the numbers of both: there is one kind.
            return [Worker(local, rank, rank, size, size) for local, rank in enumerate(ranks)]

        def _start_workers(self, worker_group: Any) -> Any:
            self._failed = set()
            found = super()._start_workers(worker_group)
            self._node.handle_signals()  # torch has put its own there
            return found

        def _monitor_workers(self, worker_group: Any) -> Any:
            place = self._node.place
            codes = {local: one.proc.poll() for local, one in self._pcontext.subprocess_handlers.items()}
            if fresh := [local for local, code in codes.items() if code and local not in self._failed]:
                self._failed.update(fresh)
                workers, context = worker_group.workers, self._pcontext
                found = [(local, workers[local].global_rank, codes[local], context.pids()[local]) for local in fresh]
                place.failed([self._node.failure(*one, context.error_files[one[0]]) for one in found])
            elif not any(code is None or code for code in codes.values()):
                place.done()
            if (found := place.verdict()) is not None:
                if not found.restart:
                    self._remaining_restarts = 0
                return RunResult(WorkerState.FAILED)
            if place.over:
                return super()._monitor_workers(worker_group)
            return RunResult(WorkerState.HEALTHY)

        def _exit_barrier(self) -> None:
            """All machines are done when this one is."""

        def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, *args: Any, **kwargs: Any) -> None:
            node = self._node
            node.tell()
            if self._pcontext is not None:
                self._pcontext.close(death_sig, _GRACE_ALONE if node.cut_off else _GRACE)
            super()._shutdown(death_sig, *args, **kwargs)
            if node.output is not None:
                node.output.finish(_LAST_LINES_ALONE if node.cut_off else _LAST_LINES)

    return Agent


class _Rendezvous:
    """What torch's agent asks for the place of its machine among the others."""

    use_agent_store = False

    def __init__(self, node: _Node) -> None:
        self._node = node
        self._attempt: Attempt | None = None

    def next_rendezvous(self) -> Any:
        """The place of this machine. The agent comes here for every attempt, when the ranks of the last have ended."""
        from torch.distributed import HashStore
        from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo

        place = self._node.place
        if self._attempt is not None:
            self._node.clear()
            if (found := place.verdict()) is not None:
                self._node.say(found)
        self._attempt = attempt = place.begin()
        where = RendezvousStoreInfo(attempt.master_addr, attempt.master_port)
        return RendezvousInfo(HashStore(), attempt.node, len(attempt.world.hosts), where)

    def ranks(self) -> tuple[range, int]:
        """The ranks of this machine, and the number of all."""
        if self._attempt is None:
            raise RuntimeError("no attempt has begun")
        return self._attempt.world.ranks(self._attempt.node), self._attempt.world.size

    def get_backend(self) -> str:
        """What kind of rendezvous this is."""
        return "zero"

    def get_run_id(self) -> str:
        """The name of the run."""
        return self._node.place.run_id

    def is_closed(self) -> bool:
        """Never: whoever leaves says so to the others."""
        return False

    def set_closed(self) -> None:
        """Nothing to do."""

    def num_nodes_waiting(self) -> int:
        """No machine joins later."""
        return 0

    def shutdown(self) -> bool:
        """Nothing to give back."""
        return True


def _message(file: str) -> str | None:
    """What a rank that failed has written by torchelastic's `record`, in one line; None where it wrote nothing."""
    try:
        found = json.loads(Path(file).read_text())["message"]
        text = found["message"] if isinstance(found, dict) else found
    except (OSError, ValueError, KeyError, TypeError):
        return None
    words = str(text).strip().splitlines()
    return words[-1] if words else None


def _quiet() -> None:
    """Keep the agent's chatter off the screen, unless LOGLEVEL asks for it; one line of ours says enough."""
    if "LOGLEVEL" in os.environ:
        return
    for name in ("torch.distributed.elastic", "torch.distributed.launcher"):
        log = logging.getLogger(name)
        log.propagate = False
        log.handlers = [logging.NullHandler()]


@contextlib.contextmanager
def _environment(extra: Mapping[str, str]) -> Iterator[None]:
    """Add to the environment, which is how the agent hands it to the ranks, and take it back."""
    before = {key: os.environ.get(key) for key in extra}
    os.environ.update(extra)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value
