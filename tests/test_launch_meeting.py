"""At the meeting of a job's hosts every host hears the same, and who does not come or does not belong is named."""

from __future__ import annotations

import contextlib
import itertools
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict

import psutil
import pytest
from ports import free_port

from zero.launch.contract import LOST
from zero.launch.errors import LaunchError
from zero.launch.hosts.world import Host, World
from zero.launch.node import meeting as meetings
from zero.launch.node.interface import interface
from zero.launch.node.link import Link
from zero.launch.node.meeting import Meeting, Terms
from zero.launch.node.member import Member
from zero.launch.node.verdict import Failure, cause, of

WORLD = World(tuple(Host(name, ("0",)) for name in "abc"))


def until(holds: Callable[[], object]) -> object:
    end = time.monotonic() + 120
    while not (found := holds()) and time.monotonic() < end:
        time.sleep(0.01)
    return found


@contextlib.contextmanager
def met(
    terms: Terms, nodes: tuple[int, ...] = (0, 1, 2), patience: float = 120
) -> Iterator[tuple[Meeting, list, list]]:
    said: list[str] = []
    port = free_port()
    meeting = Meeting(terms, port, lambda: 4711, said.append, patience)
    members = [Member(terms, node, ("127.0.0.1", port), said.append) for node in nodes]
    meeting.start()
    for member in members:
        member.start(patience)
    try:
        yield meeting, members, said
    finally:
        for member in members:
            member.close()
        meeting.close()


def test_all_start_alike_and_hear_the_same_verdict(monkeypatch):
    monkeypatch.setattr(meetings, "SETTLE", 60.0)
    with met(Terms(WORLD, restarts=1)) as (meeting, members, said):
        assert until(lambda: all(member.met for member in members))
        assert len({member.run_id for member in members}) == 1 and members[0].run_id
        members[0].ready(0)
        members[1].ready(0)
        assert members[0].started is None
        members[2].ready(0)
        assert until(lambda: all(member.started for member in members))
        assert {member.started for member in members} == {(0, (0, 1, 2), 4711)}
        members[2].failed(0, [Failure(2, 1, 7, 2, "c", "boom")])
        members[1].failed(0, [Failure(1, -9, 8, 1, "b")])
        assert until(lambda: len(meeting._failures) == 2)
        meeting._judge_at = 0.0  # the time to settle is over
        assert until(lambda: all(member.verdicts for member in members))
        (found,) = {member.verdicts[0] for member in members}
        assert (found.node, found.restart) == (1, True) and found.text.endswith("; restart 1 of 1")
        for member in members:
            member.ready(1)
        assert until(lambda: all(member.started.attempt == 1 for member in members))
        # What comes late about the attempt before is not held against this one.
        members[0].failed(0, [Failure(0, 1, 7, 0, "a")])
        for member in members:
            member.done(1)
        assert until(lambda: all(member.over for member in members))
        assert said == [] and not any(member.end for member in members)


def test_who_does_not_come_is_named():
    with met(Terms(WORLD), nodes=(0, 2)) as (meeting, members, _said):
        assert until(lambda: len(meeting._here) == 2)
        meeting._patience = 0.1
        assert until(lambda: all(member.end for member in members))
        assert {member.end.text for member in members} == {"host b did not come within 0 s"}
        assert (members[0].end.node, members[0].end.status) == (0, 1)


def test_a_first_host_that_does_not_answer_is_named():
    port = free_port()
    member = Member(Terms(WORLD), 1, ("127.0.0.1", port), print)
    member.start(0.3)
    assert until(lambda: member.end)
    assert member.end.text == f"host a, at 127.0.0.1:{port}, did not answer within 0 s"
    member.close()


def test_a_host_lost_between_two_attempts_is_left_out_and_fewer_than_min_nodes_end_the_job():
    with met(Terms(WORLD, restarts=1, min_nodes=2)) as (_, members, said):
        assert until(lambda: all(member.met for member in members))
        for member in members:
            member.ready(0)
        assert until(lambda: all(member.started for member in members))
        members[0].failed(0, [Failure(0, 1, 7, 0, "a")])
        assert until(lambda: all(member.verdicts for member in members))
        members[0].ready(1)
        members[2].ready(1)
        members[1].leave("it lost the connection to the launcher", LOST)
        assert until(lambda: members[0].started.attempt == 1)
        assert members[0].started == (1, (0, 2), 4711)
        assert said == ["host b is lost: it lost the connection to the launcher; going on with 2 of 3 hosts"]
        members[2].leave("it is gone, too", LOST)
        assert until(lambda: members[0].end)
        assert (members[0].end.text, members[0].end.status) == ("host c is lost: it is gone, too", LOST)


def test_a_host_that_falls_silent_is_lost_though_its_connection_stands():
    with met(Terms(WORLD), nodes=(0, 1)) as (_, members, _said):
        where = members[1]._where
        with socket.create_connection(where) as silent:
            link = Link(silent)
            link.send(kind="hello", node=2, terms=Terms(WORLD).word())
            assert until(lambda: all(member.met for member in members))
            assert until(lambda: all(member.end for member in members))
            (found,) = {member.end for member in members}
            assert (found.text, found.node) == ("host c is lost: nothing was heard from it for 6 s", 0)


def test_a_host_that_hears_nothing_from_the_first_is_cut_off():
    with socket.create_server(("127.0.0.1", 0)) as mute:
        member = Member(Terms(WORLD), 1, mute.getsockname(), print)
        member.start(30)
        assert until(lambda: member.end)
        assert (member.end.status, member.end.node) == (LOST, 1)
        member.close()


def test_who_does_not_belong_is_refused_and_the_others_go_on():
    with met(Terms(WORLD), nodes=(0, 1)) as (meeting, members, _):
        port = members[1]._where[1]
        stranger = Member(Terms(WORLD, restarts=5), 2, ("127.0.0.1", port), print)
        twin = Member(Terms(WORLD), 1, ("127.0.0.1", port), print)
        with socket.create_connection(("127.0.0.1", port)) as scanner:
            scanner.sendall(b"GET / HTTP/1.0\r\n\r\n")
            assert until(lambda: len(meeting._here) == 2)
            for other, text in ((stranger, "another hostfile"), (twin, "--node_rank 1 is or was part of the job")):
                other.start(60)
                assert until(lambda other=other: other.end)
                assert text in other.end.text and other.end.status == 2
                other.close()
            assert scanner.recv(100) == b""
        late = Member(Terms(WORLD), 2, ("127.0.0.1", port), print)
        late.start(60)
        assert until(lambda: all(member.met for member in (*members, late)))
        late.close()


def kinds(heard: list[dict], after: str) -> list[str]:
    """The kinds of the messages that came after the first of the kind `after`."""
    return list(itertools.dropwhile(after.__ne__, (one["kind"] for one in heard)))[1:]


def test_a_failure_that_is_told_after_the_end_of_the_job_restarts_nothing(monkeypatch):
    monkeypatch.setattr(meetings, "SETTLE", 0.0)
    terms = Terms(WORLD, restarts=1)
    with met(terms, nodes=(0, 1)) as (_, members, _said):
        with socket.create_connection(members[1]._where) as connection:
            link, heard = Link(connection), []
            link.send(kind="hello", node=2, terms=terms.word())
            assert until(lambda: all(member.met for member in members))
            link.send(kind="end", text="stopped", status=143, quiet=False)
            link.send(kind="failed", attempt=0, failures=[asdict(Failure(2, -15, 7, 2, "c"))])
            # A sign of life comes each second; another verdict would come before it.
            assert until(lambda: heard.extend(link.receive()) or "alive" in kinds(heard, after="verdict"))
        assert [one["verdict"]["text"] for one in heard if one["kind"] == "verdict"] == ["stopped"]


def test_a_port_that_is_taken_is_an_error():
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(LaunchError, match=f"--master_port: cannot listen on {port} "):
            Meeting(Terms(WORLD), port, free_port, print, 1)


def test_the_cause_and_its_words():
    assert cause([Failure(0, 1, 1), Failure(1, -11, 2), Failure(2, -9, 3)]).rank == 1
    assert of([Failure(3, 2, 5, 1, "b", "ValueError: no", "/l/stderr.log")], None, 2).text == (
        "rank 3 on host b failed first, with exit code 2 (pid 5): ValueError: no; its output is in /l/stderr.log; "
        "no restart is left of 2"
    )


def test_the_interface_of_an_address():
    assert interface("127.0.0.1") is None and interface("::1") is None and interface("192.0.2.1") is None
    for name, addresses in psutil.net_if_addrs().items():
        for one in addresses:
            if one.family == socket.AF_INET and not one.address.startswith("127."):
                assert interface(one.address) == name and interface(f"::ffff:{one.address}") == name
