"""One host at the meeting of a job's hosts: it tells what happens here, and hears what was decided."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from zero.launch.contract import LOST, SILENCE
from zero.launch.node.link import Link, readable
from zero.launch.node.meeting import BEAT, REMIND, TICK, Terms
from zero.launch.node.verdict import Failure, Verdict
from zero.launch.secret import VARIABLE

_TRY = 2.0  # seconds for one attempt to connect


class Start(NamedTuple):
    """What an attempt begins with."""

    attempt: int
    nodes: tuple[int, ...]  # the hosts that take part, by their numbers in the job
    port: int  # where the ranks meet, on the first host


class Member:
    """A host's side. A thread does all that could wait; the others look at what it has seen last.

    Attributes:
        met: whether all hosts have come.
        started: the attempt that was started last.
        over: whether all ranks of all hosts have succeeded.
        verdicts: by attempt, what ended it.
        run_id: the name of the run, once all have met.
        address: the address of this machine that the other hosts use.
    """

    def __init__(self, terms: Terms, node: int, where: tuple[str, int], say: Callable[[str], None]) -> None:
        self.met = False
        self.started: Start | None = None
        self.over = False
        self.verdicts: dict[int, Verdict] = {}
        self.address: str | None = None
        self.run_id = ""
        self._terms = terms
        self._node = node
        self._where = where
        self._patience = 0.0
        self._say = say
        self._link: Link | None = None
        self._lock = threading.Lock()
        self._end: Verdict | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="zero-member", daemon=True)

    def start(self, patience: float) -> None:
        """Begin to look for the first host; give up after `patience` seconds."""
        self._patience = patience
        self._thread.start()

    @property
    def end(self) -> Verdict | None:
        """What ended the job, as far as this host knows; no attempt follows."""
        return self._end

    def ready(self, attempt: int) -> None:
        """Say that this host could start `attempt`: all processes of the one before are gone."""
        self._send(kind="ready", attempt=attempt)

    def failed(self, attempt: int, failures: Sequence[Failure]) -> None:
        """Say which ranks of this host failed, in the order seen."""
        self._send(kind="failed", attempt=attempt, failures=[asdict(failure) for failure in failures])

    def done(self, attempt: int) -> None:
        """Say that all ranks of this host succeeded."""
        self._send(kind="done", attempt=attempt)

    def stop(self, text: str, status: int, quiet: bool = False) -> None:
        """Ask for the end of the whole job."""
        self._send(kind="end", text=text, status=status, quiet=quiet)

    def leave(self, text: str, status: int) -> None:
        """Say that this host cannot go on."""
        self._send(kind="leave", text=text, status=status)
        self._finish(Verdict(text, status))

    def close(self) -> None:
        """Leave; nothing is heard after this."""
        self._closing.set()
        if self._thread.ident is not None:  # a signal may come before it has started
            self._thread.join(1)

    def _send(self, **message: Any) -> None:
        if (link := self._link) is not None:
            link.send(**message)

    def _finish(self, found: Verdict) -> None:
        with self._lock:
            self._end = self._end or found

    def _run(self) -> None:
        link = self._connected()
        if link is None:
            return
        link.send(kind="hello", node=self._node, terms=self._terms.word())
        self._link = link
        self.address = link.local_address()
        beat = 0.0
        while not self._closing.is_set() and not link.gone:
            now = time.monotonic()
            readable([link.connection], TICK)
            for message in link.receive():
                self._take(message)
            if now >= beat:
                beat = now + BEAT
                link.send(kind="alive")
            link.flush()
            if now - link.heard > SILENCE:
                break
        link.flush()
        link.close()
        if not (self._closing.is_set() or self.over):
            host = self._terms.world.hosts[0].name
            why = f"lost the connection to host {host}, at {self._where[0]}:{self._where[1]}"
            self._finish(Verdict(why, LOST, self._node, quiet=True))

    def _connected(self) -> Link | None:
        """A connection to the first host, once there is one; None where there is none in time."""
        began = time.monotonic()
        remind = began + REMIND
        host = f"host {self._terms.world.hosts[0].name}, at {self._where[0]}:{self._where[1]},"
        strange = ""
        while not self._closing.wait(TICK):
            with contextlib.suppress(OSError):
                found = socket.create_connection(self._where, timeout=_TRY)
                # On one machine, with nobody listening yet, the kernel may connect a port to itself.
                if found.getsockname() != found.getpeername():
                    link = Link(found, self._terms.secret, connects=True)
                    if self._known(link):
                        return link
                    if not strange and not self._closing.is_set():
                        strange = f"; who answers there does not show that it has this job's secret ({VARIABLE})"
                        self._say(f"waiting for {host[:-1]}{strange}")
                found.close()
            now = time.monotonic()
            if now - began > self._patience:
                why = f"{host} did not answer within {self._patience:.0f} s{strange}"
                self._finish(Verdict(why, 1, self._node))
                return None
            if now >= remind:
                remind = now + REMIND
                self._say(f"waiting for {host} for {now - began:.0f} s")
        return None

    def _known(self, link: Link) -> bool:
        """Whether the other end has shown in time that it has the secret; it says nothing more before our hello."""
        while not (link.known or link.gone or self._closing.is_set() or time.monotonic() - link.heard > SILENCE):
            readable([link.connection], TICK)
            link.receive()
        return link.known

    def _take(self, message: dict[str, Any]) -> None:
        kind = message.get("kind")
        if kind == "met":
            if self._node == 0:
                self.address = message["address"]
            self.run_id = message["run"]
            self.met = True
        elif kind == "start":
            self.started = Start(message["attempt"], tuple(message["nodes"]), message["port"])
        elif kind == "over":
            self.over = True
            self._closing.set()
        elif kind == "refused":
            self._finish(Verdict(f"the first host refuses this one: {message['text']}", 2, self._node))
            self._closing.set()
        elif kind == "verdict":
            found = Verdict(**message["verdict"])
            if not found.restart:
                self._finish(found)
                self._closing.set()
            # Last, as others look at it first.
            self.verdicts[message["attempt"]] = found
