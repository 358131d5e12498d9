"""Where a launcher stands: alone, or among those of a job's other hosts. Both are asked the same by the agent."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import NamedTuple

from zero.launch import secret
from zero.launch.args.run import Request
from zero.launch.hosts.world import World
from zero.launch.node import verdict
from zero.launch.node.interface import IFNAME, interface, loopback
from zero.launch.node.meeting import PATIENCE, Meeting, Terms, run_id
from zero.launch.node.member import Member
from zero.launch.node.plan import Plan, free_port, restart_port
from zero.launch.node.verdict import Failure, Verdict
from zero.launch.say import say

_POLL = 0.02
_ANSWER = 1.5  # seconds for the first host to answer
_SETTLE = 0.2  # seconds between the first failure that is seen and the verdict; its cause may come later


class Attempt(NamedTuple):
    """What the ranks of this machine need to know to start."""

    world: World
    node: int
    master_addr: str
    master_port: int


class Ended(Exception):
    """No attempt follows; `verdict` says why."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict)
        self.verdict = verdict

    def __str__(self) -> str:
        return self.verdict.text


class OneMachine:
    """The only launcher of a job. It meets nobody, and hands the ranks an address of their own.

    Rank 0 hosts the store, not the agent, so that a restart never reads addresses of processes that died.

    Attributes:
        restarts: how often the ranks can be started again.
        over: whether all ranks have succeeded.
        run_id: the name of the run.
    """

    def __init__(self, request: Request, made: Plan) -> None:
        self.restarts = request.max_restarts
        self.over = False
        self.run_id = run_id()
        self._request = request
        self._made = made
        self._attempts = 0
        self._failures: list[Failure] = []
        self._since = 0.0
        self._verdict: Verdict | None = None

    @property
    def host(self) -> None:
        """The name of this machine in messages: none is needed."""
        return

    @property
    def node(self) -> int:
        """The number of this machine among the job's."""
        return self._made.node

    def join(self) -> dict[str, str]:
        """Nobody is to be waited for. Variables for the ranks: gloo is to listen for none but this machine."""
        name = None if IFNAME in os.environ else loopback()
        return {secret.VARIABLE: secret.new()} | ({} if name is None else {IFNAME: name})

    def begin(self) -> Attempt:
        """The next attempt; all processes of the one before have ended. Raises LaunchError where the port is taken."""
        port = self._made.master_port
        if self._attempts:
            port = restart_port(self._request.master_port)
        self._attempts += 1
        self._failures, self._verdict = [], None
        return Attempt(self._made.world, self._made.node, self._made.master_addr, port)

    def failed(self, failures: Sequence[Failure]) -> None:
        """Take note of ranks that failed."""
        if not self._failures:
            self._since = time.monotonic()
        self._failures += failures

    def done(self) -> None:
        """Take note that all ranks of this machine succeeded."""
        self.over = True

    def verdict(self) -> Verdict | None:
        """What ended the attempt; None while it goes on."""
        if self._verdict is None and self._failures and time.monotonic() - self._since > _SETTLE:
            left = self._attempts <= self.restarts
            again = f"restart {self._attempts} of {self.restarts}" if left else None
            self._verdict = verdict.of(self._failures, again, self.restarts)
        return self._verdict

    def stop(self, text: str, status: int, leave: bool, quiet: bool) -> None:
        """Nobody is to be told."""

    def last_word(self) -> Verdict | None:
        """What others say that ended the job: there are none."""
        return None

    def close(self) -> None:
        """Nothing is open."""


class SeveralMachines:
    """One of several launchers, which do what the first host's decides.

    Attributes:
        restarts: how often the ranks can be started again, after a failure or without a host that was lost.
    """

    def __init__(self, request: Request, made: Plan) -> None:
        self._secret = secret.of_node(bool(request.hosts.tied), os.environ)
        if made.node == 0 and not self._secret:
            say(
                f"the hosts have no secret in common: who reaches port {made.master_port} of this one can end the job; "
                f"--launcher ssh gives them one, or set {secret.VARIABLE} on all of them"
            )
        terms = Terms(made.world, request.max_restarts, request.min_nodes, self._secret)
        self.restarts = terms.restarts + terms.losses
        self._made = made
        where = (made.master_addr, made.master_port)
        self._meeting = Meeting(terms, where, free_port, say, PATIENCE) if made.node == 0 else None
        # The first host need not know itself by the name that the others know it by.
        self._member = Member(terms, made.node, self._meeting.here if self._meeting else where, say)
        self._attempt = -1
        self._done = False
        self._told = False

    @property
    def host(self) -> str:
        """The name of this machine in messages."""
        return self._made.world.hosts[self._made.node].name

    @property
    def node(self) -> int:
        """The number of this machine among the job's."""
        return self._made.node

    @property
    def over(self) -> bool:
        """Whether all ranks of all hosts have succeeded."""
        return self._member.over

    @property
    def run_id(self) -> str:
        """The name of the run, the same on all hosts."""
        return self._member.run_id

    def join(self) -> dict[str, str]:
        """Wait for all hosts. Variables for the ranks; raises Ended where not all come."""
        if self._meeting is not None:
            self._meeting.start()
        self._member.start(PATIENCE + 1)  # so that it is the meeting that says who has not come
        while not self._member.met:
            self._check()
        found = {secret.VARIABLE: self._secret}
        if IFNAME in os.environ:
            return found
        name = interface(self._member.address)
        if name is None:
            # gloo takes the address that this machine's own name stands for, which can be one that others do not reach.
            say(f"{IFNAME} is not set on host {self.host}: the way to the other hosts has no interface of its own")
        return found if name is None else found | {IFNAME: name}

    def begin(self) -> Attempt:
        """The next attempt, once all hosts are ready for it. Raises Ended where none follows."""
        self._attempt += 1
        self._done = False
        self._member.ready(self._attempt)
        while (start := self._member.started) is None or start.attempt != self._attempt:
            self._check()
        hosts = self._made.world.hosts
        # The hosts that are lost have no ranks any more; the ranks of the others move up.
        world = World(tuple(hosts[node] for node in start.nodes))
        # By number on the first host, where the store is to listen for those alone who come by that way.
        address = self._meeting.address if self._meeting is not None else None
        return Attempt(world, start.nodes.index(self.node), address or self._made.master_addr, start.port)

    def failed(self, failures: Sequence[Failure]) -> None:
        """Tell the others of ranks that failed."""
        self._member.failed(self._attempt, failures)

    def done(self) -> None:
        """Tell the others, once, that all ranks of this machine succeeded."""
        if not self._done:
            self._done = True
            self._member.done(self._attempt)

    def verdict(self) -> Verdict | None:
        """What ended the attempt; None while it goes on."""
        return self._member.verdicts.get(self._attempt) or self._member.end

    def stop(self, text: str, status: int, leave: bool, quiet: bool) -> None:
        """Tell the others, once, that this host ends: all do, or, with `leave`, this one alone where that may be."""
        if not self._told:
            self._told = True
            if leave:
                self._member.leave(text, status)
            else:
                self._member.stop(text, status, quiet)

    def last_word(self) -> Verdict | None:
        """What ended the whole job, as all were told; None where nobody says."""
        end = time.monotonic() + _ANSWER
        while self._member.end is None and time.monotonic() < end:
            time.sleep(_POLL)
        return self._member.end

    def close(self) -> None:
        """Leave the others; on the first host, once they have heard the last word."""
        self._member.close()
        if self._meeting is not None:
            self._meeting.close()

    def _check(self) -> None:
        if (end := self._member.end) is not None:
            raise Ended(end)
        time.sleep(_POLL)
