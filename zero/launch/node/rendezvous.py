"""The rendezvous of a job's hosts: the launcher of the first one decides for all of them, and tells them.

Every host sends what happens to it, and a heartbeat each second. The thread here is the only one that decides: who
takes part, when an attempt starts, what ended it, whether another follows. So all hosts do the same, and restart
equally often. It is not torch's rendezvous: that lives in a TCPStore, which anybody who reaches its port can write to,
and whose calls wait for minutes when a network is cut. A connection ends at once with the process at its other end.

Who connects and does not show that it has the job's secret hears nothing of the job, and is dropped; once all hosts
have come, nobody can connect any more.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from zero.launch.contract import SILENCE
from zero.launch.hosts.addresses import free_port, own_address
from zero.launch.hosts.world import World
from zero.launch.messages import LaunchError, listed
from zero.launch.node import outcome
from zero.launch.node.connection import Connection, readable
from zero.launch.node.outcome import Failure, Outcome

TICK = 0.1
HEARTBEAT = 1.0  # seconds between two heartbeats
SETTLE = 1.0  # seconds between the first failure and the outcome; its cause may come later
REMIND = 30.0  # seconds between two lines about hosts that are waited for
_LINGER = 2.0  # seconds for the hosts to take the last message
_UNKNOWN = 256  # connections of whom nothing is known yet; the oldest goes


@dataclass(frozen=True)
class Terms:
    """What all hosts of a job must be started with alike."""

    world: World
    restarts: int = 0
    min_nodes: int | None = None  # None: no host can be lost
    secret: str = field(default="", repr=False)  # shown by each host, and never sent
    patience: float = 300.0  # seconds for all hosts to come

    @property
    def losses(self) -> int:
        """How many hosts can be lost."""
        hosts = len(self.world.hosts)
        return 0 if self.min_nodes is None else hosts - self.min_nodes

    def word(self) -> str:
        """The terms as one word that two hosts can compare."""
        return f"{self.world.encode()}/{self.restarts}/{self.min_nodes}"


@dataclass
class _Round:
    """What the first host knows of one attempt."""

    number: int = 0
    ready: set[int] = field(default_factory=set)  # the hosts that could start it
    running: bool = False
    done: set[int] = field(default_factory=set)  # the hosts whose ranks have all succeeded
    failures: list[Failure] = field(default_factory=list)
    decide_at: float | None = None  # when the failures so far are taken for all that belong together


class RendezvousServer:
    """The first host's side. Other threads only call `start` and `close`.

    where: the address and the port by which the other hosts know this one.

    Attributes:
        own_address: where to connect to on this machine.
        address: the one of this machine that all other hosts use, once they have come; None where they differ.
    """

    def __init__(self, terms: Terms, where: tuple[str, int], say: Callable[[str], None]) -> None:
        own = own_address(where[0])
        self.own_address = (own or "127.0.0.1", where[1])
        self.address: str | None = None
        self._terms = terms
        self._say = say
        self._server = _listen(own, where[1])
        self._thread = threading.Thread(target=self._run, name="zero-rendezvous", daemon=True)
        self._connections: list[Connection] = []
        self._joined: dict[int, Connection] = {}
        self._left = set(range(len(terms.world.hosts)))  # the hosts that take part, come or not
        self._admitted: set[int] = set()
        self._attempt = _Round()
        self._restarts = 0
        self._final = False  # no attempt follows
        self._closing = threading.Event()

    def start(self) -> None:
        """Begin to listen."""
        self._thread.start()

    def close(self) -> None:
        """End once all have taken what was sent to them, or shortly after."""
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join(_LINGER + 1)
        self._server.close()

    def _run(self) -> None:
        began = time.monotonic()
        remind, beat = began + REMIND, began
        closed_at: float | None = None
        while True:
            now = time.monotonic()
            for connection in self._readable():
                for message in connection.receive():
                    try:
                        self._handle(connection, message)
                    except (KeyError, TypeError):
                        connection.gone = True  # whoever that is, it is no launcher like this one
            self._update(now)
            if now >= beat:
                beat = now + HEARTBEAT
                self._tell("alive")
            missing = [] if self._final else self._missing()
            if missing and now - began > self._terms.patience:
                words = f"{_hosts(missing)} did not come within {self._terms.patience:.0f} s"
                self._end(Outcome(words, 1, 0))
            elif missing and now >= remind:
                remind = now + REMIND
                self._say(f"waiting for {_hosts(missing)} for {now - began:.0f} s")
            if self._closing.is_set():
                closed_at = closed_at or now
                if now - closed_at > _LINGER or not any(not connection.gone for connection in self._joined.values()):
                    break
        for connection in self._connections:
            connection.close()

    def _readable(self) -> list[Connection]:
        ready = readable(self._connections, self._server, TICK)
        if self._server in ready:
            with contextlib.suppress(OSError):
                self._connections.append(Connection(self._server.accept()[0], self._terms.secret, connects=False))
            unknown = [connection for connection in self._connections if not connection.known]
            for connection in unknown[:-_UNKNOWN]:
                connection.gone = True
        return [connection for connection in self._connections if connection.socket in ready]

    def _handle(self, connection: Connection, message: dict[str, Any]) -> None:
        kind = message.get("kind")
        if kind == "hello":
            self._admit(connection, message)
        elif connection.node is None or self._joined.get(connection.node) is not connection:
            return
        elif kind == "leave":
            self._drop(connection.node, message["text"], message["status"])
        elif kind == "end":
            self._end(Outcome(message["text"], message["status"], connection.node, quiet=message["quiet"]))
        elif self._final or message.get("attempt") != self._attempt.number:
            return  # it has not yet heard how the job, or that attempt, ended
        elif kind == "ready":
            self._attempt.ready.add(connection.node)
            self._start_attempt()
        elif kind == "done":
            self._attempt.done.add(connection.node)
            if self._attempt.running and self._attempt.done >= self._left:
                self._final = True
                self._tell("over")
        elif kind == "failed":
            self._attempt.failures += [Failure(**failure) for failure in message["failures"]]
            self._attempt.decide_at = self._attempt.decide_at or time.monotonic() + SETTLE

    def _admit(self, connection: Connection, message: dict[str, Any]) -> None:
        node = message.get("node")
        wrong = None
        if message.get("terms") != self._terms.word():
            wrong = "it was started with another hostfile, --max_restarts or --min_nodes; give all hosts the same"
        elif node in self._admitted or node not in self._left:
            wrong = f"--node_rank {node} is or was part of the job already"
        elif self._final:
            wrong = "the job has ended"
        if wrong is not None:
            connection.send(kind="refused", text=wrong)
            return
        connection.node = node
        self._joined[node] = connection
        self._admitted.add(node)
        if not self._missing():
            self._server.close()
            # How the others reach this machine is what the first host's ranks listen on.
            addresses = [other.local_address() for number, other in self._joined.items() if number]
            self.address = addresses[0] if len(set(addresses)) == 1 else None
            self._tell("joined", run=run_id(), address=next(filter(None, addresses), None))

    def _missing(self) -> list[str]:
        return [self._terms.world.hosts[node].name for node in sorted(self._left - self._admitted)]

    def _start_attempt(self) -> None:
        """Start the attempt once all are ready for it."""
        if self._attempt.running or self._final or not self._attempt.ready >= self._left:
            return
        self._attempt.running = True
        self._tell("start", attempt=self._attempt.number, nodes=sorted(self._left), port=free_port())

    def _update(self, now: float) -> None:
        for connection in list(self._connections):
            silent = now - connection.heard > SILENCE
            if not (silent or connection.gone):
                connection.flush()
                continue
            self._connections.remove(connection)
            connection.close()
            node = connection.node
            if node is not None and self._joined.get(node) is connection:
                del self._joined[node]
                why = f"nothing was heard from it for {SILENCE} s" if silent else "its launcher has ended"
                self._drop(node, why, 1)
        if self._attempt.decide_at is not None and now >= self._attempt.decide_at and not self._final:
            self._decide()

    def _decide(self) -> None:
        if self._restarts < self._terms.restarts:
            self._restarts += 1
            again = f"restart {self._restarts} of {self._terms.restarts}"
            self._restart(outcome.of(self._attempt.failures, again))
        else:
            self._end(outcome.of(self._attempt.failures, None, self._terms.restarts))

    def _drop(self, node: int, why: str, status: int) -> None:
        """Go on without the host `node` where that may be, or end."""
        if self._final or node not in self._left:
            return
        self._left.discard(node)
        self._attempt.ready.discard(node)
        text = f"host {self._terms.world.hosts[node].name} is lost: {why}"
        if node == 0 or self._missing() or len(self._left) < len(self._terms.world.hosts) - self._terms.losses:
            self._end(Outcome(text, status, 0))
            return
        text = f"{text}; going on with {len(self._left)} of {len(self._terms.world.hosts)} hosts"
        if self._attempt.running:
            self._restart(Outcome(text, status, 0, restart=True))
        else:  # between two attempts
            self._say(text)
            self._start_attempt()

    def _restart(self, ended: Outcome) -> None:
        self._tell("outcome", attempt=self._attempt.number, outcome=asdict(ended))
        self._attempt = _Round(self._attempt.number + 1)

    def _end(self, ended: Outcome) -> None:
        if not self._final:
            self._final = True
            self._tell("outcome", attempt=self._attempt.number, outcome=asdict(ended))

    def _tell(self, kind: str, **rest: Any) -> None:
        for connection in self._joined.values():
            connection.send(kind=kind, **rest)


def run_id() -> str:
    """A name for a run that begins now."""
    return time.strftime("%Y%m%d-%H%M%S")


def _hosts(names: list[str]) -> str:
    return f"host{'s' if len(names) > 1 else ''} {listed(names)}"


def _listen(address: str | None, port: int) -> socket.socket:
    """A socket that listens on `port` of an address; of None on all, of both kinds where there are both."""
    try:
        if address is not None:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            return socket.create_server((address, port), family=family, backlog=1024)
        if socket.has_dualstack_ipv6():
            with contextlib.suppress(OSError):
                return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
        return socket.create_server(("", port), backlog=1024)
    except OSError as error:
        raise LaunchError(f"--master_port: cannot listen on {port} ({error.strerror}); give another one") from error
