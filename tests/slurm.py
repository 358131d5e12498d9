"""A real Slurm of two nodes on this machine, for tests: its daemons in a mount namespace, without systemd.

It wants root and the packages that `make nodes` installs. The nodes are two slurmd, node1 and node2, which the clients
find by a copy of /etc/hosts that only the namespace sees.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from ports import free_port

PROGRAMS = ("slurmctld", "slurmd", "munged", "srun", "unshare", "nsenter", "runuser")
SECONDS = 60.0
_CONF = """
ClusterName=zero
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/munge.socket
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
JobRequeue=1
KillWait=5
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0
NodeName=node1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4 RealMemory=2000 State=UNKNOWN
NodeName=node2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4 RealMemory=2000 State=UNKNOWN
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
"""


def reason() -> str | None:
    """Why there can be no cluster here; None where there can."""
    if os.geteuid():
        return "a Slurm of our own wants root"
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    return f"`make nodes` has not installed {', '.join(missing)}" if missing else None


class Slurm:
    """The cluster, while it is up; `folder` has its files, of which the logs say what went wrong."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.conf = folder / "etc" / "slurm.conf"
        self._holder: subprocess.Popen | None = None

    def command(self, *words: str) -> list[str]:
        """A client's, in the namespace of the cluster."""
        return ["nsenter", "-t", str(self._holder.pid), "-m", "env", f"SLURM_CONF={self.conf}", *words]

    def run(
        self,
        *words: str,
        seconds: float = SECONDS,
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a client to its end."""
        given = None if environment is None else {**os.environ, **environment}
        return subprocess.run(
            self.command(*words), capture_output=True, text=True, timeout=seconds, env=given, cwd=folder, check=False
        )

    def job(self, number: str) -> str:
        """The state of a job, "" where it is not known any more."""
        return self.run("squeue", "-h", "-j", number, "-o", "%T").stdout.strip()

    def start(self) -> None:
        """Bring it up; RuntimeError with the logs where it does not come."""
        for name in ("etc", "munge", "state", "spool.node1", "spool.node2"):
            (self.folder / name).mkdir(parents=True)
        ports = [free_port() for _ in range(3)]
        self.conf.write_text(_CONF.format(host=socket.gethostname(), folder=self.folder, ports=ports))
        (self.conf.parent / "cgroup.conf").write_text("CgroupAutomount=no\n")
        key = self.folder / "munge" / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        hosts = self.folder / "hosts"
        hosts.write_text(Path("/etc/hosts").read_text() + "\n127.0.0.1 node1\n127.0.0.1 node2\n")
        for path in (key, key.parent):
            shutil.chown(path, "munge", "munge")
        key.parent.chmod(0o711)
        for parent in self.folder.parents:  # munged runs as another user
            with contextlib.suppress(OSError):
                parent.chmod(parent.stat().st_mode | 0o011)
        bind = f"mount --bind {hosts} /etc/hosts && exec sleep infinity"
        self._holder = subprocess.Popen(["unshare", "-m", "--propagation", "private", "sh", "-c", bind])
        until(lambda: "node2" in self.run("cat", "/etc/hosts").stdout, self.logs)
        munge = self.folder / "munge"
        files = [f"--{name}-file={munge / name}" for name in ("pid", "log", "seed")]
        where = [f"--key-file={key}", f"--socket={munge / 'munge.socket'}", *files]
        self._checked("runuser", "-u", "munge", "--", "munged", *where)
        self._checked("slurmctld", "-c", "-f", str(self.conf))
        for node in ("node1", "node2"):
            self._checked("slurmd", "-N", node, "-f", str(self.conf))
        until(lambda: self.run("sinfo", "-h", "-o", "%D %t").stdout.split() == ["2", "idle"], self.logs)

    def _checked(self, *words: str) -> None:
        done = self.run(*words)
        if done.returncode:
            raise RuntimeError(f"{words[0]} ended with {done.returncode}: {done.stderr}{self.logs()}")

    def logs(self) -> str:
        """The ends of the daemons' logs."""
        return "\n".join(f"{path.name}: {path.read_text()[-2000:]}" for path in sorted(self.folder.glob("*.log")))

    def stop(self) -> None:
        """End all daemons, and what they run."""
        if self._holder is None:
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.run("scancel", "--user=root")
            self.run("scontrol", "shutdown")
        for path in [*self.folder.glob("*.pid"), self.folder / "munge" / "pid"]:
            with contextlib.suppress(OSError, ValueError):
                os.kill(int(path.read_text()), signal.SIGKILL)
        self._holder.kill()
        self._holder.wait()


def until(ready: Callable[[], object], said: Callable[[], str], seconds: float = SECONDS) -> None:
    """Wait; RuntimeError with what is `said` where it lasts too long."""
    end = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > end:
            raise RuntimeError(f"the cluster did not come up: {said()}")
        time.sleep(0.1)


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[Slurm]:
    """A cluster that is up."""
    slurm = Slurm(folder)
    try:
        slurm.start()
        yield slurm
    finally:
        slurm.stop()
