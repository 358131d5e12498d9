"""Plain OpenSSH: one connection per host, all at the same time.

What ends the remote processes when the connection is gone: no terminal is asked for (-T), and the node ends when its
stdin does (--tied). A terminal (-tt) would have them hung up on by sshd, but it joins stdout and stderr, adds carriage
returns, and takes bytes of the output for control characters; and when a host is cut off from the network, sshd does
not notice for hours unless its own settings ask it to. So whoever starts these commands keeps each ssh's stdin open
and writes on it: a line with the job's secret, and then a byte every second. A node that sees the end of it, or nothing
for `SILENCE` seconds, is to end its processes. The other way round, ssh asks the server every 2 seconds
(ServerAliveInterval) and gives up when 3 answers are missing.
"""

from __future__ import annotations

from dataclasses import replace

from zero.launch.args.hosts import HostFlags
from zero.launch.backends.command import Command
from zero.launch.contract import SILENCE
from zero.launch.job import Job

OPTIONS = (
    "BatchMode=yes",  # an unknown host or a password is an error, not a question that nobody sees
    "ConnectTimeout=10",
    "ServerAliveInterval=2",
    "ServerAliveCountMax=3",
)


def commands(job: Job) -> list[Command]:
    """One command line for each host."""
    tied = replace(job, request=replace(job.request, hosts=replace(job.request.hosts, tied=SILENCE)))
    return [
        Command([*to_host(tied.request.hosts, host.name), tied.shell(tied.node_words(str(node)))], node, {}, True, True)
        for node, host in enumerate(job.world.hosts)
    ]


def to_host(flags: HostFlags, name: str) -> list[str]:
    """The words in front of what is to run on the host `name`."""
    options = [word for option in OPTIONS for word in ("-o", option)]
    where = ["-p", str(flags.ssh_port)] if flags.ssh_port is not None else []
    return ["ssh", "-T", *options, *where, *flags.launcher_args, name]
