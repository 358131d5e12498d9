"""One host at the rendezvous of a job's hosts: it sends what happens here, and receives what was decided."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from secrets import token_hex
from typing import Any, NamedTuple

from zero.launch.args.run import RunRequest
from zero.launch.contract import LOST, SECRET_VARIABLE
from zero.launch.hosts.addresses import INTERFACE, interface, loopback
from zero.launch.hosts.host_world import HostWorld
from zero.launch.launch_messages import say
from zero.launch.node.attempt_end import AttemptEnd, Failure
from zero.launch.node.connection import CUT, Connection
from zero.launch.node.launcher_pipe import secret_of_job
from zero.launch.node.node_plan import NodePlan
from zero.launch.node.rendezvous_server import REMIND, TICK, RendezvousServer, Terms

_TRY = 2.0  # seconds for one attempt to connect


class Attempt(NamedTuple):
    """The facts that the ranks of one host need to start."""

    number: int
    world: HostWorld  # of the hosts that take part
    node: int  # this host's number in it
    master_addr: str
    master_port: int


class RendezvousClient:
    """A host's side. A thread of its own waits for what is decided; other threads read its attributes.

    where: the address and the port by which the other hosts know the first one. server: on the first host, where what
    happens is told and heard without a connection. port: where rank 0 is to listen, if that was chosen on one machine.

    node: the number of this host in the job.
    started: the attempt that was started last.
    over: whether all ranks of all hosts have succeeded.
    end: what ended the job, as far as this host knows; no attempt follows.
    run_id: the name of the run, once all hosts have come; first: the attempt that is next then.
    """

    def __init__(
        self,
        terms: Terms,
        node: int,
        where: tuple[str, int],
        server: RendezvousServer | None = None,
        port: int | None = None,
    ) -> None:
        self.node = node
        self.started: Attempt | None = None
        self.over = False
        self.end: AttemptEnd | None = None
        self.run_id = ""
        self.first = 0
        self.signals: list[int] = []  # that the ranks of all hosts are to get
        self._terms = terms
        self._where = where
        self._server = server
        self._port = port
        self._attempt = -1
        self._outcome: AttemptEnd | None = None  # of the attempt
        self._connection: Connection | None = None
        self._address: str | None = None  # of this machine, on the way to the first host
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="zero-rendezvous-client", daemon=True)

    @property
    def host(self) -> str | None:
        """The name of this host in messages; None where it is the only one."""
        hosts = self._terms.world.hosts
        return hosts[self.node].name if len(hosts) > 1 else None

    @property
    def max_restarts(self) -> int:
        """How often the ranks can be started again, after a failure or without a host that was lost."""
        return self._terms.restarts + self._terms.losses

    @property
    def outcome(self) -> AttemptEnd | None:
        """What ended the attempt; None while it goes on."""
        return self._outcome or self.end

    def open(self) -> None:
        """Begin to look for the first host; on that, let the others come."""
        if self._server is not None:
            self._server.start(self._hear)
        else:
            self._thread.start()

    def environment(self) -> dict[str, str]:
        """Variables for the ranks, once all hosts have come."""
        variables = {SECRET_VARIABLE: self._terms.secret}
        if INTERFACE in os.environ:
            return variables
        # gloo would take the address that this machine's own name stands for, which can be one that others do not
        # reach; on one machine it is to listen for nobody else.
        address = min(self._server.addresses, default=None) if self._server is not None else self._address
        name = interface(address) if self.host is not None else loopback()
        if name is not None:
            variables[INTERFACE] = name
        elif self.host is not None:
            why = "the way to the other hosts has no interface of its own"
            say(f"{INTERFACE} is not set on host {self.host}: {why}")
        return variables

    def ready(self, attempt: int) -> None:
        """Say that this host could start `attempt`: all processes of the one before are gone."""
        self._attempt = attempt
        self._outcome = None
        self._send(self.node, kind="ready", attempt=attempt)

    def attempt(self) -> Attempt | None:
        """The attempt that this host said to be ready for; None until all hosts are."""
        started = self.started
        return started if started is not None and started.number == self._attempt else None

    def failed(self, failures: Sequence[Failure]) -> None:
        """Say which ranks of this host failed, in the order seen."""
        self._send(self.node, kind="failed", attempt=self._attempt, failures=[asdict(failure) for failure in failures])

    def done(self) -> None:
        """Say that all ranks of this host succeeded."""
        self._send(self.node, kind="done", attempt=self._attempt)

    def stop(self, text: str, status: int, number: int = signal.SIGTERM) -> None:
        """Ask for the end of the whole job, whose ranks are to end as at the signal `number`."""
        self._send(self.node, kind="end", text=text, status=status, signal=number)

    def leave(self, text: str, status: int) -> None:
        """Say that this host cannot go on; the others do without it where that may be."""
        self._send(self.node, kind="lost", node=self.node, text=text, status=status)
        self._finish(AttemptEnd(text, status))

    def relay(self, message: dict[str, Any]) -> None:
        """Take a message of the launcher that has started the hosts."""
        if self._server is None and self._connection is None and message["kind"] == "end":
            self._finish(AttemptEnd(message["text"], message["status"]))
        self._send(None, **message)

    def close(self) -> None:
        """Leave; on the first host, once the others have heard the last word. Nothing is heard after this."""
        self._closing.set()
        if self._connection is not None:
            self._connection.close()
        if self._thread.ident is not None:  # it may be closed before it was opened, and the first host has none
            self._thread.join(1)
        if self._server is not None:
            self._server.close()

    def _send(self, node: int | None, /, **message: Any) -> None:
        if self._server is not None:
            self._server.handle(node, message)
        elif self._connection is not None:
            self._connection.send(**message)

    def _finish(self, outcome: AttemptEnd) -> None:
        self.end = self.end or outcome
        self._closing.set()

    def _run(self) -> None:
        connection = self._connect()
        if connection is None:
            return
        connection.send(kind="hello", node=self.node, terms=self._terms.word())
        self._address = connection.local_address()
        self._connection = connection
        with contextlib.suppress(*CUT):
            while not self._closing.is_set():
                message = connection.receive()
                if message["kind"] == "alive":
                    connection.send(kind="alive")
                else:
                    self._hear(**message)
        connection.close()
        if not self._closing.is_set():
            why = f"lost the connection to {self._first_host()}"
            self._finish(AttemptEnd(why, LOST, self.node))

    def _connect(self) -> Connection | None:
        """A connection to the first host, once there is one; None where there is none in time."""
        began = time.monotonic()
        remind = began + REMIND
        stranger = ""
        while not self._closing.wait(TICK):
            with contextlib.suppress(OSError):
                peer = socket.create_connection(self._where, timeout=_TRY)
                # On one machine, with nobody listening yet, the kernel may connect a port to itself.
                if peer.getsockname() != peer.getpeername():
                    connection = Connection(peer, self._terms.secret, connects=True)
                    with contextlib.suppress(*CUT):
                        connection.greet()
                        return connection
                    connection.close()
                    if not stranger and not self._closing.is_set():
                        secret = f"this job's secret ({SECRET_VARIABLE})"
                        stranger = f"; who answers there does not show that it has {secret}"
                        say(f"waiting for {self._first_host()}{stranger}")
                peer.close()
            now = time.monotonic()
            if now - began > self._terms.patience + 1:  # so that it is the server that says who has not come
                why = f"{self._first_host()}, did not answer within {self._terms.patience:.0f} s{stranger}"
                self._finish(AttemptEnd(why, 1, self.node))
                return None
            if now >= remind:
                remind = now + REMIND
                say(f"waiting for {self._first_host()}, for {now - began:.0f} s")
        return None

    def _first_host(self) -> str:
        return f"host {self._terms.world.hosts[0].name}, at {self._where[0]}:{self._where[1]}"

    def _hear(self, kind: str, **message: Any) -> None:
        """Take what the first host tells all."""
        if kind == "joined":
            self.first = self.first if self.run_id else message["attempt"]
            self.run_id = message["run"]
        elif kind == "start" and self.node in message["nodes"]:
            nodes = message["nodes"]
            # The hosts that are lost have no ranks any more; the ranks of the others move up.
            world = HostWorld(tuple(self._terms.world.hosts[node] for node in nodes))
            address = self._where[0]
            # By number on the first host, where the store is to listen for those alone who come by that way.
            if self._server is not None and len(self._server.addresses) == 1:
                (address,) = self._server.addresses
            port = self._port or message["port"]
            self.started = Attempt(message["attempt"], world, nodes.index(self.node), address, port)
        elif kind == "signal":
            self.signals.append(message["number"])
        elif kind == "over":
            self.over = True
            self._closing.set()
            if not self.run_id:
                self._finish(AttemptEnd("the job has ended", 0))
        elif kind == "refused":
            self._finish(AttemptEnd(f"the first host refuses this one: {message['text']}", 2, self.node))
        elif kind == "outcome":
            self._outcome = AttemptEnd(**message["outcome"])
            if not self._outcome.restart:
                self._finish(self._outcome)


def client(request: RunRequest, plan: NodePlan) -> RendezvousClient:
    """The client of this host; on the first one, or the only one, with the server."""
    alone = len(plan.world.hosts) == 1
    job_secret = secret_of_job(request.hosts.stdin and request.hosts.launcher == "ssh", os.environ)
    if alone:
        job_secret = token_hex()  # nobody else is to have it
    elif plan.node == 0 and not job_secret:
        say(
            f"the hosts have no secret in common: who reaches port {plan.master_port} of this one can end the job; "
            f"--launcher ssh gives them one, or set {SECRET_VARIABLE} on all of them"
        )
    flags = request.elastic
    terms = Terms(plan.world, flags.max_restarts, flags.min_nodes, job_secret, joins=flags.max_nodes is not None)
    where = (plan.master_addr, plan.master_port)
    server = RendezvousServer(terms, where) if plan.node == 0 else None
    port = request.master_port if alone else None
    return RendezvousClient(terms, plan.node, where, server, port)
