"""Before a job starts, all that keeps it from starting on any host is said at once; then nothing was started."""

from __future__ import annotations

import json
import shlex
import signal
import socket
import sys
from pathlib import Path

import pytest
from fake_hosts import TIMEOUT, Hosts
from nodes import eventually

from zero.launch.remote.preflight import MARK, versions

REAL = 'case "$1" in *zero.launch.remote.preflight*) ;; *) echo started; exit 0;; esac\n'
GOOD = REAL + 'exec sh -c "$1"'


def edited(expression: str) -> str:
    """A host that runs the command line as `sed` changes it."""
    return REAL + f'exec sh -c "$(printf %s "$1" | sed {shlex.quote(expression)})"'


def test_everything_that_is_wrong_is_said_at_once(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path, *(f"n{number}" for number in range(1, 9)))
    (tmp_path / "elsewhere").mkdir()
    other = {MARK: {"versions": {"Python": "3.1", "zero": "9", "torch": versions()["torch"]}, "problems": []}}
    python = sys.executable
    hosts.host("n1", GOOD)
    hosts.host("n2", "printf 'warning\\nssh: connect to host n2 port 22: No route to host\\r\\n' >&2; exit 255")
    hosts.host("n3", edited("s,^cd ,cd /nowhere,"))
    hosts.host("n4", edited(f"s,{python},/no/python,"))
    hosts.host("n5", edited("s,-m zero.launch.remote.preflight,-I -S -m zero.launch.remote.preflight,"))
    hosts.host("n6", REAL + f"echo '{{}}'; echo '{json.dumps(other)}'")
    hosts.host("n7", edited(f"s,^cd {tmp_path},cd {tmp_path}/elsewhere,"))
    hosts.host("n8", REAL + "echo 'Traceback' >&2; echo 'MemoryError' >&2; exit 1")
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        words = ["run", "-H", "H", "--master_addr", "127.0.0.1", "--master_port", str(port), "t.py"]
        status, out, err = hosts.zero(*words, preflight__ProbeGroup__seconds=TIMEOUT)
    assert (status, out) == (2, "")
    first, *lines = err.splitlines()
    assert first.startswith("zero run: error: nothing was started on the 8 hosts (--no_check")
    ours = versions()
    assert [line.partition(" (")[0] for line in lines] == [
        f"  host n1: cannot listen on port {port}, where the hosts meet",
        "  host n2: cannot be reached",
        f"  host n3: cannot go to the folder {tmp_path}",
        f"  host n4: there is no {python} that can run",
        f"  host n5: the Python there, {python}, has no zero of this version",
        "  host n6: has other versions than this machine: "
        f"Python 3.1, here {ours['Python']}, zero 9, here {ours['zero']}",
        f"  host n7: there is no script 't.py' in {tmp_path}/elsewhere",
        "  host n8: the look at it ended with status 1",
    ]
    assert lines[1].endswith("(ssh: connect to host n2 port 22: No route to host)")
    assert "/nowhere" in lines[2]
    assert "No module named" in lines[4]
    assert lines[7].endswith("(MemoryError)")


def test_a_host_that_does_not_answer_is_named_with_its_last_line(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path, "n1", "n2")
    hosts.host("n1", "echo 'n1 is slow' >&2; trap '' TERM INT; sleep 968; sleep 969")
    hosts.host("n2", "sleep 968 & sleep 969")
    # Time to start two shells, not two Pythons.
    status, out, err = hosts.zero("run", "-H", "H", "t.py", preflight__ProbeGroup__seconds=3)
    assert (status, out) == (2, "")
    assert err.splitlines()[1:] == [
        "  host n1: did not answer within 3 s; its last line was: n1 is slow",
        "  host n2: did not answer within 3 s",
    ]
    assert hosts.nothing_left()


def test_the_first_host_must_be_known_to_the_others(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path, "n1.invalid", "n2")
    status, _, err = hosts.zero("run", "-H", "H", "t.py")
    assert status == 2
    for name in ("n1.invalid", "n2"):
        assert f"\n  host {name}: does not know the first host as 'n1.invalid' (" in err


@pytest.mark.parametrize(("words", "text"), [
    (["--module", "no_such_module"], "there is no module 'no_such_module' in"),
    (["--no_python", "./gone.sh"], "there is no program './gone.sh' in PATH or in"),
])  # fmt: skip
def test_what_is_to_run_is_there(tmp_path: Path, words: list[str], text: str) -> None:
    hosts = Hosts(tmp_path, "n1", "n2")
    # There for the launcher, and in its folder; not where the host goes.
    (tmp_path / "no_such_module.py").touch()
    hosts.program("gone.sh", "")
    (tmp_path / "gone.sh").symlink_to("bin/gone.sh")
    (tmp_path / "elsewhere").mkdir()
    hosts.host("n2", edited(f"s,^cd {tmp_path},cd {tmp_path}/elsewhere,"))
    status, _, err = hosts.zero("run", "-H", "H", "--master_addr", "127.0.0.1", *words)
    assert status == 2
    assert err.splitlines()[1:] == [f"  host n2: {text} {tmp_path}/elsewhere" + (
        " or in the Python path" if "--module" in words else "")]  # fmt: skip


def test_stopped_while_looking(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path, "n1", "n2")
    hosts.host("n2", "sleep 968 & sleep 969")
    process = hosts.start("run", "-H", "H", "t.py")
    assert eventually(lambda: hosts.calls().count("preflight") == 2)
    process.send_signal(signal.SIGINT)
    assert hosts.finish(process)[0] == 130
    assert hosts.nothing_left()
