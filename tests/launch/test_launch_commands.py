"""What runs on each host is what was asked for, by every launcher: slots, environment, folder and every argument."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from told import cases

from zero.__main__ import main
from zero.launch import backends
from zero.launch.args import run as args
from zero.launch.args.hosts import LAUNCHERS
from zero.launch.hosts import hostfile
from zero.launch.hosts.host_world import Host, HostWorld, decode
from zero.launch.job import MOST_BYTES, Job
from zero.launch.launch_messages import LaunchError

WORLD = HostWorld((Host("n1", ("0", "1")), Host("n3", ("2",))))
HOSTILE = [
    "", " ", "a b", "it's", '"', "'\"'\"'", "$HOME", "`id`", "$(id)", "\\", "\\n", "a\nb", "\n", "\t", "*", "?", "~",
    "!x", ";", "&", "|", ">", "#", "(", "{a,b}", "%n", "%h", "%%", "%", ":", "--", "-m", "--stdin", "K=V",
    "é", "日本", "\u2028",
    "\x01", "\x7f", "a\rb",
]  # fmt: skip
SHOW = "import json, os, sys\nprint(json.dumps([sys.argv[1:], dict(os.environ), os.getcwd()]))"


def request(*words: str) -> args.RunRequest:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    args.add_arguments(parser)
    return args.request(parser.parse_args(words))


def job(*words: str, environment: dict[str, str] | None = None, folder: str = "/home/me") -> Job:
    return Job(request(*words), WORLD, "n1", 29500, environment or {}, folder)


def test_slurm_is_one_launcher_per_node() -> None:
    (command,) = backends.commands(job("--launcher", "slurm", "--launcher_args=--partition 'a b'", "t.py"))
    python, place = shlex.quote(sys.executable), f"--world={WORLD.encode()} --master_addr=n1 --master_port=29500"
    node = f"{python} -u -m zero run --no_ssh --launcher=slurm {place} --stdin --no_env_files -- t.py"
    assert command.words == [
        "srun", "--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--nodelist=n1,n3", "--kill-on-bad-exit=0",
        "--wait=60", "--cpu-bind=none", "--input=0", "--export=ALL", "--partition", "a b",
        "sh", "-c", f"cd /home/me && exec {node}",
    ]  # fmt: skip


def test_flags_for_the_nodes_go_along() -> None:
    flags = ["--module", "--max_restarts=3", "--min_nodes=1", "--max_nodes=2", "--shutdown_timeout=9", "--log_dir=-x",
             "--bind_cores_to_rank", "--bind_core_list=0-3"]  # fmt: skip
    words = job(*flags, "mine", "--", "x").node_words("1")
    there = request(*words[words.index("run") + 1 :])
    asked = request(*flags, "mine", "--", "x")
    kept = ("script", "script_args", "module", "no_python", "elastic", "log_dir", "bind_cores")
    assert all(getattr(there, name) == getattr(asked, name) for name in (*kept, "bind_core_list"))
    assert (there.script_args, there.log_dir, there.hosts.node_rank) == (("--", "x"), "-x", 1)
    assert (there.master_addr, there.master_port) == ("n1", 29500)
    assert decode(there.hosts.world or "") == WORLD


@pytest.mark.parametrize(
    ("flags", "given"),
    [
        ((), False),
        (("--as-deepspeed",), True),
        (("--as-deepspeed", "--no_python"), True),
        (("--as-deepspeed", "--no_local_rank"), False),
        (("--as-deepspeed", "--launcher", "slurm"), False),  # as DeepSpeed's runners of Slurm and MPI
        (("--as-deepspeed", "--launcher", "openmpi"), False),
    ],
    ids=str,
)
def test_a_local_rank_comes_before_the_arguments_where_deepspeed_gives_one(flags: tuple, given: bool) -> None:
    asked = job(*flags, "t.py", "--lr", "1")
    words = asked.node_words("1")
    for made in asked.request, request(*words[words.index("run") + 1 :]):
        command = made.command(3)
        assert command[command.index("t.py") :] == ["t.py", *["--local_rank=3"] * given, "--lr", "1"]


def lines_for_sh(made: Job) -> list[str]:
    """What a shell on each host gets, worked out from the command lines as the launcher's program does."""
    found = backends.commands(made)
    name = made.request.hosts.launcher
    if name == "ssh":
        return [command.words[-1] for command in found]
    (words,) = (command.words for command in found)
    if name == "slurm":
        return [words[-1]] * len(made.world.hosts)
    parts, rest = [], words
    while ":" in rest:
        parts.append(rest[: rest.index(":")])
        rest = rest[rest.index(":") + 1 :]
    return [part[-1] for part in (*parts, rest)]


@pytest.mark.parametrize("shell", [shell for shell in ("sh", "bash") if shutil.which(shell)])
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_real_shell_hands_over_every_argument(tmp_path: Path, launcher: str, shell: str) -> None:
    folder = tmp_path / "it's a $HOME %n `dir`"
    folder.mkdir()
    # In the place of ours: python -m looks into the folder first.
    (folder / "zero.py").write_text(SHOW)
    environment = {f"V{number}": text for number, text in enumerate(HOSTILE)}
    made = job("--launcher", launcher, "--", "t.py", *HOSTILE, environment=environment, folder=str(folder))
    lines = lines_for_sh(made)
    assert len(lines) == 2
    for node, line in enumerate(lines):
        ended = subprocess.run(
            [shell, "-c", line], capture_output=True, cwd="/", check=False, env={"PATH": os.environ["PATH"]}
        )
        assert ended.returncode == 0, ended.stderr
        words, variables, where = json.loads(ended.stdout)
        assert words[words.index("--") + 1 :] == ["t.py", *HOSTILE]
        assert {name: variables[name] for name in environment} == environment
        assert where == str(folder)
        there = request(*words[1:])
        assert there.hosts.node_rank == (None if launcher == "slurm" else node)
        assert (there.script_args, there.hosts.no_ssh) == (tuple(HOSTILE), True)


def test_the_line_printed_for_a_shell_is_the_command() -> None:
    for launcher in LAUNCHERS:
        for command in backends.commands(job("--launcher", launcher, "--", "t.py", *HOSTILE)):
            found = shlex.split(command.line())
            assert found[len(command.environment) :] == command.words


@pytest.mark.skipif(shutil.which("ssh") is None, reason="there is no ssh")
def test_ssh_itself_takes_the_options() -> None:
    command = backends.commands(job("--ssh_port", "2222", "t.py"))[0].words
    # -G prints the settings that would hold, and connects to nothing.
    ended = subprocess.run([command[0], "-G", *command[1:]], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    said = set(ended.stdout.splitlines())
    assert {"batchmode yes", "port 2222", "serveraliveinterval 2", "serveralivecountmax 3", "requesttty false"} <= said


def test_a_line_that_no_program_takes_is_refused() -> None:
    with pytest.raises(LaunchError, match=rf"has \d+ bytes, more than the {MOST_BYTES} that a program takes"):
        backends.commands(job("t.py", "x" * MOST_BYTES))
    made = job("t.py", folder="/")
    left = MOST_BYTES - len(made.shell(["echo", "x"])) + 1
    longest = made.shell(["echo", "x" * left])
    assert len(longest) == MOST_BYTES
    ended = subprocess.run(["sh", "-c", longest], capture_output=True, check=True)
    assert ended.stdout == b"x" * left + b"\n"
    with pytest.raises(LaunchError, match=f"has {MOST_BYTES + 1} bytes"):
        made.shell(["echo", "x" * (left + 1)])


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A hostfile, in a folder with a script where nothing else is set."""
    for name in [name for name in os.environ if name.startswith(("PYTHON", "SLURM", "OMP", "TORCH", "CUDA", "ZERO"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.py").touch()
    (tmp_path / "H").write_text("n1 slots=2\nn2 slots=4\nn3 slots=3\n")
    return "H"


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_dry_run_prints_what_would_run_where(
    hosts: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, launcher: str
) -> None:
    monkeypatch.setenv("ZERO_SECRET", "of a job that this one is part of")
    spec = ["--include", "n3:2,0@n1"]
    assert main(["run", "-H", hosts, *spec, "--launcher", launcher, "--dry-run", "t.py", "a b"]) == 0
    lines = capsys.readouterr().out.splitlines()
    comments = [line for line in lines if line.startswith("#")]
    assert comments == ["# n1: ranks 0 to 1 on devices 0,1", "# n3: ranks 2 to 3 on devices 0,2"]
    commands = [line for line in lines if not line.startswith("#")]
    assert len(commands) == (2 if launcher == "ssh" else 1)
    for line in commands:
        assert re.search(r"--world=(\S+)", line) and "n2" not in line
        assert decode(re.search(r"--world=(\S+)", line)[1]).hosts == (Host("n1", ("0", "1")), Host("n3", ("0", "2")))
        assert "--master_addr=n1" in line and "of a job" not in line


def test_dry_run_inside_an_allocation(
    hosts: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[07-08],m5")
    monkeypatch.setenv("SLURM_GPUS_PER_NODE", "a100:2")
    assert main(["run", "--launcher", "slurm", "-e", "n08:1", "--dry-run", "t.py"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == [
        "# n07: ranks 0 to 1 on devices 0,1", "# n08: rank 2 on device 0", "# m5: ranks 3 to 4 on devices 0,1",
    ]  # fmt: skip
    assert lines[3].startswith("srun --nodes=3 --ntasks=3 --ntasks-per-node=1 --nodelist=n07,n08,m5 ")


def test_a_node_of_srun_knows_its_place(
    hosts: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user's own `srun --ntasks-per-node=1 zero run --launcher slurm --no_ssh`, and a node of ours."""
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-3]")
    monkeypatch.setenv("SLURM_TASKS_PER_NODE", "1(x3)")
    monkeypatch.setenv("SLURMD_NODENAME", "n2")
    words = ["--launcher", "slurm", "--no_ssh", "--num_gpus", "2", "--min_nodes", "2", "--dry-run", "t.py"]
    assert main(["run", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in lines] == [
        ["RANK=2", "LOCAL_RANK=0", "WORLD_SIZE=6"], ["RANK=3", "LOCAL_RANK=1", "WORLD_SIZE=6"],
    ]  # fmt: skip


def test_the_default_hostfile_is_taken_where_it_is(
    hosts: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hostfile, "DEFAULT", hosts)
    assert main(["run", "--dry-run", "t.py"]) == 0
    said = capsys.readouterr()
    assert said.err == "zero run: the hosts are those of H\n"
    assert "# n3: ranks 6 to 8 on devices 0,1,2" in said.out.splitlines()
    assert main(["run", "--hostfile", "", "--no_ssh", "--node_rank", "0", "--dry-run", "t.py"]) == 2
    assert "--no_ssh: give --hostfile" in capsys.readouterr().err


CANNOT = """\
-H H --min_nodes 2 --launcher openmpi
    --min_nodes: openmpi ends all hosts when one is lost; use --launcher ssh
-H G
    --hostfile: there is no file 'G'; leave it out to run on this machine only
-H H --num_nodes 2 --max_nodes 3
    --num_nodes and --max_nodes: give one of them
-H H --max_nodes 3
    --max_nodes: give --min_nodes, too, with how many hosts the job goes on
-H H --nnodes 3:2
    --min_nodes: got 3, more than the 2 of --max_nodes
-H H --min_nodes 4
    --min_nodes: got 4, but the job has 3 hosts: n1:0,1, n2:0,1,2,3, n3:0,1,2
-H H --no_ssh --node_rank 3
    --node_rank: got 3, wanted 0 to 2: 3 hosts: n1:0,1, n2:0,1,2,3, n3:0,1,2
-H H --no_ssh --dry-run
    --no_ssh: give --node_rank too, from 0 on the first host to the number of hosts less 1
--no_ssh --node_rank 0
    --no_ssh: give --hostfile, the same on every host
--node_rank 0
    --node_rank: means something with --no_ssh only, where each host starts itself
--launcher slurm
    --launcher slurm: there is no hostfile, and this is not inside an allocation (SLURM_JOB_NODELIST is not set)
--launcher slurm --ssh_port 22
    --ssh_port: slurm does not ask us; put the port into ~/.ssh/config
--no_ssh --ssh_port 22
    --ssh_port and --no_ssh: give one of them
--bind_core_list 1
    --bind_core_list: says which cores --bind_cores_to_rank binds to; give both
--bind_cores_to_rank --bind_core_list 3,1
    --bind_core_list: got '3,1'; wanted cores from low to high, and none twice
--bind_cores_to_rank --bind_core_list 1,x
    --bind_core_list: got 'x' in '1,x', wanted a core or first-last
-H H --env_file E
    --env_file: there is no file 'E'
-H L --dry-run
    host 'localhost' is another machine to each of the hosts; give it the name that the others know it by
"""


@pytest.mark.parametrize(("given", "told"), cases(CANNOT))
def test_what_cannot_be_started_and_what_is_said(
    hosts: str, given: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("L").write_text("localhost slots=1\nn2 slots=1\n")
    assert main(["run", *given.split(), "t.py"]) == 2
    assert capsys.readouterr().err == f"zero run: error: {told}\n"
