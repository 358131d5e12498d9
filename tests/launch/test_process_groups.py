"""The launcher hands on what its nodes write in whole lines, ends them all together, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from fake_hosts import OBEYS, TIMEOUT, Hosts, in_python, read_until
from marks import longer
from nodes import eventually

# It holds on to everything that can be held on to, and so does what it has started.
STUBBORN = 'trap "" INT TERM HUP QUIT; sleep 963 & echo up; sleep 964; sleep 965'
REFUSED = "echo 'ssh: connect to host n2 port 22: Connection refused' >&2; exit 255"


@pytest.fixture
def hosts(tmp_path: Path) -> Hosts:
    return Hosts(tmp_path, "n1", "n2", "n3")


@pytest.fixture
def two(tmp_path: Path) -> Hosts:
    return Hosts(tmp_path, "n1", "n2")


def test_hosts_never_mix_within_a_line(hosts: Hosts) -> None:
    for name in ("n1", "n2", "n3"):
        program = f"""
import os
for number in range(400):
    line = b"{name} %d " % number + b"{name}" * (number * 7 % 301) + b" %d\\xff\\n" % number
    for place in range(0, len(line), 251):
        os.write(1 + number % 2, line[place : place + 251])
os.write(1, b"last")
"""
        hosts.host(name, in_python(program))
    # stdout and stderr are one pipe, as they are one terminal for a user.
    process = hosts.start("run", "-H", "H", "--no_check", "t.py", before="exec 2>&1")
    out, err = process.communicate(timeout=TIMEOUT)
    assert (process.returncode, err) == (0, b"")
    lines = out.removesuffix(b"\n").split(b"\n")
    assert lines.count(b"last") == 3, "what nobody ended comes when its host has"
    numbers: dict[str, list[list[int]]] = {name: [[], []] for name in ("n1", "n2", "n3")}
    for line in lines:
        if line != b"last":
            name, number, fill, again = line.removesuffix(b"\xff").decode().split(" ")
            assert number == again and fill == name * (int(number) * 7 % 301), line
            numbers[name][int(number) % 2].append(int(number))
    assert all(found == [list(range(0, 400, 2)), list(range(1, 400, 2))] for found in numbers.values())


def test_a_slow_reader_is_waited_for_and_the_nodes_still_hear_from_us(two: Hosts) -> None:
    # Much more than all pipes and queues on the way hold; the beats come all the same.
    two.host("n1", "head -c 50000000 /dev/zero | tr '\\0' '\\n' & { read secret; head -n 3; } >beats; wait")
    two.host("n2", "")
    process = two.start("run", "-H", "H", "--no_check", "t.py")
    assert eventually(
        lambda: (two.folder / "beats").exists() and (two.folder / "beats").read_text().count("alive") == 3
    )
    status, out, _ = two.finish(process)
    assert (status, len(out)) == (0, 50_000_000)


def test_a_reader_that_does_not_read_does_not_keep_a_job_that_is_stopped(two: Hosts) -> None:
    two.host("n1", "echo up; head -c 50000000 /dev/zero | tr '\\0' '\\n'")
    two.host("n2", OBEYS)
    process = two.start("run", "-H", "H", "--no_check", "t.py", job_runner__NodeGroup__patience=0.5)
    read_until(process.stdout, b"up\n")
    process.send_signal(signal.SIGTERM)
    assert process.wait(TIMEOUT) == 143
    assert two.nothing_left()
    process.communicate()


def told(out: str) -> dict[str, dict]:
    """What each node that obeys was told, by its name."""
    return {line[:2]: json.loads(line[3:]) for line in out.splitlines() if line.endswith("}")}


@pytest.mark.parametrize(("name", "number"), [("SIGINT", 2), ("SIGTERM", 15), *longer(("SIGHUP", 15), ("SIGQUIT", 15))])
def test_hosts_are_told_of_a_signal(two: Hosts, name: str, number: int) -> None:
    for host in ("n1", "n2"):
        two.host(host, OBEYS)
    process = two.start("run", "-H", "H", "--no_check", "t.py")
    read_until(process.stdout, b"up n", 2)
    sent = getattr(signal, name)
    process.send_signal(sent)
    status, out, err = two.finish(process)
    assert status == 128 + sent
    assert err == f"zero run: stopped by {name}\n"
    assert [(each["kind"], each["signal"]) for each in told(out).values()] == [("end", number)] * 2
    assert two.nothing_left()


def test_a_second_signal_shortens_the_wait(two: Hosts) -> None:
    two.host("n1", STUBBORN)
    two.host("n2", STUBBORN)
    process = two.start("run", "-H", "H", "--no_check", "t.py", job_runner__NodeGroup__patience=900)
    read_until(process.stdout, b"up\n")
    process.send_signal(signal.SIGINT)
    read_until(process.stderr, b"stopped by SIGINT")
    process.send_signal(signal.SIGINT)
    assert two.finish(process)[0] == 130
    assert two.nothing_left()


def test_an_ignored_signal_stays_so_and_nobody_is_suspended(two: Hosts) -> None:
    two.host("n1", "echo up; until [ -e go ]; do sleep 0.05; done")
    two.host("n2", "")
    process = two.start("run", "-H", "H", "--no_check", "t.py", before='trap "" HUP')
    read_until(process.stdout, b"up\n")
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGTSTP)
    read_until(process.stderr, b"not suspended")
    (two.folder / "go").touch()
    assert two.finish(process)[0] == 0


@pytest.mark.parametrize(
    ("does", "status", "text"),
    [
        ("echo 'zero run: error: no' >&2; exit 2", 2, "its launcher ended with status 2"),
        (REFUSED, 255, "ssh: connect to host n2 port 22: Connection refused"),
    ],
)
def test_the_first_host_is_told_of_another_that_fails(hosts: Hosts, does: str, status: int, text: str) -> None:
    hosts.host("n1", OBEYS)
    hosts.host("n2", does)
    hosts.host("n3", OBEYS)
    ended, out, err = hosts.run()
    assert told(out)["n1"] == {"kind": "lost", "node": 1, "text": text, "status": status}
    assert told(out)["n3"]["kind"] == "end"
    assert ended == status, err
    assert hosts.nothing_left()


def test_where_the_first_host_is_lost_the_others_end_with_it(hosts: Hosts) -> None:
    hosts.host("n1", REFUSED)
    hosts.host("n2", OBEYS)
    hosts.host("n3", OBEYS)
    status, out, err = hosts.run("--min_nodes", "1")
    assert (status, [each["kind"] for each in told(out).values()]) == (255, ["end"] * 2)
    assert err.endswith("zero run: host n1 is lost: ssh: connect to host n2 port 22: Connection refused\n")
    assert hosts.nothing_left()


def test_nodes_end_by_themselves_when_they_can(two: Hosts) -> None:
    two.host("n1", "echo $$ >pid; exit 9")
    # Once the launcher has seen the end of the first.
    wait = "until [ -s pid ] && ! [ -e /proc/$(cat pid) ]; do sleep 0.05; done"
    two.host("n2", f"{wait}; echo through; exit 3")
    assert two.run() == (9, "through\n", "")


def test_a_script_may_end_with_255(two: Hosts) -> None:
    two.host("n1", "echo 'zero run: rank 0 failed first, with exit code 255 (pid 1)' >&2; exit 255")
    two.host("n2", "echo '[n2 rank 1]: bye' >&2; exit 255")
    status, _, err = two.run()
    assert status == 255
    assert "lost" not in err


def test_nobody_reads_any_more(two: Hosts) -> None:
    two.host("n1", OBEYS)
    two.host("n2", "while echo line; do sleep 0.01; done")
    process = two.start("run", "-H", "H", "--no_check", "t.py", job_runner__NodeGroup__patience=0.5)
    read_until(process.stdout, b"line\n")
    process.stdout.close()
    err = process.stderr.read().decode()
    assert process.wait(TIMEOUT) == 141
    assert err == "zero run: stopped: nobody reads its stdout any more\n"
    assert two.nothing_left()


def test_what_an_ssh_leaves_running_is_not_waited_for(two: Hosts) -> None:
    # As the shared connection of ControlPersist, which keeps stderr open.
    two.host("n1", "sleep 966 & echo said")
    two.host("n2", "")
    status, out, _ = two.run(before="exec 3>&1 4>&2; ")
    assert (status, out) == (0, "said\n")
    for pid in two.left():
        os.kill(pid, signal.SIGKILL)


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_program_for_all_hosts_is_interrupted_then_killed(two: Hosts, number: int) -> None:
    # The second is a process in a session of its own, as the ranks are.
    two.program(
        "srun",
        "#!/bin/sh\ntrap '' TERM\nsetsid sleep 967 &\necho up\n"
        """while read -r line; do case $line in *'"end"'*) echo "handed on: $line";; esac; done; sleep 968""",
    )
    process = two.start("run", "-H", "H", "--launcher", "slurm", "t.py", job_runner__NodeGroup__patience=900)
    read_until(process.stdout, b"up\n")
    process.send_signal(number)
    handed = read_until(process.stdout, b"}\n")
    assert handed.startswith(b"handed on: ") and b'"signal": %d}' % number in handed
    process.send_signal(number)  # which shortens the wait
    status, out, err = two.finish(process)
    assert (status, out) == (128 + number, "")
    assert "stopped by" in err
    assert two.nothing_left()


@pytest.mark.parametrize(
    ("launcher", "program", "advice"),
    [
        ("ssh", "ssh", "install OpenSSH's client, or start zero run with --no_ssh and --node_rank on each host"),
        ("slurm", "srun", "run this on a machine of a Slurm cluster, or leave out --launcher slurm"),
        ("openmpi", "mpirun", "install Open MPI, or leave out --launcher openmpi"),
        ("mpich", "mpirun", "install MPICH, or leave out --launcher mpich"),
    ],
)
def test_a_program_that_is_not_there(two: Hosts, launcher: str, program: str, advice: str) -> None:
    status, _, err = two.zero("run", "-H", "H", "--launcher", launcher, "t.py", path="/nowhere")
    assert status == 2
    assert err == f"zero run: error: --launcher {launcher}: there is no program '{program}'; {advice}\n"


def test_many_hosts_at_the_same_time(tmp_path: Path) -> None:
    # Each waits for all others to be there.
    names = [f"n{number}" for number in range(50)]
    hosts = Hosts(tmp_path, *names)
    for name in names:
        hosts.host(name, f"touch up-{name}; until [ -e up-n49 -a -e up-n0 ]; do sleep 0.1; done; echo {name}")
    # The usual limit of open files is far below what so many pipes take.
    status, out, _ = hosts.run(before="ulimit -S -n 64")
    assert (status, sorted(out.split())) == (0, sorted(names))


def test_a_node_that_is_handed_no_secret_says_so(two: Hosts) -> None:
    node = ["--no_ssh", "--node_rank", "0", "--stdin", "-H", "H", "t.py"]
    status, _, err = two.zero("run", *node, before="export CUDA_VISIBLE_DEVICES=")
    assert status == 2 and "did not hand over the secret of the job" in err


# What Slurm and MPI start has the secret in an environment that they hand on, and only its name in a line.
@pytest.mark.parametrize(("launcher", "program"), [("slurm", "srun"), ("openmpi", "mpirun"), ("mpich", "mpirun")])
def test_slurm_and_mpi_are_given_the_secret_in_their_environment(two: Hosts, launcher: str, program: str) -> None:
    text = 'case "$*" in *"$ZERO_SECRET"*) echo seen;; esac; echo ${#ZERO_SECRET}'
    two.program(program, f"#!/bin/sh\n{text}\n")
    assert two.run("--launcher", launcher) == (0, "64\n", "")
