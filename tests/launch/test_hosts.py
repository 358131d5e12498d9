"""--include, --exclude and the counts leave exactly the slots that they say, and whatever is wrong is said at once."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

import pytest
from told import cases

from zero.launch.hosts import hostfile, nodelist
from zero.launch.hosts.devices import numbered
from zero.launch.hosts.host_world import Host
from zero.launch.hosts.selection import SlotChoice, described, select
from zero.launch.launch_messages import LaunchError

POOL = hostfile.parse("a slots=4 # x\n\n# a line\n  b \t slots=2 max_slots=9\nc slots=1\r\n", "H")


def said(function, *args) -> str:
    with pytest.raises(LaunchError) as caught:
        function(*args)
    return str(caught.value)


LEFT = """\
-i a@b:0
    a:0,1,2,3 b:0
-i b:1,0@a:2,0-0
    a:0,2 b:0,1
-i a:1-2@c@a:1,3
    a:1,2,3 c:0
-i " b : 1 @ a:00"
    a:0 b:1
-e b
    a:0,1,2,3 c:0
-e c:0@a:1-3
    a:0 b:0,1
-e a:0-2,3@b:0
    b:1 c:0
--num_nodes 2
    a:0,1,2,3 b:0,1
--num_nodes 2 --num_gpus 1
    a:0 b:0
--num_gpus 1
    a:0 b:0 c:0
"""


def choice(given: str) -> SlotChoice:
    made = argparse.ArgumentParser()
    for flag in ("-i", "-e"):
        made.add_argument(flag, default="")
    for flag in ("--num_nodes", "--num_gpus"):
        made.add_argument(flag, type=int)
    return SlotChoice(*vars(made.parse_args(shlex.split(given))).values())


@pytest.mark.parametrize(("given", "left"), cases(LEFT))
def test_choices_and_what_they_leave(given: str, left: str) -> None:
    assert described(select(POOL, choice(given))).replace(", ", " ") == left


CHOICES = """\
-i a -e b
    --include and --exclude: give one of them
-i a --num_nodes 1 --num_gpus 2
    --num_nodes and --num_gpus: cannot be given with --include, which says the same by names
-e a --num_gpus 1
    --num_gpus: cannot be given with --exclude, which says the same by names
-i a:7
    --include: host 'a' has no slot '7'; it has 0, 1, 2, 3
-i b:0-999999999
    --include: host 'b' has no slot '999999999'; it has 0, 1
-i a:x
    --include: host 'a' has no slot 'x'; it has 0, 1, 2, 3
-i a:3-1
    --include: got the slots '3-1' of host 'a', which go down; wanted first-last
-i x@a:9@y:1@x
    --include: there is no host 'x'; there is a, b, c
      --include: host 'a' has no slot '9'; it has 0, 1, 2, 3
      --include: there is no host 'y'; there is a, b, c
-i a:
    --include: got 'a:' in 'a:'; wanted host, host:slot,slot or host:first-last, with @ between hosts, such as \
worker-0@worker-1:0,2
-i :0
    --include: got ':0' in ':0'; wanted host, host:slot,slot or host:first-last, with @ between hosts, such as \
worker-0@worker-1:0,2
-e a@@b
    --exclude: got '' in 'a@@b'; wanted host, host:slot,slot or host:first-last, with @ between hosts, such as \
worker-0@worker-1:0,2
-e a@b@c:0
    --exclude: 'a@b@c:0' leaves nothing of a:0,1,2,3, b:0,1, c:0
--num_nodes 4
    --num_nodes: got 4, but there are 3 hosts: a, b, c
--num_gpus 2
    --num_gpus: got 2, but c has 1
"""


@pytest.mark.parametrize(("given", "told"), cases(CHOICES))
def test_wrong_choices_and_what_is_said(given: str, told: str) -> None:
    assert said(select, POOL, choice(given)) == told


def test_a_name_may_have_colons() -> None:
    pool = hostfile.parse("fe80::1 slots=3\nfe80::1:2 slots=1", "H")
    assert select(pool, SlotChoice("fe80::1")) == (pool[0],)
    assert select(pool, SlotChoice("fe80::1:0-1")) == (Host("fe80::1", ("0", "1")),)
    # What is the whole name of a host is that host.
    assert select(pool, SlotChoice("fe80::1:2")) == (pool[1],)
    assert select(pool, SlotChoice("fe80::1:02")) == (Host("fe80::1", ("2",)),)


def test_slots_may_be_names_of_gpus() -> None:
    pool = [Host("localhost", ("GPU-8f2a-11", "MIG-0-3", "7"))]
    assert select(pool, SlotChoice("localhost:7,GPU-8f2a-11")) == (Host("localhost", ("GPU-8f2a-11", "7")),)
    assert select(pool, SlotChoice(exclude="localhost:MIG-0-3")) == (Host("localhost", ("GPU-8f2a-11", "7")),)
    assert said(select, pool, SlotChoice("localhost:0")).endswith("has no slot '0'; it has GPU-8f2a-11, MIG-0-3, 7")


NAME_RULE = "a host's name has letters, digits, '.', '_', '-' and ':' only; a user's name goes to ~/.ssh/config"


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        ("", ["H: no hosts; wanted a line NAME slots=N for each"]),
        ("\n# a slots=1\n", ["H: no hosts; wanted a line NAME slots=N for each"]),
        ("a", ["H:1: 'a': wanted NAME slots=N"]),
        ("a slots=", ["H:1: 'a slots=': wanted NAME slots=N"]),
        ("a slots = 4", ["H:1: 'a slots = 4': wanted NAME slots=N"]),
        ("a slots=4x", ["H:1: 'a slots=4x': wanted NAME slots=N"]),
        ("a slots=-1", ["H:1: 'a slots=-1': wanted NAME slots=N"]),
        ("a slots=\u0664", ["H:1: 'a slots=\u0664': wanted NAME slots=N"]),
        ("a slots=1 b slots=2", ["H:1: 'a slots=1 b slots=2': 'b' means nothing here; wanted NAME slots=N"]),
        ("a slots=00", ["H:1: 'a slots=00': slots=0: leave the host out instead"]),
        ("a slots=1025", ["H:1: 'a slots=1025': more than 1024 slots"]),
        (f"a slots={'9' * 5000}", [f"H:1: 'a slots={'9' * 5000}': more than 1024 slots"]),
        ("me@a slots=1", [f"H:1: 'me@a slots=1': {NAME_RULE}"]),
        ("-oX slots=1", [f"H:1: '-oX slots=1': {NAME_RULE}"]),
        ("a,b slots=1", [f"H:1: 'a,b slots=1': {NAME_RULE}"]),
        ("a slots=1\n\na slots=2", ["H:3: host 'a' is there already, in line 1"]),
        (
            "a slots=0\n#\nb\nc slots=2\nc slots=2",
            [
                "H:1: 'a slots=0': slots=0: leave the host out instead",
                "H:3: 'b': wanted NAME slots=N",
                "H:5: host 'c' is there already, in line 4",
            ],
        ),
    ],
)
def test_bad_hostfiles_and_what_is_said(text: str, problems: list[str]) -> None:
    assert said(hostfile.parse, text, "H") == "\n  ".join(problems)


def test_hostfiles_that_cannot_be_read(tmp_path: Path) -> None:
    missing = tmp_path / "H"
    leave_out = "leave it out to run on this machine only"
    assert said(hostfile.read, str(missing)) == f"--hostfile: there is no file {str(missing)!r}; {leave_out}"
    assert said(hostfile.read, str(tmp_path)) == f"{tmp_path}: cannot be read: Is a directory"
    missing.write_bytes(b"a slots=1\n\xff")
    assert said(hostfile.read, str(missing)) == f"{missing}: is not text (byte 10 is not UTF-8)"
    missing.write_bytes(b"\xef\xbb\xbfa slots=1\r\nb slots=2")
    assert hostfile.read(str(missing)) == (Host("a", ("0",)), Host("b", ("0", "1")))


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", "n1"),
        ("n[1-3,7],m5", "n1 n2 n3 n7 m5"),
        ("n[08-11]", "n08 n09 n10 n11"),
        ("n[001,3]-ib", "n001-ib n3-ib"),
        ("r[1-2]n[5,6]", "r1n5 r1n6 r2n5 r2n6"),
        ("a-b-2,c.d", "a-b-2 c.d"),
    ],
)
def test_lists_of_slurm(text: str, names: str) -> None:
    assert nodelist.expand(text) == names.split()


@pytest.mark.parametrize(
    "text", ["", " ", "n[1-3", "n1-3]", "n[]", "n[a]", "n[1-]", "n[1-99999999]", "n1,,n2", "n[[1]]", "n][1"]
)
def test_bad_lists_of_slurm(text: str) -> None:
    assert said(nodelist.expand, text) == f"SLURM_JOB_NODELIST: got {text!r}, wanted names such as n[1-3,7],m5"


@pytest.mark.parametrize(
    ("environment", "num_gpus", "slots"),
    [
        ({"SLURM_GPUS_PER_NODE": "4", "SLURM_TASKS_PER_NODE": "1(x3)"}, None, [4, 4, 4]),
        ({"SLURM_GPUS_PER_NODE": "a100:4"}, None, [4, 4, 4]),
        ({"SLURM_GPUS_PER_NODE": "a100:2,h100:1"}, None, [3, 3, 3]),
        ({"SLURM_GPUS_ON_NODE": "2"}, None, [2, 2, 2]),
        ({"SLURM_TASKS_PER_NODE": "2(x2),1"}, None, [2, 2, 1]),
        ({"SLURM_TASKS_PER_NODE": "2(x2),1"}, 8, [8, 8, 8]),
    ],
)
def test_hosts_of_an_allocation(environment: dict[str, str], num_gpus: int | None, slots: list[int]) -> None:
    found = nodelist.allocation({"SLURM_JOB_NODELIST": "n[1-3]", **environment}, num_gpus)
    assert found == tuple(Host(f"n{number}", numbered(count)) for number, count in enumerate(slots, 1))


@pytest.mark.parametrize(
    ("environment", "text"),
    [
        (
            {},
            "--launcher slurm: none of SLURM_GPUS_PER_NODE, SLURM_GPUS_ON_NODE, SLURM_NTASKS_PER_NODE, "
            "SLURM_TASKS_PER_NODE is set; say with --num_gpus how many on each host",
        ),
        (
            {"SLURM_TASKS_PER_NODE": "2(x9)"},
            "SLURM_TASKS_PER_NODE: got '2(x9)', which is no number of slots for 3 hosts; give --num_gpus",
        ),
        (
            {"SLURM_GPUS_PER_NODE": "many"},
            "SLURM_GPUS_PER_NODE: got 'many', which is no number of slots for 3 hosts; give --num_gpus",
        ),
    ],
)
def test_an_allocation_that_does_not_say_its_slots(environment: dict[str, str], text: str) -> None:
    assert said(nodelist.allocation, {"SLURM_JOB_NODELIST": "n[1-3]", **environment}) == text
