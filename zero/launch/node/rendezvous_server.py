"""The rendezvous of a job's hosts: the launcher of the first one decides for all of them, and tells them.

This is the one control plane of a job. Every host sends what happens to it, and answers a heartbeat each second; the
launcher that has started the hosts by ssh sends by the stdin of the first one that it is there, that it was stopped,
and which host ssh has lost. What is decided is decided here, under one lock: who takes part, when an attempt starts,
what ended it, whether another follows. So all hosts do the same, and restart equally often.

The pipes of ssh could not carry it: hosts that Slurm, MPI or a user starts have none; and a
host that has lost the first one can end by itself only where it notices. It is not torch's rendezvous either: that
lives in a TCPStore, which anybody who reaches its port can write to, and whose calls wait for minutes when a network is
cut. A connection ends at once with the process at its other end. A job on one machine is decided in the same way, with
nobody else to tell.

Who connects and does not show that it has the job's secret hears nothing of the job, and is dropped; once all hosts
have come, nobody can connect any more, unless hosts may join later. Such a host waits for the next restart.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from zero.launch.contract import HEARTBEAT, LOST, SAVED, SILENCE
from zero.launch.hosts.addresses import free_port, own_address
from zero.launch.hosts.host_world import HostWorld
from zero.launch.launch_messages import LaunchError, listed, say
from zero.launch.node.attempt_end import AttemptEnd, Failure, cause, end_of
from zero.launch.node.connection import CUT, Connection

TICK = 0.1
SETTLE = 1.0  # seconds between the first failure and the outcome; its cause may come later
FIRST = 30.0  # seconds for hosts to come that may as well join later
SETTLE_ALONE = 0.2  # the same on one machine, where nothing comes over a network
REMIND = 30.0  # seconds between two lines about hosts that are waited for
_LINGER = 2.0  # seconds for the hosts to take the last message
_UNKNOWN = 256  # connections of whom nothing is known yet; the oldest goes


@dataclass(frozen=True)
class Terms:
    """The facts in which all hosts of a job must be alike."""

    world: HostWorld
    restarts: int = 0
    min_nodes: int | None = None  # None: no host can be lost
    secret: str = field(default="", repr=False)  # shown by each host, and never sent
    patience: float = 300.0  # seconds for all hosts to come
    joins: bool = False  # hosts that were lost, or have not come in time, may come later

    @property
    def losses(self) -> int:
        """How many hosts can be lost."""
        hosts = len(self.world.hosts)
        return 0 if self.min_nodes is None else hosts - self.min_nodes

    def word(self) -> str:
        """The terms as one word that two hosts can compare."""
        return f"{self.world.encode()}/{self.restarts}/{self.min_nodes}/{self.joins}"


@dataclass
class _Round:
    """One attempt, as the first host knows it."""

    number: int = 0
    ready: set[int] = field(default_factory=set)  # the hosts that could start it
    running: bool = False
    done: set[int] = field(default_factory=set)  # the hosts whose ranks have all succeeded
    failures: list[Failure] = field(default_factory=list)


class RendezvousServer:
    """The first host's side. What is public here takes the lock; what is not is called with it.

    where: the address and the port by which the other hosts know this one; not listened at where there are none.

    addresses: those of this machine that the other hosts use, once they have come.
    """

    def __init__(self, terms: Terms, where: tuple[str, int]) -> None:
        self.addresses: set[str] = set()
        self._terms = terms
        self._run_id = time.strftime("%Y%m%d-%H%M%S")
        self._alone = len(terms.world.hosts) == 1
        self._server = None if self._alone else _listen(own_address(where[0]), where[1])
        if self._server is not None:
            self._server.settimeout(TICK)
        self._lock = threading.Lock()
        self._unknown: dict[socket.socket, None] = {}  # who has not been admitted, the oldest first
        self._members: dict[int, Callable[..., None]] = {}  # what tells each host that has come and is not lost
        self._left = set(range(len(terms.world.hosts)))  # the hosts that take part, come or not
        self._admitted: set[int] = set()
        self._later: dict[int, Callable[..., None]] = {}  # who waits for the next restart
        self._attempt = _Round()
        self._restarts = 0
        self._final = False  # no attempt follows
        self._closing = threading.Event()

    def start(self, tell: Callable[..., None]) -> None:
        """Begin to listen; `tell` takes what is told to this host itself, in whatever thread."""
        with self._lock:
            self._join(0, tell)
        if self._server is not None:
            threading.Thread(target=self._run, name="zero-rendezvous", daemon=True).start()

    def close(self) -> None:
        """End once all have taken what was sent to them, or shortly after."""
        self._closing.set()
        end = time.monotonic() + _LINGER
        while len(self._members) > 1 and time.monotonic() < end:
            time.sleep(TICK / 2)
        if self._server is not None:
            self._server.close()

    def handle(self, node: int | None, message: dict[str, Any]) -> None:
        """Take a message of the host `node`, which has come; None: of the launcher that has started the hosts."""
        with self._lock:
            kind = message["kind"]
            if kind == "lost":
                self._drop(message["node"], message["text"], message["status"])
            elif kind == "signal":
                self._tell("signal", number=message["signal"])
            elif kind == "end":
                says = node if message["text"] else None
                self._end(AttemptEnd(message["text"], message["status"], says, signal=message["signal"], stopped=True))
            elif self._final or message.get("attempt") != self._attempt.number:
                return  # a heartbeat; or it has not yet heard how the job, or that attempt, ended
            elif kind == "ready":
                self._attempt.ready.add(node)
                self._start_attempt()
            elif kind == "done":
                self._attempt.done.add(node)
                if self._attempt.running and self._attempt.done >= self._left:
                    self._final = True
                    self._tell("over")
            elif kind == "failed":
                if not self._attempt.failures:
                    timer = threading.Timer(SETTLE_ALONE if self._alone else SETTLE, self.decide, [self._attempt])
                    timer.daemon = True
                    timer.start()
                self._attempt.failures += [Failure(**failure) for failure in message["failures"]]

    def _run(self) -> None:
        """Let the others in, and tell them every second that this one is here."""
        began = time.monotonic()
        remind, beat = began + REMIND, began
        while not self._closing.is_set():
            self._accept()
            now = time.monotonic()
            with self._lock:
                if now >= beat:
                    beat = now + HEARTBEAT
                    self._tell("alive")
                missing = [] if self._final else self._missing()
                late, here = self._left - self._admitted, self._left & self._admitted
                if missing and self._terms.joins and now - began > FIRST and self._enough(len(here)):
                    for node in late:
                        self._drop(node, f"it did not come within {FIRST:.0f} s", 1)
                elif missing and now - began > self._terms.patience:
                    words = f"{_hosts(missing)} did not come within {self._terms.patience:.0f} s"
                    self._end(AttemptEnd(words, 1, 0))
                elif missing and now >= remind:
                    remind = now + REMIND
                    say(f"waiting for {_hosts(missing)} for {now - began:.0f} s")

    def _accept(self) -> None:
        try:
            peer = self._server.accept()[0]
        except TimeoutError:
            return
        except OSError:  # closed, as all have come
            time.sleep(TICK)
            return
        with self._lock:
            self._unknown[peer] = None
            if len(self._unknown) > _UNKNOWN:
                oldest = next(iter(self._unknown))
                del self._unknown[oldest]
                _shut(oldest)
        threading.Thread(target=self._serve, args=(peer,), name="zero-rendezvous-host", daemon=True).start()

    def _serve(self, peer: socket.socket) -> None:
        """Look after one connection as long as it lasts."""
        connection = Connection(peer, self._terms.secret, connects=False)
        node, why = None, "its launcher has ended"
        try:
            connection.greet()
            hello = connection.receive()
            with self._lock:
                self._unknown.pop(peer, None)
                node = self._admit(connection, hello)
            while node is not None:
                self.handle(node, connection.receive())
        except TimeoutError:
            why = f"nothing was heard from it for {SILENCE} s"
        except CUT:
            pass
        finally:
            connection.close()
            with self._lock:
                self._unknown.pop(peer, None)
                # Where that host has come again, this connection is none of its any more.
                if node is not None and self._later.get(node) == connection.send:
                    del self._later[node]
                elif node is not None and self._members.get(node) == connection.send:
                    del self._members[node]
                    self._drop(node, why, 1)

    def _admit(self, connection: Connection, hello: dict[str, Any]) -> int | None:
        """The number of the host at the other end; None where it is refused."""
        node = hello.get("node")
        wrong = None
        if hello.get("terms") != self._terms.word():
            wrong = "it was started with another hostfile, --max_restarts or --min_nodes; give all hosts the same"
        elif node in self._later or node in self._left & self._admitted:
            wrong = f"--node_rank {node} is part of the job already"
        elif node not in self._left and not self._terms.joins:
            wrong = f"--node_rank {node} was part of the job; with --max_nodes it could join again"
        elif self._final:
            wrong = "the job has ended"
        if wrong is not None:
            connection.send(kind="refused", text=wrong)
            return None
        self.addresses.add(connection.local_address())
        if node in self._left:
            self._join(node, connection.send)
            return node
        self._later[node] = connection.send
        say(f"host {self._terms.world.hosts[node].name} has come, and takes part from the next restart on")
        if not self._attempt.running:
            self._take_in()
        return node

    def _take_in(self) -> None:
        """Have the hosts that have come later take part in the attempt that is next."""
        joining, self._later = self._later, {}
        self._left |= set(joining)
        for node, tell in joining.items():
            self._join(node, tell)

    def _join(self, node: int, tell: Callable[..., None]) -> None:
        self._members[node] = tell
        self._admitted.add(node)
        self._begin()

    def _begin(self) -> None:
        """Close the door once all have come who are not lost."""
        if not self._missing():
            if self._server is not None and not self._terms.joins:
                _shut(self._server)
            self._tell("joined", run=self._run_id, attempt=self._attempt.number)

    def _missing(self) -> list[str]:
        return [self._terms.world.hosts[node].name for node in sorted(self._left - self._admitted)]

    def _start_attempt(self) -> None:
        """Start the attempt once all are ready for it."""
        if self._attempt.running or self._final or not self._attempt.ready >= self._left:
            return
        self._attempt.running = True
        self._tell("start", attempt=self._attempt.number, nodes=sorted(self._left), port=free_port())

    def decide(self, attempt: _Round) -> None:
        """Take the failures of `attempt` so far for all that belong together."""
        with self._lock:
            if attempt is not self._attempt or self._final:
                return
            if self._restarts < self._terms.restarts and cause(attempt.failures).exitcode != SAVED:
                self._restarts += 1
                again = f"restart {self._restarts} of {self._terms.restarts}"
                self._restart(end_of(attempt.failures, again))
            else:
                self._end(end_of(attempt.failures, None, self._terms.restarts))

    def _drop(self, node: int, why: str, status: int) -> None:
        """Go on without the host `node` where that may be, or end."""
        if self._final or node not in self._left:
            return
        self._left.discard(node)
        self._attempt.ready.discard(node)
        text = f"host {self._terms.world.hosts[node].name} is lost: {why}"
        if node == 0 or not self._enough(len(self._left)):
            self._end(AttemptEnd(text, status, 0))
            return
        text = f"{text}; going on with {len(self._left)} of {len(self._terms.world.hosts)} hosts"
        if tell := self._members.pop(node, None):
            tell(kind="outcome", outcome=asdict(AttemptEnd(text, LOST)))
        if self._attempt.running:
            self._restart(AttemptEnd(text, status, 0, restart=True))
        else:  # between two attempts
            say(text)
            self._begin()
            self._start_attempt()

    def _enough(self, hosts: int) -> bool:
        return hosts >= len(self._terms.world.hosts) - self._terms.losses

    def _restart(self, ended: AttemptEnd) -> None:
        self._tell("outcome", outcome=asdict(ended))
        self._attempt = _Round(self._attempt.number + 1)
        self._take_in()

    def _end(self, ended: AttemptEnd) -> None:
        if not self._final:
            self._final = True
            self._tell("outcome", outcome=asdict(ended))

    def _tell(self, kind: str, **rest: Any) -> None:
        waiting = self._later if self._final or kind == "alive" else {}
        for tell in (*self._members.values(), *waiting.values()):
            tell(kind=kind, **rest)


def _shut(one: socket.socket) -> None:
    """End a socket that another thread may wait at."""
    with contextlib.suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)


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
