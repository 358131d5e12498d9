"""Each flag of DeepSpeed's launcher is here, or is refused by its name with what to do instead."""

from __future__ import annotations

import argparse

import pytest

from zero.launch.args import run as args
from zero.launch.args.run import RunRequest

# As `deepspeed --help` of 0.18 lists them, with a value where they take one, and what they change here.
TAKEN = [
    ("-H F", "hosts.hostfile", "F"),
    ("--hostfile F", "hosts.hostfile", "F"),
    ("-i n1", "hosts.include", "n1"),
    ("--include n1:0", "hosts.include", "n1:0"),
    ("-e n1", "hosts.exclude", "n1"),
    ("--exclude n1", "hosts.exclude", "n1"),
    ("--num_nodes 2", "num_nodes", 2),
    ("--num_gpus 2", "num_gpus", 2),
    ("--num_accelerators 2", "num_gpus", 2),
    ("--master_port 5000", "master_port", 5000),
    ("--master_addr n1", "master_addr", "n1"),
    ("--node_rank 1", "hosts.node_rank", 1),
    ("--launcher SSH", "hosts.launcher", "ssh"),
    ("--launcher openmpi", "hosts.launcher", "openmpi"),
    ("--launcher slurm", "hosts.launcher", "slurm"),
    ("--launcher mpich", "hosts.launcher", "mpich"),
    ("--launcher_args=-v", "hosts.launcher_args", ("-v",)),
    ("--module", "module", True),
    ("--no_python", "no_python", True),
    ("--no_local_rank", "hosts.no_local_rank", True),
    ("--no_ssh", "hosts.no_ssh", True),
    ("--no_ssh_check", "hosts.no_check", True),
    ("--force_multi", "script_args", ()),
    ("--enable_each_rank_log D", "log_dir", "D"),
    ("--bind_cores_to_rank", "bind_cores", True),
    ("--bind_core_list 0-3", "bind_core_list", "0-3"),
    ("--ssh_port 22", "hosts.ssh_port", 22),
    ("-q", "quiet", True),
    ("--quiet", "quiet", True),
    ("--log_level error", "quiet", True),
    ("--log_level INFO", "quiet", False),
]
REFUSED = [
    ("--save_pid", "the shell has it in $!"),
    ("--venv_script v.sh", "every host runs the Python that runs this command"),
    ("--autotuning tune", "`zero tune script.py` finds a configuration"),
    ("--elastic_training", "--max_restarts N restarts the ranks"),
    ("--min_elastic_nodes 1", "--min_nodes M"),
    ("--max_elastic_nodes 4", "--max_nodes N"),
    ("--launcher impi", "the mpirun of Intel MPI is --launcher mpich"),
    ("--launcher mvapich", "the mpirun of MVAPICH is --launcher mpich"),
]


def parsed(text: str) -> RunRequest:
    parser = argparse.ArgumentParser(prog="zero run", allow_abbrev=False)
    args.add_arguments(parser)
    return args.request(parser.parse_args([*text.split(), "t.py"]))


@pytest.mark.parametrize(("text", "name", "value"), TAKEN)
def test_it_is_taken(text: str, name: str, value: object) -> None:
    found = made = parsed(text)
    for part in name.split("."):
        found = getattr(found, part)
    assert found == value
    assert made.script == "t.py"


@pytest.mark.parametrize(("text", "advice"), REFUSED)
def test_it_is_refused_with_what_to_do(text: str, advice: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed(text)
    error = capsys.readouterr().err.splitlines()[-1]
    assert text.split()[0] in error
    assert advice in error
    assert "unrecognized" not in error
