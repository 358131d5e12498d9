"""`zero ssh` runs a command on all hosts at once, says whose each line is and who failed, and ends it everywhere."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from fake_hosts import TIMEOUT, Hosts


@pytest.fixture
def hosts(tmp_path: Path) -> Hosts:
    return Hosts(tmp_path, "n1", "n2", "n3")


def test_several_arguments_are_what_they_are(hosts: Hosts) -> None:
    words = ["it's", "a  b", "$HOME", '"', "\\", "", "--", "-f", "é", "`id`", "*", "!", "%n"]
    status, out, _ = hosts.zero("ssh", "-H", "H", "-i", "n2:0", "--", "printf", "<%s>", *words)
    assert (status, out) == (0, "n2: " + "".join(f"<{word}>" for word in words) + "\n")


def test_the_first_failure_in_the_order_of_the_file_is_the_status(hosts: Hosts) -> None:
    hosts.host("n1", "sleep 0.3; exit 0")
    hosts.host("n2", "sleep 0.3; exit 7")
    hosts.host("n3", "echo 'ssh: Could not resolve hostname n3' >&2; exit 255")
    status, out, err = hosts.zero("ssh", "-f", "H", "true")
    assert (status, out) == (7, "")
    assert err.splitlines() == [
        "n3: ssh: Could not resolve hostname n3",
        "zero ssh: failed on 2 of 3 hosts: n2 (exit status 7), n3 (exit status 255, which is ssh's own when it has no "
        "connection)",
    ]


def test_it_ends_with_its_reader(hosts: Hosts) -> None:
    process = hosts.start("ssh", "-f", "H", "while echo line; do :; done")
    assert os.read(process.stdout.fileno(), 3).startswith(b"n")
    process.stdout.close()
    err = process.stderr.read()
    assert (process.wait(TIMEOUT), err) == (141, b"")
    assert hosts.nothing_left()


@pytest.mark.parametrize(("words", "text"), [
    (["-f", "G", "true"], "--hostfile: there is no file 'G'"),
    (["-f", "H", "-i", "n9", "true"], "--include: there is no host 'n9'; there is n1, n2, n3"),
    (["true"], "there is no hostfile /job/hostfile; give one with -f"),
])  # fmt: skip
def test_what_cannot_be_done_is_said(hosts: Hosts, words: list[str], text: str) -> None:
    status, _, err = hosts.zero("ssh", *words)
    assert status == 2
    assert err.startswith(f"zero ssh: error: {text}")
