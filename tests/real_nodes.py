"""Hosts with addresses of their own, each with a real sshd, made of Linux namespaces; for the tests of the launcher.

Every host has its own network, name, processes, /run, /dev/shm and /etc/hosts; they share the file system, as hosts of
a cluster do. A bridge joins them, in a host of its own from which jobs are launched, so that nothing of this machine's
network is touched and two runs never meet. The first process of each host ends with its stdin, a pipe from here, and
the kernel ends all others with it: nothing is left even where the tests are killed.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
PROGRAMS = ("ip", "sshd", "ssh", "ssh-keygen", "unshare", "nsenter")
HUB, NAMES = "hub", ("n1", "n2", "n3")
SECONDS = 120  # that nothing takes here, unless it hangs; a rank that is told nothing waits for longer
_ADDRESS = "10.77.0.{}"  # of host number {}; the hub is 254
_MARK = "ZERO_TEST_MARK"  # the launcher hands variables that begin with ZERO_ to the ranks

# What the first process of a host does; FOLDER has the files that it puts in place of those in /etc.
_FIRST = """
echo "$1" >/proc/sys/kernel/hostname
mount -t tmpfs none /run
mkdir /run/sshd
mount -t tmpfs none /dev/shm
mount --bind "$2/hosts-$1" /etc/hosts
mount --bind "$2/shadow" /etc/shadow
mount --bind "$2/ssh_config" /etc/ssh/ssh_config
if [ -d /root/.ssh ]; then mount -t tmpfs none /root/.ssh; fi
if [ -f /root/.bashrc ]; then mount --bind /dev/null /root/.bashrc; fi
for device in /dev/nvidia*; do if [ -c "$device" ]; then mount --bind /dev/null "$device"; fi; done
echo up
trap '' CHLD # processes that lose their parent do not stay as zombies
exec cat >/dev/null
"""
_SSHD = """
Port 22
ListenAddress {address}
HostKey {folder}/key-{name}
AuthorizedKeysFile {folder}/key.pub
PidFile {folder}/pid-{name}
PermitRootLogin yes
PasswordAuthentication no
StrictModes no
UsePAM no
UseDNS no
MaxStartups 100
"""
_SSH = """
Host {names}
    User root
    IdentityFile {folder}/key
    IdentitiesOnly yes
    UserKnownHostsFile {folder}/known_hosts
    GlobalKnownHostsFile /dev/null
    StrictHostKeyChecking yes
"""


@functools.cache
def reason() -> str | None:
    """Why there can be no such hosts here; None where there can."""
    if sys.platform != "linux":
        return "this is not Linux"
    if os.geteuid() != 0:
        return "only root may make network namespaces"
    if missing := [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]:
        return f"{' and '.join(missing)} cannot be found (Debian: openssh-server, iproute2)"
    text = "mount -t tmpfs none /run && ip link add bridge0 type bridge && ip link add veth0 type veth peer name veth1"
    done = subprocess.run([*_apart(True), "sh", "-c", text], env=_plain(), capture_output=True, text=True)
    said = " ".join(done.stderr.split())
    return f"namespaces are not allowed ({said})" if done.returncode else None


class Process(NamedTuple):
    """A process on a host. pid: as this machine counts, not as the host does."""

    pid: int
    host: str
    words: str
    environment: Mapping[str, str]


class Nodes:
    """Three hosts, n1 to n3, and the one from which jobs are launched."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mark = uuid.uuid4().hex
        self._first: dict[str, subprocess.Popen] = {}  # of each host
        self._pids: dict[str, int] = {}
        self._launched: list[subprocess.Popen] = []

    def __enter__(self) -> Nodes:
        try:
            self._write_files()
            for name in (HUB, *NAMES):
                self._begin(name)
            self._connect()
            for name in NAMES:
                self.serve(name)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End the hosts and all that runs on them."""
        for process in list(self._launched):
            self.stop(process)
        for first in self._first.values():
            first.stdin.close()
        for first in self._first.values():
            first.wait(timeout=SECONDS)
            first.stdout.close()
        self._first.clear()

    def environment(self) -> dict[str, str]:
        """Of a launcher: nothing that this process's own launcher or the tests' has set."""
        own = ("ZERO_", "TORCHELASTIC", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "SLURM", "PYTEST")
        plain = {key: value for key, value in os.environ.items() if not key.startswith(own)}
        path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
        given = {"PATH": PATH, "HOME": str(self.folder), "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        return {**plain, **given, "CUDA_VISIBLE_DEVICES": "", _MARK: self.mark}

    def start(
        self, *words: str, host: str = HUB, stdin: int = subprocess.DEVNULL, **variables: str
    ) -> subprocess.Popen:
        """A program on the hub, which is this process's child, with a session of its own; or on another host."""
        process = subprocess.Popen(
            [*self._inside(host), *words],
            env={**self.environment(), **variables},
            cwd=self.folder,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._launched.append(process)
        return process

    def run(self, *words: str, host: str = HUB, seconds: float = SECONDS) -> subprocess.CompletedProcess[str]:
        """As `start`, and its end."""
        process = self.start(*words, host=host)
        said = process.communicate(timeout=seconds)
        self._launched.remove(process)
        return subprocess.CompletedProcess(words, process.returncode, *said)

    def stop(self, process: subprocess.Popen) -> None:
        """Kill what `start` made, and what it started in its session."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        self._launched.remove(process)

    def clear(self) -> None:
        """Kill all that runs on the hosts, and put every cable back."""
        for process in list(self._launched):
            self.stop(process)
        for process in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        for name in NAMES:
            self.mend(name)
        until(lambda: not self.processes())

    def cut(self, name: str) -> None:
        """Pull the host's cable: nothing arrives any more, and no connection is told."""
        self._ip(HUB, f"link set {name} down")

    def mend(self, name: str) -> None:
        """Put the cable back."""
        self._ip(HUB, f"link set {name} up")

    def refuse(self, name: str) -> None:
        """End the host's sshd; connections that it has stay."""
        file = self.folder / f"pid-{name}"
        self.run("kill", file.read_text().strip(), host=name)
        until(lambda: not file.exists())

    def serve(self, name: str) -> None:
        """Start the host's sshd."""
        sshd = shutil.which("sshd", path=PATH)
        _checked([*self._inside(name), sshd, "-f", str(self.folder / f"sshd_config-{name}")])
        until((self.folder / f"pid-{name}").exists)

    def processes(self, name: str | None = None) -> list[Process]:
        """All that runs on the hosts, or on one, but for their sshd; and with the job's mark, also on the hub."""
        spaces = {os.readlink(f"/proc/{self._pids[host]}/ns/pid"): host for host in NAMES}
        found = []
        for pid in (int(path.name) for path in Path("/proc").glob("[0-9]*")):
            process = self._process(pid, spaces)
            if process is not None and pid not in self._pids.values() and name in (None, process.host):
                found.append(process)
        return found

    def rank(self, number: int) -> Process | None:
        """The process of a rank: the oldest that has its RANK."""
        ranks = [process for process in self.processes() if process.environment.get("RANK") == str(number)]
        return min(ranks, key=lambda process: process.pid, default=None)

    def _process(self, pid: int, spaces: Mapping[str, str]) -> Process | None:
        """What is known of a process, if it is of these hosts; None also for one that has ended meanwhile."""
        folder = Path(f"/proc/{pid}")
        try:
            host = spaces.get(os.readlink(folder / "ns/pid"), HUB)
            words = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            pairs = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            return None
        environment = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
        program = words.partition(" ")[0].partition(":")[0]
        ours = environment.get(_MARK) == self.mark if host == HUB else "sshd" not in program
        return Process(pid, host, words, environment) if ours and words else None

    def _write_files(self) -> None:
        names = (HUB, *NAMES)
        addresses = {name: _ADDRESS.format(254 if name == HUB else NAMES.index(name) + 1) for name in names}
        for own in names:
            # As Debian installs it: a host's own name leads to its loopback, where no other host finds it.
            lines = [f"{'127.0.1.1' if name == own else addresses[name]} {name}" for name in names]
            (self.folder / f"hosts-{own}").write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
        (self.folder / "shadow").write_text("root:*:20000:0:99999:7:::\nsshd:!:20000::::::\n")
        (self.folder / "ssh_config").write_text(_SSH.format(names=" ".join(NAMES), folder=self.folder))
        for key in ("key", "wrong", *(f"key-{name}" for name in NAMES)):
            _checked(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", key, "-f", str(self.folder / key)])
        known = [f"{name} {(self.folder / f'key-{name}.pub').read_text()}" for name in NAMES]
        (self.folder / "known_hosts").write_text("".join(known))
        for name in NAMES:
            text = _SSHD.format(folder=self.folder, name=name, address=addresses[name])
            (self.folder / f"sshd_config-{name}").write_text(text)

    def _begin(self, name: str) -> None:
        words = [*_apart(name != HUB), "sh", "-euc", _FIRST, "sh", name, str(self.folder)]
        pipe = subprocess.PIPE
        first = subprocess.Popen(words, env=_plain(), stdin=pipe, stdout=pipe, text=True)
        self._first[name] = first
        if first.stdout.readline() != "up\n":
            raise RuntimeError(f"host {name} did not start, see its stderr")
        below = Path(f"/proc/{first.pid}/task/{first.pid}/children").read_text().split()
        self._pids[name] = first.pid if name == HUB else int(below[0])

    def _connect(self) -> None:
        self._ip(HUB, "link add bridge0 type bridge forward_delay 0")
        for place, name in enumerate(NAMES, 1):
            self._ip(HUB, f"link add {name} type veth peer name eth0 netns {self._pids[name]}")
            self._ip(HUB, f"link set {name} master bridge0 up")
            self._address(name, "eth0", place)
        self._address(HUB, "bridge0", 254)

    def _address(self, name: str, interface: str, number: int) -> None:
        self._ip(name, f"address add {_ADDRESS.format(number)}/24 broadcast + dev {interface}")
        self._ip(name, f"link set {interface} up")
        self._ip(name, "link set lo up")

    def _ip(self, name: str, words: str) -> None:
        _checked([*self._inside(name), "ip", *words.split()])

    def _inside(self, name: str) -> list[str]:
        """The words in front of what is to run on a host."""
        # Not among the hub's processes, of which it has none: who enters those is no child of the one who asked.
        own = [] if name == HUB else ["--pid"]
        return ["nsenter", "--target", str(self._pids[name]), "--net", "--uts", "--mount", *own, f"--wd={self.folder}"]


def until(ready: Callable[[], object], seconds: float = SECONDS) -> float:
    """Wait until `ready`; how long that took."""
    begin = time.monotonic()
    while not ready():
        if time.monotonic() - begin > seconds:
            raise TimeoutError(f"still not so after {seconds} s: {ready}")
        time.sleep(0.02)
    return time.monotonic() - begin


def _apart(processes: bool) -> list[str]:
    """The words in front of what is to run in namespaces of its own."""
    return ["unshare", "--net", "--uts", "--mount", *(["--pid", "--fork", "--mount-proc"] if processes else [])]


def _plain() -> dict[str, str]:
    return {"PATH": PATH, "HOME": "/root", "LANG": "C.UTF-8"}


def _checked(words: list[str]) -> None:
    done = subprocess.run(words, env=_plain(), stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: exit code {done.returncode}: {done.stdout}{done.stderr}")
