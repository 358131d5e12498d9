"""Over real hosts with a real sshd each, a job does what it does on one machine, and ends everywhere when it ends.

Whatever ends it (a rank that is killed, a host that is cut off, a signal, a launcher that is gone): soon nothing of it
runs on any host, the exit status is that of the cause, and the cause is said once.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from real_jobs import End, Job, command, nothing_left, only_ranks_have_the_secret
from real_nodes import ROOT, until

# Hosts that are held by a program of their own.
HOLD = "import sys, time; from pathlib import Path; from real_nodes import Nodes\n"
HOLD += "with Nodes(Path(sys.argv[1])) as made:\n    made.start('sleep', '99', host='n2')\n    time.sleep(1)\n"
HOLD += "    print(*(process.pid for process in made.processes()), flush=True)\n    time.sleep(99)"


TRAIN = ROOT / "examples" / "gpt" / "train.py"


def losses(said: str) -> list[str]:
    """Of the example's lines, which have all digits."""
    return re.findall(r"step \d+ loss \S+", said)


@pytest.mark.long
def test_the_example_trains_over_hosts_with_the_losses_of_one_host(hosts, tmp_path):
    text = tmp_path / "text"
    text.mkdir()
    for number in range(24):  # the names decide which of them are for the validation
        (text / f"{number}.py").write_bytes(TRAIN.read_bytes())
    size = ["--width", "32", "--layers", "2", "--heads", "2", "--context", "32", "--steps", "5"]
    words = ["--config", str(TRAIN.with_name("zero3.json")), "--data", str(text), *size, "--out"]
    job = Job(hosts, tmp_path / "job", "--include", "n1:0,1@n3:0", slots=(2, 2, 2))
    job.start(*words, str(tmp_path / "over"), script=TRAIN)
    # At the same time, on a host of its own.
    alone = hosts.run(*command("run"), "--num_gpus", "3", str(TRAIN), *words, str(tmp_path / "alone"), seconds=400)
    end = job.ended(400)
    assert end.status == 0, end
    assert alone.returncode == 0, alone
    assert len(losses(alone.stdout)) == 5 and losses(end.out) == losses(alone.stdout)
    # Past what is printed, every step and its learning rate; the last column is seconds.
    rows = [(tmp_path / run / "loss.csv").read_text().splitlines() for run in ("over", "alone")]
    assert [row.rsplit(",", 1)[0] for row in rows[0]] == [row.rsplit(",", 1)[0] for row in rows[1]]


def test_ranks_say_their_places_on_the_launchers_stdout_and_one_that_fails_ends_all_with_its_code(hosts, tmp_path):
    job = Job(hosts, tmp_path, "--log_dir", str(tmp_path / "logs"), slots=(2, 1, 1))
    job.start(MLFLOW_TRACKING_PASSWORD=(password := "correct horse"))
    places = job.started(4)
    assert places == {0: "n1 0 2 4", 1: "n1 1 2 4", 2: "n2 0 1 4", 3: "n3 0 1 4"}
    secret = only_ranks_have_the_secret(hosts, 4)
    assert {hosts.rank(rank).environment.get("MLFLOW_TRACKING_PASSWORD") for rank in range(4)} == {password}
    assert not [process for process in hosts.processes() if password in process.words]
    # Nobody can join the rendezvous any more; the store of the ranks will listen where the other hosts have come to.
    listening = hosts.run("ss", "-ltnH", host="n1").stdout.splitlines()
    assert [line.split()[3] for line in listening] == ["10.77.0.1:22"]
    addresses = [hosts.rank(rank).environment["MASTER_ADDR"] for rank in range(4)]
    assert addresses == ["10.77.0.1", "10.77.0.1", "n1", "n1"]
    (tmp_path / "fail-2").touch()
    end = job.ended()
    said = sorted(line.rpartition("]: ")[2] for line in end.out.splitlines())
    assert said == [f"rank {rank} is on {place}" for rank, place in places.items()]
    assert end.status == 7, end
    assert end.says("zero run:", "rank 2", "n2", "exit code 7"), end
    assert end.says("zero run:", "the disk is on fire"), end
    written = [path.read_text() for path in (tmp_path / "logs").rglob("*") if path.is_file()]
    assert len(written) >= 8 and not any(secret in text for text in (end.out, end.err, *written))


@pytest.mark.long
def test_a_killed_rank_restarts_all_hosts_and_the_second_kill_ends_them(hosts, tmp_path):
    job = Job(hosts, tmp_path, "--max_restarts", "1").start()
    job.started(2)
    job.kill(1)
    job.started(2, attempt=1)
    job.kill(0)
    end = job.ended()
    assert end.status == 128 + signal.SIGKILL, end
    assert end.says("rank 1", "n2", "killed by SIGKILL", "restart 1 of 1"), end
    assert end.says("rank 0", "n1", "killed by SIGKILL"), end


def lost(end: End, name: str) -> None:
    """The job has ended because that host was lost, and it was said once."""
    assert end.status not in (0, 2), end
    # By its ssh here or by the first host there, whoever notices first.
    assert len(end.lines("zero run:", f"host {name}", "lost")) == 1, end


@pytest.mark.long
def test_the_first_host_cut_off_ends_the_job_on_both_sides(hosts, tmp_path):
    job = Job(hosts, tmp_path / "two").start()
    only = Job(hosts, tmp_path / "one", "--master_port", "29501", slots=(1,)).start()
    job.started(2)
    only.started(1)
    hosts.cut("n1")
    lost(job.ended(), "n1")
    lost(only.ended(), "n1")


@pytest.mark.long
def test_another_host_cut_off_ends_the_job_on_both_sides_but_with_min_nodes_it_goes_on_without(hosts, tmp_path):
    job = Job(hosts, tmp_path / "ends").start()
    options = ("--min_nodes", "2", "--max_restarts", "3", "--master_port", "29501")
    other = Job(hosts, tmp_path / "goes-on", *options, slots=(1, 1, 2)).start()
    job.started(2)
    other.started(4)
    hosts.cut("n2")
    # Renumbered over those that are left.
    assert other.started(3, attempt=1) == {0: "n1 0 1 3", 1: "n3 0 2 3", 2: "n3 1 2 3"}
    until(lambda: not hosts.processes("n2"))
    (other.folder / "finish").touch()
    lost(job.ended(), "n2")
    end = other.ended()
    assert end.status == 0, end
    assert "n2" in end.err


@pytest.mark.long
def test_a_host_that_was_cut_off_is_reached_again_and_joins_at_the_next_restart(hosts, tmp_path):
    job = Job(hosts, tmp_path, "--nnodes", "1:2", "--max_restarts", "1", slots=(1, 2)).start()
    job.started(3)
    hosts.cut("n2")
    assert job.started(1, attempt=1) == {0: "n1 0 1 1"}
    hosts.mend("n2")
    meets = ("ss", "-tnH", "state", "established", "sport = :29500")
    until(lambda: "10.77.0.2" in hosts.run(*meets, host="n1").stdout)  # its launcher, which waits
    job.kill(0)
    assert job.started(3, attempt=2) == {0: "n1 0 1 3", 1: "n2 0 2 3", 2: "n2 1 2 3"}
    (job.folder / "finish").touch()
    end = job.ended()
    assert end.status == 0, end
    assert end.says("host n2 is lost", "going on with 1 of 2 hosts") and end.says("host n2 has come", "next restart")
    assert end.says("rank 0 on host n1 was killed", "restart 1 of 1"), end


@pytest.mark.long
def test_a_signal_for_the_launcher_ends_every_process_on_every_host_and_so_does_its_death(hosts, tmp_path):
    # The ranks of the first two, and a child of each that has left their session, do not want to.
    wanted = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -signal.SIGKILL}
    jobs = {}
    for number in wanted:
        jobs[number] = Job(hosts, tmp_path / number.name, "--master_port", str(29500 + number))
        jobs[number].start(*([] if number == signal.SIGKILL else ["stubborn"]))
    for job in jobs.values():
        job.started(2)
    assert len(hosts.processes("n2")) >= 8  # the launchers there, the ranks and their two children
    for number, job in jobs.items():
        job.signal(number)
    ends = {number: job.ended() for number, job in jobs.items()}
    assert {number: end.status for number, end in ends.items()} == wanted, ends


# The hosts themselves: what is left there is seen, and they are gone at the end.


def test_what_has_left_its_session_is_found_and_counts_as_left_behind(hosts):
    assert hosts.run("ssh", "n2", "(setsid env -i sleep 98 >/dev/null 2>&1 &)").returncode == 0
    until(lambda: [(process.host, process.words) for process in hosts.processes()] == [("n2", "sleep 98")])
    with pytest.raises(AssertionError, match=r"left behind .*'n2: sleep 98'"):
        nothing_left(hosts, 0.1)
    hosts.run("ssh", "n2", "kill $(pidof sleep)")
    until(lambda: not hosts.processes("n2"))


def test_nothing_is_left_where_the_tests_are_killed(real_nodes, tmp_path):
    command, here = [sys.executable, "-c", HOLD, str(tmp_path)], Path(__file__).parents[1]
    # Where the program is a text, Python looks for modules in the current folder.
    holder = subprocess.Popen(command, cwd=here, stdout=subprocess.PIPE, text=True)
    pids = [int(word) for word in holder.stdout.readline().split()]
    assert pids
    holder.send_signal(signal.SIGKILL)
    holder.communicate()
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
