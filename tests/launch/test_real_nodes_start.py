"""What keeps a job from starting over real hosts is said at once, of all hosts, in ssh's own words; and nothing runs.

Also other ways in: MPI's own launchers, and each host started by hand.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys

import pytest
from fake_hosts import read_until
from real_jobs import Job, nothing_left, only_ranks_have_the_secret
from real_nodes import PATH, SECONDS

TAKE = "import socket, time; s = socket.socket(); s.bind(('', 29511)); print('up', flush=True); time.sleep(600)"


def test_hosts_that_cannot_be_reached_are_all_named_and_nothing_starts(hosts, tmp_path):
    hosts.cut("n2")
    hosts.refuse("n3")
    try:
        end = Job(hosts, tmp_path, slots=(1, 1, 1)).start().ended()
    finally:
        hosts.serve("n3")
    assert end.status == 2, end
    assert end.says("n2", "timed out") or end.says("n2", "No route to host"), end
    assert end.says("n3", "Connection refused"), end
    assert not list(tmp_path.glob("started*"))


def test_a_wrong_key_and_an_unknown_host_are_named_in_the_words_of_ssh(hosts, tmp_path):
    file, usual = tmp_path / "ssh_config", (hosts.folder / "ssh_config").read_text()
    # The first value counts; but identity files add up.
    others = usual.replace("Host n1 n2 n3", "Host n1 n3")
    wrong = usual.replace("Host n1 n2 n3", "Host n2").replace(f"{hosts.folder}/key", f"{hosts.folder}/wrong")
    file.write_text("Host n3\n    UserKnownHostsFile /dev/null\n" + others + wrong)
    end = Job(hosts, tmp_path, f"--launcher_args=-F {file}", slots=(1, 1, 1)).start().ended()
    assert end.status == 2, end
    assert end.says("n2", "Permission denied"), end
    assert end.says("n3", "Host key verification failed"), end
    assert not end.says("n1", "Permission denied") and not list(tmp_path.glob("started*"))


@pytest.mark.long
def test_a_port_that_is_taken_on_the_first_host_is_named(hosts, tmp_path):
    taken = hosts.start(sys.executable, "-c", TAKE, host="n1")
    try:
        read_until(taken.stdout, b"up\n")
        job = Job(hosts, tmp_path, "--master_port", "29511", "--no_check").start()
        job.process.wait(SECONDS)
    finally:
        hosts.stop(taken)
    end = job.ended()
    assert end.status == 2, end
    assert end.says("cannot listen on", "29511"), end
    assert not list(tmp_path.glob("started*"))


@pytest.mark.long
def test_hosts_may_be_started_by_hand(hosts, tmp_path):
    job = Job(hosts, tmp_path, slots=(1, 2))
    parts = [job.part(number) for number in range(2)]
    assert job.started(3)[2] == "n2 1 2 3"
    job.kill(1)
    said = [part.communicate(timeout=SECONDS)[1] for part in parts]
    assert [part.returncode for part in parts] == [128 + signal.SIGKILL] * 2, said
    nothing_left(hosts)


@pytest.mark.long
@pytest.mark.parametrize(("launcher", "options"), [("openmpi", "--allow-run-as-root"), ("mpich", "")])
def test_launchers_of_mpi_start_the_hosts_and_ctrl_c_ends_them(hosts, tmp_path, launcher, options):
    program = shutil.which(f"mpirun.{launcher}")
    if program is None:
        pytest.skip(f"there is no mpirun.{launcher}, as Debian calls it")
    # A link would not do: MPICH's looks for its parts beside it.
    file = tmp_path / "mpirun"
    file.write_text(f'#!/bin/sh\nexec {program} "$@"\n')
    file.chmod(0o755)
    words = ("--launcher", launcher, f"--launcher_args={options}")
    job = Job(hosts, tmp_path, *words, slots=(1, 2)).start(PATH=f"{tmp_path}{os.pathsep}{PATH}")
    assert job.started(3) == {0: "n1 0 1 3", 1: "n2 0 2 3", 2: "n2 1 2 3"}
    only_ranks_have_the_secret(hosts, 3)
    job.signal(signal.SIGINT)
    end = job.ended()
    assert end.status == 130, end
