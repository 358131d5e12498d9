"""A job on this machine alone: asked by the node what a `RendezvousClient` is asked, and decided here."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from zero.launch import secret
from zero.launch.args.run import Request
from zero.launch.hosts.addresses import INTERFACE, free_port, loopback
from zero.launch.messages import LaunchError
from zero.launch.node import outcome
from zero.launch.node.client import Attempt
from zero.launch.node.outcome import Failure, Outcome
from zero.launch.node.plan import Plan, check_port
from zero.launch.node.rendezvous import run_id

_SETTLE = 0.2  # seconds between the first failure that is seen and the outcome; its cause may come later
_PATIENCE = 30  # seconds for the kernel to take a port from ranks that were killed


class OneHost:
    """The ranks meet at an address of this machine, at a store that rank 0 has, anew in each attempt.

    Attributes:
        host: the name of this machine in messages: none is needed.
        node: the number of this machine in the job.
        joined: nobody is to be waited for.
        over: whether all ranks have succeeded.
        end: what ended the job; no attempt follows.
        run_id: the name of the run.
        max_restarts: how often the ranks can be started again.
    """

    host = None
    joined = True

    def __init__(self, request: Request, plan: Plan) -> None:
        self.node = plan.node
        self.over = False
        self.end: Outcome | None = None
        self.run_id = run_id()
        self.max_restarts = request.max_restarts
        self._plan = plan
        self._asked_port = request.master_port
        self._restarts = 0
        self._failures: list[Failure] = []
        self._since = 0.0

    def open(self) -> None:
        """Nobody is to be looked for."""

    def environment(self) -> dict[str, str]:
        """Variables for the ranks: gloo is to listen for none but this machine."""
        name = None if INTERFACE in os.environ else loopback()
        return {secret.VARIABLE: secret.new()} | ({} if name is None else {INTERFACE: name})

    def ready(self, attempt: int) -> None:
        """All processes of the attempt before this one are gone."""
        self._restarts = attempt
        self._failures = []
        self._since = time.monotonic()

    def attempt(self) -> Attempt | None:
        """The attempt that follows; None while the port that was asked for is not free again, LaunchError at last."""
        port = self._plan.master_port
        if self._restarts and self._asked_port is None:
            port = free_port()
        elif self._restarts:
            try:
                check_port(port)
            except LaunchError:
                if time.monotonic() > self._since + _PATIENCE:
                    raise
                return None
        return Attempt(self._restarts, self._plan.world, self.node, self._plan.master_addr, port)

    def failed(self, failures: Sequence[Failure]) -> None:
        """Take note of ranks that failed."""
        if not self._failures:
            self._since = time.monotonic()
        self._failures += failures

    def done(self) -> None:
        """Take note that all ranks succeeded."""
        self.over = True

    @property
    def outcome(self) -> Outcome | None:
        """What ended the attempt; None while it goes on."""
        if self.end is not None or not self._failures or time.monotonic() < self._since + _SETTLE:
            return self.end
        left = self._restarts < self.max_restarts
        again = f"restart {self._restarts + 1} of {self.max_restarts}" if left else None
        return outcome.of(self._failures, again, self.max_restarts)

    def stop(self, text: str, status: int, quiet: bool = False) -> None:
        """Take note of what ends the job."""
        self.end = Outcome(text, status, self.node, quiet=quiet)

    def leave(self, text: str, status: int) -> None:
        """As `stop`: there are no others."""
        self.stop(text, status)

    def close(self) -> None:
        """Nothing is open."""
