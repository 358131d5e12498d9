"""Slurm: srun starts one launcher per node, inside an allocation or in one that it waits for."""

from __future__ import annotations

from zero.launch.backends.command import Command
from zero.launch.job import Job


def commands(job: Job) -> list[Command]:
    """One command line for all hosts. A node looks itself up by name, as Slurm has an order of its own."""
    names = [host.name for host in job.world.hosts]
    return [
        Command(
            [
                "srun",
                f"--nodes={len(names)}",
                f"--ntasks={len(names)}",
                "--ntasks-per-node=1",
                f"--nodelist={','.join(names)}",
                "--kill-on-bad-exit=1",
                "--cpu-bind=none",  # a task is a whole node's launcher: bound to one core, all ranks would share it
                "--input=none",
                "--export=ALL",  # the job's own variables are in the line: here a comma in a value would end it
                *job.request.hosts.launcher_args,
                *["sh", "-c", job.shell(job.node_words(None))],
            ],
            # So that the first SIGINT goes on to the nodes, in place of a list of what they do.
            environment={"SLURM_DISABLE_STATUS": "1"},
        )
    ]
