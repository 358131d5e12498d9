"""At the rendezvous of a job's hosts every host hears the same, and who does not come or does not belong is named."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import wait

import pytest
from nodes import eventually
from ports import free_port

from zero.launch.hosts.host_world import Host, HostWorld
from zero.launch.node import rendezvous_client, rendezvous_server
from zero.launch.node.attempt_end import Failure
from zero.launch.node.connection import Connection
from zero.launch.node.rendezvous_client import RendezvousClient
from zero.launch.node.rendezvous_server import RendezvousServer, Terms

WORLD = HostWorld(tuple(Host(name, ("0",)) for name in "abc"))
SECRET = "of this job"


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the hosts say of their own."""
    lines: list[str] = []
    for module in (rendezvous_client, rendezvous_server):
        monkeypatch.setattr(module, "say", lines.append)
    return lines


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts that take each other for lost after half the time."""
    monkeypatch.setattr("zero.launch.node.connection.SILENCE", 3)
    monkeypatch.setattr(rendezvous_server, "SILENCE", 3)
    monkeypatch.setattr(rendezvous_server, "HEARTBEAT", 0.5)


def terms(**more: float) -> Terms:
    return Terms(WORLD, secret=SECRET, **more)


def first_host(given: Terms, where: tuple[str, int]) -> tuple[RendezvousServer, RendezvousClient]:
    server = RendezvousServer(given, where)
    return server, RendezvousClient(given, 0, where, server)


@contextlib.contextmanager
def met(given: Terms, nodes: tuple[int, ...] = (1, 2)) -> Iterator[tuple[RendezvousServer, tuple[str, int], list]]:
    """The first host and its address, and the hosts: that one, and the others of `nodes`."""
    where = ("127.0.0.1", free_port())
    server, first = first_host(given, where)
    members = [first, *(RendezvousClient(given, node, where) for node in nodes)]
    for member in members:
        member.open()
    try:
        yield server, where, members
    finally:
        for member in reversed(members):
            member.close()


def test_who_does_not_come_is_named():
    with met(terms(patience=3.0), nodes=(2,)) as (_, _, members):
        assert eventually(lambda: all(member.end for member in members))
        assert {member.end.text for member in members} == {"host b did not come within 3 s"}
        assert (members[0].end.node, members[0].end.status) == (0, 1)


def test_a_first_host_that_does_not_answer_is_named():
    port = free_port()
    member = RendezvousClient(terms(patience=0.3), 1, ("127.0.0.1", port))
    member.open()
    assert eventually(lambda: member.end)
    assert member.end.text == f"host a, at 127.0.0.1:{port}, did not answer within 0 s"
    member.close()


@pytest.mark.parametrize("came", [False, True])
def test_hosts_start_without_one_that_the_launcher_has_lost_and_that_one_ends(came):
    with met(terms(min_nodes=2), nodes=(1, 2) if came else (1,)) as (_, _, members):
        assert eventually(lambda: not came or all(member.run_id for member in members))
        members[0].relay({"kind": "lost", "node": 2, "text": "ssh: Connection refused", "status": 255})
        for member in members[:2]:
            assert eventually(lambda member=member: member.run_id)
            member.ready(0)
        assert eventually(lambda: all(member.attempt() for member in members[:2]))
        assert [host.name for host in members[0].started.world.hosts] == ["a", "b"]
        for member in members[2:]:
            assert eventually(lambda member=member: member.end)
            assert (member.end.node, member.end.status) == (None, 129)


def started(members: list[RendezvousClient], attempt: int) -> list[tuple[int, int]]:
    """The number of each host, and of all, in an attempt that these are ready for."""
    for member in members:
        member.ready(attempt)
    assert eventually(lambda: all(member.attempt() for member in members))
    return [(member.attempt().node, len(member.attempt().world.hosts)) for member in members]


def test_a_host_that_is_lost_joins_at_the_next_restart(said):
    given = terms(min_nodes=1, restarts=1, joins=True)
    with met(given) as (_, where, [first, b, c]):
        assert eventually(lambda: all(member.run_id for member in (first, b, c)))
        assert started([first, b, c], 0) == [(0, 3), (1, 3), (2, 3)]
        b.close()
        assert eventually(lambda: first.outcome and c.outcome)
        assert "host b is lost" in first.outcome.text and first.outcome.restart
        assert started([first, c], 1) == [(0, 2), (1, 2)]
        again = RendezvousClient(given, 1, where)
        again.open()
        assert eventually(lambda: "host b has come, and takes part from the next restart on" in said)
        assert not again.run_id
        first.failed([Failure(0, 1, pid=1)])
        assert eventually(lambda: again.run_id)
        assert again.first == 2
        assert eventually(lambda: first.outcome and c.outcome)
        assert started([first, again, c], 2) == [(0, 3), (1, 3), (2, 3)]
        for member in (first, again, c):
            member.done()
        assert eventually(lambda: first.over and again.over and c.over)
        again.close()


def test_the_old_connection_of_a_host_that_has_come_again_ends_nothing(said):
    given = terms(min_nodes=2, restarts=1, joins=True)
    with met(given, nodes=(2,)) as (_, where, [first, c]):
        old = Connection(socket.create_connection(where), given.secret, connects=True)
        old.greet()
        old.send(kind="hello", node=1, terms=given.word())
        assert eventually(lambda: first.run_id and c.run_id)
        old.send(kind="ready", attempt=0)
        assert started([first, c], 0) == [(0, 3), (2, 3)]
        first.relay({"kind": "lost", "node": 1, "text": "its ssh has ended", "status": 255})
        assert eventually(lambda: first.outcome and c.outcome)
        assert started([first, c], 1) == [(0, 2), (1, 2)]
        again = RendezvousClient(given, 1, where)
        again.open()
        assert eventually(lambda: any("host b has come" in line for line in said))
        old.close()
        assert not eventually(lambda: again.end or first.outcome, seconds=0.5)
        first.failed([Failure(0, 1, pid=1)])
        assert eventually(lambda: again.run_id and first.outcome and c.outcome)
        assert started([first, again, c], 2) == [(0, 3), (1, 3), (2, 3)]
        again.close()


def test_hosts_that_may_come_late_are_not_waited_for(said, monkeypatch):
    monkeypatch.setattr(rendezvous_server, "FIRST", 1.0)
    given = terms(min_nodes=2, joins=True)
    with met(given, nodes=(2,)) as (_, where, [first, c]):
        assert eventually(lambda: first.run_id and c.run_id)
        assert started([first, c], 0) == [(0, 2), (1, 2)]
        late = RendezvousClient(given, 1, where)
        late.open()
        assert eventually(lambda: any("host b has come" in line for line in said))
        first.done()
        c.done()
        assert eventually(lambda: late.end)
        assert (late.end.text, late.end.status) == ("the job has ended", 0)
        late.close()


def test_who_does_not_belong_is_refused_and_the_others_go_on():
    with met(terms(), nodes=(1,)) as (server, where, members):
        stranger = RendezvousClient(terms(restarts=5), 2, where)
        twin = RendezvousClient(terms(), 1, where)
        assert eventually(lambda: server.addresses)  # one has come
        for other, text in ((stranger, "another hostfile"), (twin, "--node_rank 1 is part of the job")):
            other.open()
            assert eventually(lambda other=other: other.end)
            assert text in other.end.text and other.end.status == 2
            other.close()
        late = RendezvousClient(terms(), 2, where)
        late.open()
        assert eventually(lambda: all(member.run_id for member in (*members, late)))
        late.close()


NOTHING = re.compile(rb"[0-9a-f]{32}\n([0-9a-f]{64} \{\}\n)?")  # of the job: a number, and a signature


def heard(connection: socket.socket) -> bytes:
    """All that comes until the other end has closed the connection."""
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while data := connection.recv(65536):
            found += data
    return found


def flooded(connection: socket.socket) -> bool:
    """Whether somebody takes a hundred megabytes without the end of a line."""
    with contextlib.suppress(OSError):
        for _ in range(1600):
            connection.sendall(bytes(65536))
        return True
    return False


def recorded(where: tuple[str, int]) -> tuple[threading.Thread, tuple[str, int], list[bytes]]:
    """Someone between a host and the first: a thread that ends with them, where to connect, what the host sends."""
    server, sent = socket.create_server(("127.0.0.1", 0)), []

    def carry() -> None:
        with server, server.accept()[0] as host, socket.create_connection(where) as first:
            while True:
                ready = wait([host, first], 60)
                for one, other in ((host, first), (first, host)):
                    if one in ready:
                        if not (data := one.recv(65536)):
                            return
                        other.sendall(data)
                        sent.extend([data] if one is host else [])

    thread = threading.Thread(target=carry)
    thread.start()
    return thread, server.getsockname(), sent


def test_strangers_end_nothing_and_learn_nothing(said, impatient):
    with met(terms(), nodes=()) as (server, where, (first,)), contextlib.ExitStack() as stack:
        between, there, sent = recorded(where)
        spied, last = RendezvousClient(terms(), 1, there), RendezvousClient(terms(), 2, where)
        stack.callback(between.join)
        stack.callback(spied.close)
        stack.callback(last.close)
        spied.open()
        assert eventually(lambda: server.addresses)
        number = b"".join(sent).partition(b"\n")[0] + b"\n"
        forged = json.dumps({"kind": "end", "text": "forged", "status": 3, "signal": 15}).encode() + b"\n"
        spoken = {
            stack.enter_context(socket.create_connection(where)): data
            for data in (
                b"GET / HTTP/1.0\r\n\r\n",
                b"\n\n\n",
                b"\0\xff" * 9000,
                number + forged,
                number + 64 * b"0" + b" " + forged,
                b"".join(sent),
            )
        }
        for one, data in spoken.items():
            one.sendall(data)
        mute, slow, flooding, lying = (stack.enter_context(socket.create_connection(where)) for _ in range(4))
        assert not flooded(flooding)
        with pytest.raises(ValueError):
            Connection(lying, "of another job", connects=True).greet()
        assert all(NOTHING.fullmatch(heard(one)) for one in [*spoken, flooding])
        # Those who say too little have as long as a host that is silent.
        slow.sendall(b"5")
        assert [NOTHING.fullmatch(heard(one)) is not None for one in (mute, slow)] == [True, True]
        # And those who are many do not keep out a host of the job.
        crowd = [stack.enter_context(socket.create_connection(where)) for _ in range(300)]
        assert NOTHING.fullmatch(heard(crowd[0]))
        last.open()
        members = (first, spied, last)
        assert eventually(lambda: all(member.run_id for member in members))
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(where)
        for member in members:
            member.ready(0)
        assert eventually(lambda: all(member.started for member in members))
        for member in members:
            member.done()
        assert eventually(lambda: all(member.over for member in members))
        assert said == []


def test_who_poses_as_the_first_host_learns_nothing_and_is_not_believed(said):
    with socket.create_server(("127.0.0.1", 0)) as posing:
        where = posing.getsockname()
        member = RendezvousClient(terms(), 1, where)
        member.open()
        told = b"1" * 32 + b"\n" + 64 * b"0" + b' {"kind": "over"}\n'
        for data in (b"HTTP/1.0 200 OK\r\n\r\n\r\n", told, bytes(4096)):
            with posing.accept()[0] as connection:
                connection.sendall(data)
                assert NOTHING.fullmatch(heard(connection))
    _, first = first_host(terms(), where)
    other = RendezvousClient(terms(), 2, where)
    first.open()
    other.open()
    assert eventually(lambda: all(one.run_id for one in (first, member, other)))
    assert said == [
        f"waiting for host a, at 127.0.0.1:{where[1]}; who answers there does not show that it has this job's secret "
        "(ZERO_SECRET)"
    ]
    for one in (member, other, first):
        one.close()


@pytest.mark.parametrize("again", [True, False])
def test_a_line_counts_once_and_in_one_direction(again):
    (one, here), (there, other) = socket.socketpair(), socket.socketpair()
    with one, here, there, other, ThreadPoolExecutor(2) as threads:
        first, second = Connection(one, SECRET, connects=False), Connection(other, SECRET, connects=True)
        greetings = [threads.submit(first.greet), threads.submit(second.greet)]
        for length in (33, 68):  # a number, and the first signature
            there.sendall(here.recv(length, socket.MSG_WAITALL))
            here.sendall(there.recv(length, socket.MSG_WAITALL))
        for greeting in greetings:
            greeting.result()
        first.send(kind="alive")
        second.send(kind="alive")
        line, own = there.recv(9999), here.recv(9999)
        if again:
            here.sendall(line)
            assert first.receive() == {"kind": "alive"}
        here.sendall(line if again else own)
        with pytest.raises(ValueError, match="no message of the job"):
            first.receive()
