"""Running the ranks under torch's elastic agent. torch is imported only once something is to start."""

import contextlib
import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from zero.launch import processes
from zero.launch.args import Request
from zero.launch.plan import Plan, lines, plan, restart_port

_POLL = 0.05  # seconds between two looks at the ranks; two that die within it cannot be told apart
_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")


def run(request: Request) -> int:
    """Do what `zero run` was asked to; the exit status is that of the first rank that failed."""
    request.check()
    made = plan(request, _gpus())
    for note in made.notes:
        say(note)
    if request.dry_run:
        print("\n".join(lines(request, made)))
        return 0
    with _environment(made.shared), _signals_restored(), tempfile.TemporaryDirectory() as scratch:
        return _run_agent(request, made, scratch)


def say(text: str) -> None:
    """One line of the launcher's own, on stderr."""
    print(f"zero run: {text}", file=sys.stderr, flush=True)


def _gpus() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _run_agent(request: Request, made: Plan, scratch: str) -> int:
    from torch.distributed.elastic.multiprocessing.api import SignalException

    _quiet()
    others = processes.begin()
    status = 1  # whatever ends this other than below is an error of the launcher itself
    try:
        place = OneMachine(request, made, lambda: processes.end(others))
        failures = _agent(request, made, scratch, place).run().failures
        status = 0
        if failures:
            text, status = verdict(failures)
            say(f"{text}; no restart is left of {request.max_restarts}" if request.max_restarts else text)
    except SignalException as error:
        _ignore_signals()  # a second Ctrl-C must not interrupt the clean-up
        status = 128 + error.sigval
        say(f"stopped by {signal.Signals(error.sigval).name}")
    finally:
        if status:
            _ignore_signals()
            processes.end(others)
    return status


def _agent(request: Request, made: Plan, scratch: str, place: "OneMachine") -> Any:
    from torch.distributed.elastic.agent.server import WorkerSpec
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std

    class Agent(LocalElasticAgent):
        """Torch's, which keeps to itself why it restarts."""

        def _monitor_workers(self, worker_group: Any) -> Any:
            result = super()._monitor_workers(worker_group)
            if result.is_failed():
                place.failures = dict(result.failures)
            return result

    logs = DefaultLogsSpecs(
        # A folder that ends with the run, for error files; the agent would leave one of its own behind.
        log_dir=request.log_dir or scratch,
        tee=Std.ALL if request.log_dir else Std.NONE,
    )
    program, *args = request.command()
    spec = WorkerSpec(
        role="rank",
        local_world_size=made.ranks,
        rdzv_handler=place,
        entrypoint=program,
        # "$$" because the agent fills in ${local_rank} as a template does, and would eat a user's dollar.
        args=tuple(arg.replace("$", "$$") for arg in args),
        max_restarts=request.max_restarts,
        monitor_interval=_POLL,
    )
    prefix = "[rank ${rank}]: " if request.log_dir else None
    return Agent(spec, logs, log_line_prefix_template=prefix)


def verdict(failures: Mapping[int, Any]) -> tuple[str, int]:
    """Which rank failed first, in words, and the exit status that follows from it."""
    # In the order seen: those that the agent stopped because of the first come after it, by SIGTERM at once or by
    # SIGKILL half a minute later. Of those that died between two looks, the one that was killed is the cause: who
    # loses its peer raises an exception, and exits.
    first = next(iter(failures.values()))
    alike = [item for item in failures.items() if item[1].timestamp - first.timestamp <= 1]
    killed = [item for item in alike if item[1].exitcode < 0 and item[1].exitcode != -signal.SIGTERM]
    rank, failure = (killed or alike)[0]
    if failure.exitcode < 0:
        number = -failure.exitcode
        why = " (the kernel does that when memory runs out)" if number == signal.SIGKILL else ""
        return f"rank {rank} was killed by {failure.signal_name()}{why}, pid {failure.pid}", 128 + number
    return f"rank {rank} failed first, with exit code {failure.exitcode} (pid {failure.pid})", failure.exitcode


class OneMachine:
    """The rendezvous of a single agent: it meets nobody, and hands the ranks an address of their own.

    Rank 0 hosts the store, not the agent, so that a restart never reads addresses of processes that died. The agent
    comes here for the first attempt and for every restart, when the ranks of the attempt before have ended.

    Attributes:
        failures: what ended the last attempt, by rank.
    """

    use_agent_store = False

    def __init__(self, request: Request, made: Plan, clear: Callable[[], None]) -> None:
        self.failures: Mapping[int, Any] = {}
        self._request = request
        self._made = made
        self._clear = clear
        self._attempts = 0
        self._run_id = time.strftime("%Y%m%d-%H%M%S")

    def next_rendezvous(self) -> Any:
        """The place of this agent among the agents: the only one. Raises LaunchError where the port is taken."""
        from torch.distributed import HashStore
        from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo

        port = self._made.master_port
        if self._attempts:
            say(f"{verdict(self.failures)[0]}; restart {self._attempts} of {self._request.max_restarts}")
            # Data loaders and the like, which may still hold memory, files or the port.
            self._clear()
            port = restart_port(self._request.master_port)
        self._attempts += 1
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo(self._made.master_addr, port))

    def get_backend(self) -> str:
        """What kind of rendezvous this is."""
        return "zero-one-machine"

    def get_run_id(self) -> str:
        """The name of the run."""
        return self._run_id

    def is_closed(self) -> bool:
        """Never: nobody else could close it."""
        return False

    def set_closed(self) -> None:
        """Nothing to do."""

    def num_nodes_waiting(self) -> int:
        """No machine joins later."""
        return 0

    def shutdown(self) -> bool:
        """Nothing to give back."""
        return True


def _quiet() -> None:
    """Keep the agent's chatter off the screen, unless LOGLEVEL asks for it; one line of ours says enough."""
    if "LOGLEVEL" in os.environ:
        return
    for name in ("torch.distributed.elastic", "torch.distributed.launcher"):
        log = logging.getLogger(name)
        log.propagate = False
        log.handlers = [logging.NullHandler()]


def _ignore_signals() -> None:
    for name in _SIGNALS:
        signal.signal(getattr(signal, name), signal.SIG_IGN)


@contextlib.contextmanager
def _signals_restored() -> Iterator[None]:
    """Put the handlers back that the agent replaces."""
    before = {name: signal.getsignal(getattr(signal, name)) for name in _SIGNALS}
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(getattr(signal, name), handler)


@contextlib.contextmanager
def _environment(extra: Mapping[str, str]) -> Iterator[None]:
    """Add to the environment, which is how the agent hands it to the ranks, and take it back."""
    # The agent must not share its store with the ranks: with gloo a restart then reads stale addresses.
    shared = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "TORCHELASTIC_SIGNALS_TO_HANDLE": ",".join(_SIGNALS)}
    extra = {**shared, **extra}
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
