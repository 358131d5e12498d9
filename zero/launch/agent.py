"""Running the ranks under torch's elastic agent. torch is imported only once something is to start."""

import contextlib
import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from typing import Any

from zero.launch import processes
from zero.launch.args import Request
from zero.launch.plan import Plan, lines, plan

_BACKEND = "zero-one-machine"
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
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    _quiet()
    program, *args = request.command()
    others = processes.begin()
    status = 1  # whatever ends this other than below is an error of the launcher itself
    try:
        # "$$" because the agent fills in ${local_rank} as a template does, and would eat a user's dollar.
        elastic_launch(_config(request, made, scratch), program)(*(arg.replace("$", "$$") for arg in args))
        status = 0
    except ChildFailedError as error:
        status = _report(error.failures)
    except SignalException as error:
        _ignore_signals()  # a second Ctrl-C must not interrupt the clean-up
        status = 128 + error.sigval
        say(f"stopped by {signal.Signals(error.sigval).name}")
    finally:
        if status:
            _ignore_signals()
            processes.end(others)
    return status


def _config(request: Request, made: Plan, scratch: str) -> Any:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
    from torch.distributed.launcher.api import LaunchConfig

    rendezvous_handler_registry.register(_BACKEND, _one_machine)
    logs = DefaultLogsSpecs(
        # A folder that ends with the run, for error files; the agent would leave one of its own behind.
        log_dir=request.log_dir or scratch,
        tee=Std.ALL if request.log_dir else Std.NONE,
    )
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=made.ranks,
        run_id=time.strftime("%Y%m%d-%H%M%S"),
        role="rank",
        rdzv_backend=_BACKEND,
        rdzv_endpoint=f"{made.master_addr}:{made.master_port}",
        rdzv_configs={"addr": made.master_addr, "port": made.master_port, "restarts": request.max_restarts},
        max_restarts=request.max_restarts,
        monitor_interval=_POLL,
        logs_specs=logs,
        log_line_prefix_template="[rank ${rank}]: " if request.log_dir else None,
        signals_to_handle=",".join(_SIGNALS),
    )


def _report(failures: Mapping[int, Any]) -> int:
    """Say which rank failed first, and return the exit status that follows from it."""
    # In the order seen: the ranks that the agent stopped because of the first come after it.
    rank, failure = next(iter(failures.items()))
    if failure.exitcode < 0:
        number = -failure.exitcode
        why = "; the kernel does that when memory runs out" if number == signal.SIGKILL else ""
        say(f"rank {rank} was killed by {failure.signal_name()} (pid {failure.pid}){why}")
        return 128 + number
    say(f"rank {rank} failed first, with exit code {failure.exitcode} (pid {failure.pid})")
    return failure.exitcode


class OneMachine:
    """The rendezvous of a single agent: it meets nobody, and hands the ranks an address of their own.

    Rank 0 hosts the store, not the agent, so that a restart never reads addresses of processes that died.
    """

    use_agent_store = False

    def __init__(self, params: Any) -> None:
        self._params = params
        self._attempts = 0

    def next_rendezvous(self) -> Any:
        """The place of this agent among the agents: the only one."""
        from torch.distributed import HashStore
        from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo

        if self._attempts:
            say(f"a rank failed; restart {self._attempts} of {self._params.config['restarts']}")
        self._attempts += 1
        where = RendezvousStoreInfo(self._params.config["addr"], self._params.config["port"])
        return RendezvousInfo(HashStore(), 0, 1, where)

    def get_backend(self) -> str:
        """The name that this is registered under."""
        return _BACKEND

    def get_run_id(self) -> str:
        """The name of the run."""
        return self._params.run_id

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


def _one_machine(params: Any) -> OneMachine:
    return OneMachine(params)


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
    extra = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", **extra}
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
