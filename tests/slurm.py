"""A real Slurm on this machine, for tests: three nodes, a controller and munge, in Linux namespaces.

Its processes, network, name, /run, /etc/hosts and /etc/slurm are its own, so that two clusters never meet and nothing
of this machine's is touched. The first process ends with its stdin, a pipe from here, and the kernel ends all others
with it, jobs too: nothing is left even where the tests are killed. There is no systemd, no cgroup and no database.
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
from pathlib import Path

import psutil
from nodes import environment, eventually
from real_nodes import PATH

RANK = str(Path(__file__).parent / "slurm_rank.py")
PROGRAMS = ("slurmctld", "slurmd", "srun", "munged", "ip", "unshare", "nsenter")
HUB, NAMES = "hub", ("node1", "node2", "node3")
OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")
SECONDS = 120.0  # that no client takes here, unless it hangs
_APART = ("unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--mount-proc")
# What the first process does; $1 is the folder with the files that it puts in place of those in /etc.
_FIRST = f"""
echo {HUB} >/proc/sys/kernel/hostname
ip link set lo up
ip link add bridge0 type bridge
for place in 1 2 3 254; do ip address add 10.77.0.$place/24 dev bridge0; done
ip link set bridge0 up
mount -t tmpfs none /run
mkdir -m 755 /run/munge
head -c 1024 /dev/urandom >/run/munge/key
chmod 400 /run/munge/key
mount --bind "$1/hosts" /etc/hosts
mount --bind "$1/etc" /etc/slurm
munged --key-file=/run/munge/key --log-file="$1/munged.log" --seed-file=/run/munge/seed
slurmctld -c
for node in {" ".join(NAMES)}; do slurmd -N $node; done
echo up
trap '' CHLD # processes that lose their parent do not stay as zombies
exec cat >/dev/null
"""
# cred_expire: also what a requeued job waits before it begins again; 5 is the least. KillWait: from SIGTERM to SIGKILL.
# SlurmdTimeout: until a node that does not answer is down, and its jobs are requeued. All in seconds.
_CONF = """
ClusterName=zero{pid}
SlurmctldHost={hub}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=cred_expire=5
CryptoType=crypto/munge
StateSaveLocation=/run/slurmctld
SlurmdSpoolDir=/run/slurmd.%n
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.%n.pid
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
KillWait=20
SlurmdTimeout=15
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0
NodeName=node1 NodeHostname={hub} Port=17821 CPUs=4 RealMemory=2000
NodeName=node2 NodeHostname={hub} Port=17822 CPUs=4 RealMemory=2000
NodeName=node3 NodeHostname={hub} Port=17823 CPUs=4 RealMemory=2000
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
"""


@functools.cache
def reason() -> str | None:
    """Why there can be no cluster here; None where there can."""
    if sys.platform != "linux":
        return "this is not Linux"
    if os.geteuid():
        return "only root may make namespaces"
    if missing := [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]:
        return f"{' and '.join(missing)} cannot be found (Debian: slurm-wlm, munge, iproute2)"
    text = "ip link add bridge0 type bridge && mount -t tmpfs none /run && mount -t tmpfs none /etc/slurm"
    done = subprocess.run([*_APART, "sh", "-c", text], env=_plain(), capture_output=True, text=True)
    return f"namespaces are not allowed ({' '.join(done.stderr.split())})" if done.returncode else None


class Slurm:
    """The cluster, while it is up; `folder` has its files, of which the logs say what went wrong."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._first: subprocess.Popen | None = None
        self._pid = 0

    def __enter__(self) -> Slurm:
        try:
            self._begin()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the cluster and all that runs on it."""
        if self._first is not None:
            self._first.stdin.close()
            self._first.wait(SECONDS)
            self._first.stdout.close()
            self._first = None

    def command(self, *words: str, folder: Path | None = None) -> list[str]:
        """A client's, or any other that is to run there, in `folder`."""
        where = ["--target", str(self._pid), f"--wd={folder or self.folder}"]
        return ["nsenter", "--net", "--uts", "--mount", "--pid", *where, *words]

    def run(
        self, *words: str, folder: Path | None = None, seconds: float = SECONDS, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Run it to its end, in `folder`; `python` is this one."""
        path = os.pathsep.join([str(Path(sys.executable).parent), PATH])
        return subprocess.run(
            self.command(*words, folder=folder),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds,
            env=environment(**{"PATH": path, "OMP_NUM_THREADS": "1", **variables}),
        )

    def submit(self, folder: Path, text: str, *options: str) -> str:
        """Submit the batch script `text` from `folder`; the number of the job."""
        (folder / "job.sh").write_text(text)
        done = self.run("sbatch", "--parsable", *options, "job.sh", folder=folder)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def job(self, number: str) -> dict[str, str]:
        """What `scontrol show job` says of a job, by its names of it."""
        said = self.run("scontrol", "--oneliner", "show", "job", number).stdout
        return dict(word.split("=", 1) for word in said.split() if "=" in word)

    def ended(self, number: str) -> dict[str, str]:
        """The same, once the job has ended, with whatever status, and waits for nothing any more."""

        def found() -> dict[str, str] | None:
            time.sleep(0.3)  # the jobs need what cores there are
            job = self.job(number)
            return job if job["JobState"] in OVER else None

        job = eventually(found)
        assert job, (self.job(number), self.logs())
        return job

    def lose(self, node: str) -> None:
        """Stop all that runs on a node, so that it is there and does not answer, as one that is cut off."""
        self._each_of(node, signal.SIGSTOP)

    def mend(self, node: str) -> None:
        """Kill what was stopped there, and start the node again."""
        self._each_of(node, signal.SIGKILL)
        done = self.run("slurmd", "-N", node)
        assert done.returncode == 0, done.stderr
        idle = ("sinfo", "-h", "-n", node, "-o", "%t")
        assert eventually(lambda: self.run(*idle).stdout.split() == ["idle"], SECONDS), self.logs()

    def _each_of(self, node: str, number: int) -> None:
        """Send a signal to the slurmd of a node, to its tasks, and to what of Slurm looks after those."""
        for process in psutil.Process(self._pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                task = process.environ().get("SLURMD_NODENAME") == node
                if task or process.cmdline()[:3] == ["slurmd", "-N", node]:
                    keeper = process.parent()
                    for each in (process, keeper) if task and keeper.name() == "slurmstepd" else (process,):
                        each.send_signal(number)

    def _begin(self) -> None:
        (self.folder / "etc").mkdir()
        conf = _CONF.format(pid=os.getpid(), hub=HUB, folder=self.folder)
        (self.folder / "etc" / "slurm.conf").write_text(conf)
        (self.folder / "etc" / "cgroup.conf").write_text("CgroupAutomount=no\n")
        addresses = {HUB: 254, **{name: place for place, name in enumerate(NAMES, 1)}}
        lines = [f"10.77.0.{place} {name}\n" for name, place in addresses.items()]
        (self.folder / "hosts").write_text("".join(["127.0.0.1 localhost\n", *lines]))
        self._first = subprocess.Popen(
            [*_APART, "sh", "-euc", _FIRST, "sh", str(self.folder)],
            env=_plain(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        if self._first.stdout.readline() != "up\n":
            raise RuntimeError(f"the cluster did not start, see its stderr; {self.logs()}")
        below = Path(f"/proc/{self._first.pid}/task/{self._first.pid}/children").read_text().split()
        self._pid = int(below[0])
        idle = [str(len(NAMES)), "idle"]
        if not eventually(lambda: self.run("sinfo", "-h", "-o", "%D %t").stdout.split() == idle, SECONDS):
            raise RuntimeError(f"not all nodes of the cluster came; {self.logs()}")

    def logs(self) -> str:
        """The ends of the daemons' logs."""
        return "\n".join(f"{path.name}: {path.read_text()[-2000:]}" for path in sorted(self.folder.glob("*.log")))


def lines(path: Path) -> list[list[str]]:
    """The words of each line of a file that a rank has written; none where there is no file so far."""
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def _plain() -> dict[str, str]:
    return {"PATH": PATH, "HOME": "/root", "LANG": "C.UTF-8"}
