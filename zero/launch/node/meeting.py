"""Where the launchers of a job's hosts meet: the first host's decides for all of them, and tells them.

Every host sends what happens to it, and a sign of life each second. The thread here is the only one that decides: who
takes part, when an attempt starts, what ended it, whether another follows. So all hosts do the same, and restart
equally often. It is not torch's store, whose calls wait for minutes when a network is cut, and which has to be asked:
a connection ends at once with the process at its other end, and says so.

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
from zero.launch.errors import LaunchError, listed
from zero.launch.hosts.ports import own_address
from zero.launch.hosts.world import World
from zero.launch.node import verdict
from zero.launch.node.link import Link, readable
from zero.launch.node.verdict import Failure, Verdict

TICK = 0.1
BEAT = 1.0  # seconds between two signs of life
SETTLE = 1.0  # seconds between the first failure that is told and the verdict; its cause may come later
PATIENCE = 300.0  # seconds for all hosts to come
REMIND = 30.0  # seconds between two lines about those who have not
_LINGER = 2.0  # seconds for the hosts to take the last message
_UNKNOWN = 256  # connections of whom nothing is known yet; the oldest goes


@dataclass(frozen=True)
class Terms:
    """What all hosts of a job must be started with alike."""

    world: World
    restarts: int = 0
    min_nodes: int | None = None  # None: no host can be lost
    secret: str = field(default="", repr=False)  # shown by each host, and never sent

    @property
    def losses(self) -> int:
        """How many hosts can be lost."""
        hosts = len(self.world.hosts)
        return 0 if self.min_nodes is None else hosts - self.min_nodes

    def word(self) -> str:
        """The terms as one word that two hosts can compare."""
        return f"{self.world.encode()}/{self.restarts}/{self.min_nodes}"


class Meeting:
    """The first host's side. Other threads only call `start` and `close`.

    where: the address and the port by which the other hosts know this one.

    Attributes:
        here: where to connect to on this machine.
        address: the one of this machine that all other hosts use, once they have come; None where they differ.
    """

    def __init__(
        self,
        terms: Terms,
        where: tuple[str, int],
        free_port: Callable[[], int],
        say: Callable[[str], None],
        patience: float,
    ) -> None:
        own = own_address(where[0])
        self.here = (own or "127.0.0.1", where[1])
        self.address: str | None = None
        self._terms = terms
        self._free_port = free_port
        self._say = say
        self._patience = patience
        self._server = _listen(own, where[1])
        self._thread = threading.Thread(target=self._run, name="zero-meeting", daemon=True)
        self._links: list[Link] = []
        self._here: dict[int, Link] = {}
        self._left = set(range(len(terms.world.hosts)))  # the hosts that take part, come or not
        self._came: set[int] = set()
        self._attempt = 0
        self._restarts = 0
        self._ready: set[int] = set()
        self._done: set[int] = set()
        self._running = False
        self._failures: list[Failure] = []
        self._judge_at: float | None = None
        self._final = False
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
            for link in self._readable():
                for message in link.receive():
                    try:
                        self._take(link, message)
                    except (KeyError, TypeError):
                        link.gone = True  # whoever that is, it is no launcher like this one
            self._look(now)
            if now >= beat:
                beat = now + BEAT
                self._tell("alive")
            missing = [] if self._final else self._missing()
            if missing and now - began > self._patience:
                words = f"{_hosts(missing)} did not come within {self._patience:.0f} s"
                self._end(Verdict(words, 1, 0))
            elif missing and now >= remind:
                remind = now + REMIND
                self._say(f"waiting for {_hosts(missing)} for {now - began:.0f} s")
            if self._closing.is_set():
                closed_at = closed_at or now
                if now - closed_at > _LINGER or not any(not link.gone for link in self._here.values()):
                    break
        for link in self._links:
            link.close()

    def _readable(self) -> list[Link]:
        found = readable([self._server, *(link.connection for link in self._links)], TICK)
        if self._server in found:
            with contextlib.suppress(OSError):
                self._links.append(Link(self._server.accept()[0], self._terms.secret, connects=False))
            unknown = [link for link in self._links if not link.known]
            for link in unknown[:-_UNKNOWN]:
                link.gone = True
        return [link for link in self._links if link.connection in found]

    def _take(self, link: Link, message: dict[str, Any]) -> None:
        kind = message.get("kind")
        if kind == "hello":
            self._welcome(link, message)
        elif link.node is None or self._here.get(link.node) is not link:
            return
        elif kind == "leave":
            self._lose(link.node, message["text"], message["status"])
        elif kind == "end":
            self._end(Verdict(message["text"], message["status"], link.node, quiet=message["quiet"]))
        elif self._final or message.get("attempt") != self._attempt:
            return  # it has not yet heard how the job, or that attempt, ended
        elif kind == "ready":
            self._ready.add(link.node)
            self._go()
        elif kind == "done":
            self._done.add(link.node)
            if self._running and self._done >= self._left:
                self._final = True
                self._tell("over")
        elif kind == "failed":
            self._failures += [Failure(**failure) for failure in message["failures"]]
            self._judge_at = self._judge_at or time.monotonic() + SETTLE

    def _welcome(self, link: Link, message: dict[str, Any]) -> None:
        node = message.get("node")
        wrong = None
        if message.get("terms") != self._terms.word():
            wrong = "it was started with another hostfile, --max_restarts or --min_nodes; give all hosts the same"
        elif node in self._came or node not in self._left:
            wrong = f"--node_rank {node} is or was part of the job already"
        elif self._final:
            wrong = "the job has ended"
        if wrong is not None:
            link.send(kind="refused", text=wrong)
            return
        link.node = node
        self._here[node] = link
        self._came.add(node)
        if not self._missing():
            self._server.close()
            # How the others reach this machine is what the first host's ranks listen on.
            found = [one.local_address() for other, one in self._here.items() if other]
            self.address = found[0] if len(set(found)) == 1 else None
            self._tell("met", run=run_id(), address=next(filter(None, found), None))

    def _missing(self) -> list[str]:
        return [self._terms.world.hosts[node].name for node in sorted(self._left - self._came)]

    def _go(self) -> None:
        """Start the attempt once all are ready for it."""
        if self._running or self._final or not self._ready >= self._left:
            return
        self._running = True
        self._tell("start", attempt=self._attempt, nodes=sorted(self._left), port=self._free_port())

    def _look(self, now: float) -> None:
        for link in [link for link in self._links if link.gone or now - link.heard > SILENCE]:
            self._links.remove(link)
            node, silent = link.node, now - link.heard > SILENCE
            link.close()
            if node is not None and self._here.get(node) is link:
                del self._here[node]
                why = f"nothing was heard from it for {SILENCE} s" if silent else "its launcher has ended"
                self._lose(node, why, 1)
        for link in self._links:
            link.flush()
        if self._judge_at is not None and now >= self._judge_at:
            self._judge()

    def _judge(self) -> None:
        self._judge_at = None
        if self._restarts < self._terms.restarts:
            self._restarts += 1
            again = f"restart {self._restarts} of {self._terms.restarts}"
            self._again(verdict.of(self._failures, again))
        else:
            self._end(verdict.of(self._failures, None, self._terms.restarts))

    def _lose(self, node: int, why: str, status: int) -> None:
        """Go on without the host `node` where that may be, or end."""
        if self._final or node not in self._left:
            return
        self._left.discard(node)
        self._ready.discard(node)
        text = f"host {self._terms.world.hosts[node].name} is lost: {why}"
        if node == 0 or self._missing() or len(self._left) < len(self._terms.world.hosts) - self._terms.losses:
            self._end(Verdict(text, status, 0))
            return
        text = f"{text}; going on with {len(self._left)} of {len(self._terms.world.hosts)} hosts"
        if self._running:
            self._again(Verdict(text, status, 0, restart=True))
        else:  # between two attempts
            self._say(text)
            self._go()

    def _again(self, found: Verdict) -> None:
        self._tell("verdict", attempt=self._attempt, verdict=asdict(found))
        self._attempt += 1
        self._running = False
        self._ready, self._done, self._failures, self._judge_at = set(), set(), [], None

    def _end(self, found: Verdict) -> None:
        if not self._final:
            self._final = True
            self._judge_at = None
            self._tell("verdict", attempt=self._attempt, verdict=asdict(found))

    def _tell(self, kind: str, **rest: Any) -> None:
        for link in self._here.values():
            link.send(kind=kind, **rest)


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
