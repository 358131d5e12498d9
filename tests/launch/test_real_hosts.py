"""The hosts that tests of the launcher run on are what they stand for: apart, silent when cut off, gone at the end."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from real_jobs import nothing_left
from real_nodes import NAMES, until

HOLD = "import sys, time; from pathlib import Path; from real_nodes import Nodes\n"
HOLD += "with Nodes(Path(sys.argv[1])) as made:\n    made.start('sleep', '99', host='n2')\n    time.sleep(1)\n"
HOLD += "    print(*(process.pid for process in made.processes()), flush=True)\n    time.sleep(99)"


def test_hosts_have_names_processes_and_shared_memory_of_their_own(hosts):
    for name in NAMES:
        done = hosts.run("ssh", name, "hostname; ls /dev/shm; ls -d /proc/[0-9]* | wc -l; touch /dev/shm/mine")
        host, count = done.stdout.split()
        assert host == name and int(count) < 12, done


def test_what_has_left_its_session_is_found_and_counts_as_left_behind(hosts):
    assert hosts.run("ssh", "n2", "(setsid env -i sleep 98 >/dev/null 2>&1 &)").returncode == 0
    until(lambda: [(process.host, process.words) for process in hosts.processes()] == [("n2", "sleep 98")])
    with pytest.raises(AssertionError, match=r"left behind .*'n2: sleep 98'"):
        nothing_left(hosts, 0.1)
    hosts.run("ssh", "n2", "kill $(pidof sleep)")
    until(lambda: not hosts.processes("n2"))


def test_a_cut_is_silent_on_both_sides_until_it_is_mended(hosts):
    talk = hosts.start("ssh", "n1", "read line; echo got $line", stdin=subprocess.PIPE)
    hosts.run("ssh", "n1", "true")
    hosts.cut("n1")
    talk.stdin.write("word\n")
    talk.stdin.flush()
    gone = hosts.run("ssh", "-o", "ConnectTimeout=1", "n1", "true")
    assert gone.returncode == 255 and "timed out" in gone.stderr, gone
    assert talk.poll() is None
    hosts.mend("n1")
    assert talk.communicate(timeout=60) == ("got word\n", "")


def test_nothing_is_left_where_the_tests_are_killed(real_nodes, tmp_path):
    command, here = [sys.executable, "-c", HOLD, str(tmp_path)], Path(__file__).parents[1]
    # Where the program is a text, Python looks for modules in the current folder.
    holder = subprocess.Popen(command, cwd=here, stdout=subprocess.PIPE, text=True)
    pids = [int(word) for word in holder.stdout.readline().split()]
    assert pids
    holder.send_signal(signal.SIGKILL)
    holder.communicate()
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))


def test_a_host_whose_sshd_has_ended_refuses_connections(hosts):
    hosts.refuse("n3")
    assert "Connection refused" in hosts.run("ssh", "n3", "true").stderr
    hosts.serve("n3")
    assert hosts.run("ssh", "n3", "true").returncode == 0
