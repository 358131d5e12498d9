"""The ways to start a job on its hosts: a function per launcher, from the job to command lines.

What ends the remote processes when a connection is gone: over ssh no terminal is asked for (-T), and the node ends
when its stdin does (--stdin). srun and mpirun hand the stdin on to one of the nodes, which ends the job in that way;
signals they would hand on in ways of their own, or kill all. A terminal (-tt) would have them hung up on by sshd, but
it joins stdout and stderr, adds carriage returns, and takes bytes of the output for control characters; and when a host
is cut off from the network, sshd does not notice for hours unless its own settings ask it to. So whoever starts these
commands keeps each stdin open, writes the job's secrets on those of ssh and, on the first one, a line every second; see
node/launcher_pipe.py. The other way round, ssh asks the server every 2 seconds (ServerAliveInterval) and gives up when
3 answers are missing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from zero.launch.args.hosts import HostFlags
from zero.launch.contract import SECRET_VARIABLE
from zero.launch.job import Job
from zero.launch.process.process import Command

SSH_OPTIONS = (
    "BatchMode=yes",  # an unknown host or a password is an error, not a question that nobody sees
    "ConnectTimeout=10",
    "ServerAliveInterval=2",
    "ServerAliveCountMax=3",
)


def commands(job: Job) -> list[Command]:
    """The command lines that start `job` by the launcher that was asked for."""
    hosts = replace(job.request.hosts, stdin=True)
    return BACKENDS[hosts.launcher](replace(job, request=replace(job.request, hosts=hosts)))


def to_host(flags: HostFlags, name: str) -> list[str]:
    """The words of an ssh in front of what is to run on the host `name`."""
    options = [word for option in SSH_OPTIONS for word in ("-o", option)]
    where = ["-p", str(flags.ssh_port)] if flags.ssh_port is not None else []
    return ["ssh", "-T", *options, *where, *flags.launcher_args, name]


def _ssh(job: Job) -> list[Command]:
    """One connection per host, all at the same time."""
    return [
        Command([*to_host(job.request.hosts, host.name), job.shell(job.node_words(str(node)))], node, {}, True)
        for node, host in enumerate(job.world.hosts)
    ]


def _slurm(job: Job) -> list[Command]:
    """srun starts one launcher per node, inside an allocation or in one that it waits for.

    A node looks itself up by name, as Slurm has an order of its own.
    """
    names = [host.name for host in job.world.hosts]
    words = [
        "srun",
        f"--nodes={len(names)}",
        f"--ntasks={len(names)}",
        "--ntasks-per-node=1",
        f"--nodelist={','.join(names)}",
        "--kill-on-bad-exit=0",  # at the first end of one: the job's status would be that of SIGTERM
        "--wait=60",  # they end by themselves, at about the same time; seconds
        "--cpu-bind=none",  # a task is a whole node's launcher: bound to one core, all ranks would share it
        "--input=0",
        "--export=ALL",  # the job's own variables are in the line: here a comma in a value would end it
        *job.request.hosts.launcher_args,
        *["sh", "-c", job.shell(job.node_words(None))],
    ]
    return [Command(words, holds_stdin=True)]


def _openmpi(job: Job) -> list[Command]:
    """mpirun starts one launcher per host; the ranks are the launcher's, and use no MPI.

    Each part names its host, as mpirun orders hosts in its own way, the one that it runs on first. The job's secrets
    are in mpirun's environment, and only their names are here.
    """
    names = [word for name in (SECRET_VARIABLE, *job.secrets) for word in ("-x", name)]
    hosts = [["--host", host.name, *names] for host in job.world.hosts]
    words = ["mpirun", *job.request.hosts.launcher_args, "--bind-to", "none", *_mpi_parts(job, hosts)]
    return [Command(words, holds_stdin=True)]


def _mpich(job: Job) -> list[Command]:
    """MPICH and what uses its mpiexec (Hydra), such as Intel MPI; part i runs on host i of the list."""
    names = ",".join(host.name for host in job.world.hosts)
    words = ["mpirun", *job.request.hosts.launcher_args, "-hosts", names, "-ppn", "1", "-bind-to", "none"]
    return [Command([*words, *_mpi_parts(job, [[] for _ in job.world.hosts])], holds_stdin=True)]


def _mpi_parts(job: Job, options: list[list[str]]) -> list[str]:
    """A part of an mpirun's command line for each host, with its `options`, and ":" between them.

    The node's command line is one argument for sh: a lone ":" among the script's arguments would begin another part.
    """
    words: list[str] = []
    for node, more in enumerate(options):
        words += [":"] if node else []
        words += ["-n", "1", *more, "sh", "-c", job.shell(job.node_words(str(node)))]
    return words


BACKENDS: Mapping[str, Callable[[Job], list[Command]]] = {
    "ssh": _ssh,
    "slurm": _slurm,
    "openmpi": _openmpi,
    "mpich": _mpich,
}
