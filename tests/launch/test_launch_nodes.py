"""The launchers of a job's hosts number the ranks, tell of the first failure once, and end or restart together."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys

import pytest
from nodes import Nodes, alive, environment, eventually, pids
from ports import free_port

from zero.launch.node import bind

# Writes what a rank is into a file of its own, whole at once.
BEGIN = """
import os, signal, sys, time
from pathlib import Path
rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
def note(name, text=""):
    path = Path(sys.argv[1], name)
    path.with_suffix(".tmp").write_text(str(text))
    path.with_suffix(".tmp").rename(path)
def noted(name, count=1):
    while len(list(Path(sys.argv[1]).glob(name))) < count:
        time.sleep(0.02)
"""
WAIT = BEGIN + "note(f'{rank}.pid', os.getpid())\ntime.sleep(600)\n"


def test_unequal_slots_give_the_ranks_of_the_world_and_no_host_ends_before_the_last(launchers, tmp_path):
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK", "ROLE_RANK")
    names += ("MASTER_ADDR",)
    text = (
        BEGIN
        + f"""
sys.stdout.write(' '.join(os.environ[k] for k in {names!r}) + chr(10))
note(f"{{rank}}.env", os.environ["MASTER_PORT"] + " " + os.environ["TORCHELASTIC_RUN_ID"])
assert sys.stdin.read() == ""
if rank == 2:
    noted("go")
"""
    )
    with Nodes(launchers, tmp_path, {"a": 1, "b": 2}, text) as nodes:
        files = nodes.files("*.env", 3)
        assert len({file.read_text() for file in files}) == 1, "every rank has the same port and run"
        assert not eventually(lambda: any(one.poll() is not None for one in nodes.processes.values()), seconds=0.5)
        (tmp_path / "go").touch()
        assert nodes.wait() == [0, 0]
        assert nodes.out["a"] == "[a rank 0]: 0 0 3 1 0 0 0 127.0.0.1\n"
        assert sorted(nodes.out["b"].splitlines()) == [
            "[b rank 1]: 1 0 3 2 1 1 1 127.0.0.1",
            "[b rank 2]: 2 1 3 2 1 1 2 127.0.0.1",
        ]
        (warning,) = nodes.said()  # of the first host, for all
        assert warning.startswith("zero run: warning: 3 ranks ran, and none called zero.initialize()")


def test_a_signal_to_one_host_ends_all(launchers, tmp_path):
    with Nodes(launchers, tmp_path, {"a": 1, "b": 1}, WAIT, "--max_restarts=1") as nodes:
        files = nodes.files("*.pid", 2)
        nodes.processes["b"].send_signal(signal.SIGTERM)
        nodes.processes["b"].send_signal(signal.SIGINT)
        statuses = nodes.wait()
        assert statuses[0] == statuses[1] and statuses[0] in (130, 143)
        (line,) = nodes.said()
        assert re.fullmatch(r"zero run: stopped by SIG(TERM|INT) on host b", line)
        assert not any(alive(pid) for pid in pids(files))


@pytest.mark.parametrize(
    ("name", "statuses", "said"),
    [
        ("a", [-9, 129], "zero run: lost the connection to host a, at 127.0.0.1:"),  # the first one
        ("b", [1, -9], "zero run: host b is lost: its launcher has ended"),
    ],
)
def test_a_launcher_that_is_killed_is_a_lost_host_and_all_ranks_end_with_it(launchers, tmp_path, name, statuses, said):
    with Nodes(launchers, tmp_path, {"a": 1, "b": 1}, WAIT) as nodes:
        files = nodes.files("*.pid", 2)
        nodes.processes[name].kill()
        assert nodes.wait() == statuses
        (line,) = nodes.said()
        assert line.startswith(said)
        assert eventually(lambda: not any(alive(pid) for pid in pids(files)))


def test_without_a_lost_host_the_ranks_are_numbered_anew(launchers, tmp_path):
    text = (
        BEGIN
        + """
note(f"{attempt}-{rank}.env", " ".join(os.environ[k] for k in ("LOCAL_RANK", "WORLD_SIZE", "GROUP_WORLD_SIZE")))
if attempt == 0:
    time.sleep(600)
noted("1-*.env", 3)
sys.exit(7 if attempt == 1 and rank == 2 else 0)
"""
    )
    with Nodes(launchers, tmp_path, {"a": 1, "b": 1, "c": 2}, text, "--min_nodes=2") as nodes:
        nodes.files("0-*.env", 4)
        nodes.processes["b"].kill()
        # A failure is none of what --min_nodes allows for.
        assert nodes.wait() == [7, -9, 7]
        assert [file.read_text() for file in nodes.files("1-*.env", 3)] == ["0 3 2", "0 3 2", "1 3 2"]
        lost, failed = nodes.said()
        assert lost == "zero run: host b is lost: its launcher has ended; going on with 2 of 3 hosts"
        assert failed.startswith("zero run: rank 2 on host c failed first, with exit code 7") and lost in nodes.err["a"]


def test_a_host_whose_connection_to_the_launcher_is_cut_ends_and_the_others_are_told(launchers, tmp_path):
    with Nodes(launchers, tmp_path, {"a": 1, "b": 1}, WAIT, by_ssh="b") as nodes:
        files = nodes.files("*.pid", 2)
        nodes.cut("b")
        assert nodes.processes["a"].wait() == 129
        assert nodes.wait() == [129, 129]
        assert nodes.err["b"] == "", "nobody reads it any more"
        assert nodes.said() == ["zero run: host b is lost: it lost the connection to the launcher"]
        assert not any(alive(pid) for pid in pids(files))


HEARS = """
signal.signal(signal.SIGUSR1, lambda *_: note(f"{rank}.heard", os.environ["RANK"]))
def late(*_):
    time.sleep(5)  # longer than ranks have by default
    note(f"{rank}.saved")
    sys.exit(0)
signal.signal(signal.SIGTERM, late)
note(f"{rank}.hears")
noted("end")
"""


def test_a_signal_of_the_user_goes_to_all_ranks_once_they_hear_and_ends_nothing(launchers, tmp_path):
    text = BEGIN + "note(f'{rank}.pid', os.getpid())\nnoted('go')\n" + HEARS
    with Nodes(launchers, tmp_path, {"a": 1, "b": 2}, text, by_ssh="b") as nodes:
        nodes.files("*.pid", 3)
        nodes.processes["b"].stdin.write(b'{"kind": "signal", "signal": %d}\n' % signal.SIGUSR1)
        nodes.processes["b"].stdin.flush()
        nodes.processes["a"].send_signal(signal.SIGUSR2)  # nobody handles it: it waits
        assert not eventually(lambda: any(one.poll() is not None for one in nodes.processes.values()), seconds=0.5)
        (tmp_path / "go").touch()
        assert [file.read_text() for file in nodes.files("*.heard", 3)] == ["0", "1", "2"]
        (tmp_path / "end").touch()
        assert eventually(lambda: all(one.poll() is not None for one in nodes.processes.values()))
        assert nodes.wait() == [0, 0]


def test_ranks_have_the_time_of_shutdown_timeout_to_save(launchers, tmp_path):
    with Nodes(launchers, tmp_path, {"a": 1, "b": 1}, BEGIN + HEARS, "--shutdown_timeout=60") as nodes:
        nodes.files("*.hears", 2)
        nodes.processes["b"].send_signal(signal.SIGTERM)
        assert nodes.wait() == [143, 143]
        assert len(nodes.files("*.saved", 2)) == 2


def test_ctrl_z_while_the_hosts_are_waited_for_ends_nothing(launchers, tmp_path):
    (tmp_path / "hosts").write_text("a slots=1\nb slots=1\n")
    (tmp_path / "script.py").touch()
    port = free_port()
    words = ["--no_ssh", "--node_rank=0", "-H", str(tmp_path / "hosts"), "--master_addr=127.0.0.1"]
    words += [f"--master_port={port}", str(tmp_path / "script.py")]
    with launchers.start("run", *words, environment=environment(ZERO_SECRET="of the test")) as launcher:

        def listens() -> bool:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                return True
            return False

        assert eventually(listens)
        launcher.send_signal(signal.SIGTSTP)
        launcher.send_signal(signal.SIGCONT)
        assert not eventually(lambda: launcher.poll() is not None, seconds=0.5)
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait() == 143, launcher.texts()


def test_a_rank_whose_launcher_is_gone_before_it_begins_does_not_begin():
    for launcher, status in ((os.getpid(), 0), (os.getppid(), -signal.SIGKILL)):
        command = [sys.executable, "-I", "-S", bind.__file__, str(launcher), "", "true"]
        assert subprocess.run(command, timeout=120).returncode == status
