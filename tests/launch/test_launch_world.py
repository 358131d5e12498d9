"""Every rank learns who it is, which devices are its host's and which variables are the job's; unequal hosts, too."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest
from launching import Launchers
from test_hosts import said

from zero.launch.args.hosts import HostFlags
from zero.launch.args.run import RunRequest
from zero.launch.hosts import environment
from zero.launch.hosts.addresses import is_this_machine
from zero.launch.hosts.devices import on_node, visible
from zero.launch.hosts.host_world import Host, HostWorld
from zero.launch.job import job_of, node_of
from zero.launch.node.node_plan import plan

UNEQUAL = HostWorld((Host("n1", ("0", "1", "3")), Host("n2", ("5",)), Host("n3", ("0", "1"))))
ASKED = RunRequest("t.py", (), None, None, None, None, False, False, 0, None, False)


def asked(num_gpus: int | None = None, num_nodes: int | None = None, **flags) -> RunRequest:
    return replace(ASKED, num_gpus=num_gpus, num_nodes=num_nodes, hosts=HostFlags(**flags))


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, and an environment with nothing that speaks of devices, hosts or ranks."""
    for name in [name for name in os.environ if name.startswith(("CUDA", "SLURM", "OMP", "DS_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


# The world.


def test_a_node_finds_itself() -> None:
    assert node_of(asked(no_ssh=True, node_rank=2), UNEQUAL, {"SLURMD_NODENAME": "n1"}) == 2
    assert node_of(asked(no_ssh=True), UNEQUAL, {"SLURMD_NODENAME": "n3"}) == 2
    assert said(node_of, asked(no_ssh=True), UNEQUAL, {"SLURMD_NODENAME": "x"}) == (
        "host 'x' is not one of the job's: n1, n2, n3"
    )
    assert said(node_of, asked(no_ssh=True), UNEQUAL, {}).startswith("--no_ssh: give --node_rank too")


# Devices.


@pytest.mark.parametrize(
    ("text", "devices"),
    [
        ("0,1", ("0", "1")), (" 3 , 1 ", ("3", "1")), ("", ()), ("-1", ()), ("0,-1,2", ("0",)), ("0,,2", ("0",)),
        ("GPU-8f2a,MIG-1/0/0", ("GPU-8f2a", "MIG-1/0/0")), ("NoDevFiles", ()),
    ],
)  # fmt: skip
def test_visible_devices_are_names(text: str, devices: tuple[str, ...]) -> None:
    assert visible({"CUDA_VISIBLE_DEVICES": text}) == devices
    assert visible({}) is None


def test_a_node_that_sees_a_part_of_its_devices_counts_those() -> None:
    assert on_node(("0", "1"), {"CUDA_VISIBLE_DEVICES": "6,7,3"}) == ("6", "7")
    assert on_node(("2",), {"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b,GPU-c"}) == ("GPU-c",)
    assert on_node(("2",), {}) == ("2",)
    for nothing in ("NoDevFiles", ""):
        assert on_node(("2",), {"CUDA_VISIBLE_DEVICES": nothing}) == ()
    text = "there is no device 2: CUDA_VISIBLE_DEVICES has 2: 6,7"
    assert said(on_node, ("0", "2"), {"CUDA_VISIBLE_DEVICES": "6,7"}) == text


def shared_devices(request: RunRequest, gpus: int) -> tuple[int, str | None]:
    made = plan(request, gpus)
    return made.ranks, made.shared.get("CUDA_VISIBLE_DEVICES")


def test_devices_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shared_devices(asked(), 4) == (4, None)
    assert shared_devices(asked(include="localhost:1,3"), 4) == (2, "1,3")
    assert shared_devices(asked(exclude=f"{socket.gethostname()}:0"), 3) == (2, "1,2")
    assert (
        said(plan, asked(include="localhost:4"), 4) == "--include: host 'localhost' has no slot '4'; it has 0, 1, 2, 3"
    )
    assert said(plan, asked(include="elsewhere"), 4) == "--include: there is no host 'elsewhere'; there is localhost"
    assert said(plan, asked(include="localhost:0"), 0) == (
        "--include and --exclude choose from a hostfile's slots or from GPUs, and no GPU is visible"
    )
    # What the user has hidden stays hidden, and what is left keeps its name.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,5,MIG-0-3")
    assert shared_devices(asked(), 3) == (3, None)
    assert shared_devices(asked(include="localhost:5,MIG-0-3"), 3) == (2, "5,MIG-0-3")
    assert said(plan, asked(include="localhost:0"), 3).endswith("has no slot '0'; it has GPU-a, 5, MIG-0-3")


def test_a_node_of_slurm_takes_the_devices_that_slurm_gave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "n3")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,7")
    made = plan(asked(world=UNEQUAL.encode(), no_ssh=True), 2)
    assert (made.node, made.shared["CUDA_VISIBLE_DEVICES"]) == (2, "6,7")
    assert [made.environment(local)["RANK"] for local in range(2)] == ["4", "5"]


def test_which_names_are_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "n1.cluster")
    assert [is_this_machine(name) for name in ("localhost", "n1", "n1.cluster", "127.0.0.1", "::1")][:4] == [True] * 4
    assert not any(is_this_machine(name) for name in ("n2", "n1.elsewhere", "n10", "192.0.2.1"))


# Variables.


def test_variables_that_go_to_the_other_hosts() -> None:
    here = {
        "ATEN_CPU_CAPABILITY": "avx2", "MKL_CBWR": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2",
        "NCCL_DEBUG": "INFO", "PYTHONPATH": "/x", "PYTORCH_CUDA_ALLOC_CONF": "a:1", "OMP_NUM_THREADS": "3",
        "UCX_TLS": "tcp", "PATH": "/bin", "HOME": "/root", "RANK": "3", "TORCHELASTIC_RUN_ID": "x", "MY_NCCL": "x",
        "PYTHON_F%%": "() {",
    }  # fmt: skip
    expected = [
        *("ATEN_CPU_CAPABILITY", "MKL_CBWR", "NCCL_DEBUG", "OMP_NUM_THREADS", "ONEDNN_MAX_CPU_ISA"),
        *("PYTHONPATH", "PYTORCH_CUDA_ALLOC_CONF", "UCX_TLS"),
    ]
    assert environment.forwarded(here) == {name: here[name] for name in expected}


def test_lines_of_a_file() -> None:
    text = (
        "\n# a comment\nA=1\n  B = \nexport C=x y\r\nD='it # is'  # said\nE=\"a 'b'\"\nF=a#b # c\nG=#fff\nH=x=y=$HOME\n"
        "exportI=1\nA=2\nJ=a'b\nK= # nothing\nL=\u00e9"
    )
    problems: list[str] = []
    assert environment.parse(text.replace("B = ", "B="), "F", problems) == {
        "A": "2", "B": "", "C": "x y", "D": "it # is", "E": "a 'b'", "F": "a#b", "G": "#fff", "H": "x=y=$HOME",
        "exportI": "1", "J": "a'b", "K": "", "L": "\u00e9",
    }  # fmt: skip
    assert problems == []


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("NCCL_DEBUG", "'NCCL_DEBUG': wanted NAME=VALUE"),
        ("export", "'export': wanted NAME=VALUE"),
        ("A B=1", "'A B' is not the name of a variable (no spaces around the =)"),
        ("A =1", "'A ' is not the name of a variable (no spaces around the =)"),
        ("=1", "'' is not the name of a variable (no spaces around the =)"),
        ("1A=1", "'1A' is not the name of a variable (no spaces around the =)"),
        ("A='x", '"A=\'x": the quotes do not match, or something follows them'),
        ("A='x'y", "\"A='x'y\": the quotes do not match, or something follows them"),
        ("A=\0", "A: no value can have a zero byte in it"),
        ("WORLD_SIZE=2", "WORLD_SIZE is set by the launcher; use --num_nodes"),
        ("CUDA_VISIBLE_DEVICES=1", "CUDA_VISIBLE_DEVICES is set by the launcher; use --include"),
        (
            "ZERO_SECRET=1",
            "ZERO_SECRET is set by the launcher; use the environment of each host's launcher, with --no_ssh",
        ),
    ],
)
def test_bad_lines_and_what_is_said(line: str, problem: str) -> None:
    problems: list[str] = []
    assert environment.parse(f"A=1\n\n{line}", "F", problems) == {"A": "1"}
    assert problems == [f"F:3: {problem}"]


def test_a_later_file_wins(alone: Path) -> None:
    home = alone.parent / "home"
    (home / ".deepspeed_env").write_text("A=1\nB=1\nC=1\nD=1\nE=1")
    (home / ".zero_env").write_text("B=2\nC=2\nD=2\nE=2")
    (alone / ".deepspeed_env").write_text("C=3\nD=3\nE=3")
    (alone / ".zero_env").write_text("D=4\nE=4")
    (alone / "more").write_text("E=5")
    found = environment.from_files(os.environ, alone, "more")
    assert found.values == {"A": "1", "B": "2", "C": "3", "D": "4", "E": "5"}
    assert [Path(file).name for file in found.files] == [".deepspeed_env", ".zero_env"] * 2 + ["more"]
    assert environment.from_files(os.environ, alone, "more", usual=False).values == {"E": "5"}
    (home / "mine").write_text("A=9")
    assert environment.from_files({**os.environ, "DS_ENV_FILE": "mine"}, alone).values["A"] == "9"
    # In the home folder itself each file is read once.
    assert len(environment.from_files(os.environ, home).files) == 2
    assert environment.from_files({}, alone.parent).values == {}


def test_all_that_is_wrong_with_the_files_is_said_at_once(alone: Path) -> None:
    home = alone.parent / "home"
    (home / ".deepspeed_env").mkdir()
    (home / ".zero_env").write_bytes(b"A=\xff")
    (alone / ".zero_env").write_text("A\nB=1\nRANK=1")
    assert said(environment.from_files, os.environ, alone).split("\n  ") == [
        f"{home}/.deepspeed_env: cannot be read: Is a directory",
        f"{home}/.zero_env: is not text (byte 2 is not UTF-8)",
        f"{alone}/.zero_env:1: 'A': wanted NAME=VALUE",
        f"{alone}/.zero_env:3: RANK is set by the launcher; use --node_rank",
    ]


def test_files_reach_the_ranks_of_one_machine_and_of_many(alone: Path) -> None:
    (alone / ".zero_env").write_text("OMP_NUM_THREADS=7\nNCCL_DEBUG=WARN\nTOKEN=secret")
    (alone / "H").write_text("n1 slots=2\nn2 slots=1")
    made = plan(asked(num_gpus=2), 0)
    assert made.shared == {"OMP_NUM_THREADS": "7", "NCCL_DEBUG": "WARN", "TOKEN": "secret"}
    # Names only: a value may be a secret.
    assert made.notes == (f"OMP_NUM_THREADS, NCCL_DEBUG, TOKEN from {alone}/.zero_env",)
    there = job_of(asked(hostfile="H"), {"NCCL_DEBUG": "INFO", "UCX_TLS": "x"}, alone)
    assert there is not None and there.notes == made.notes
    assert there.environment == {"NCCL_DEBUG": "WARN", "OMP_NUM_THREADS": "7", "UCX_TLS": "x"}
    assert there.secrets == {"TOKEN": "secret"}  # which is on no command line
    # A node gets them on its command line, and reads no file again.
    assert plan(asked(num_gpus=2, no_env_files=True), 0).shared.keys() == {"OMP_NUM_THREADS"}


# One host that is this machine, in earnest.


def test_one_host_that_is_this_machine_runs(launchers: Launchers, alone: Path) -> None:
    (alone / "H").write_text(f"n1 slots=8\n{socket.gethostname()} slots=4")
    (alone / ".zero_env").write_text("MINE='a b'")
    names = ("RANK", "WORLD_SIZE", "CUDA_VISIBLE_DEVICES", "MINE")
    (alone / "t.py").write_text(
        f"import os, sys\nsys.stdout.write('|'.join([os.environ[name] for name in {names!r}] + sys.argv[1:]) + chr(10))"
    )
    words = ("run", "-H", "H", "-i", f"{socket.gethostname()}:1,3", "t.py", "--", "-x")
    ended = launchers.run(*words, environment=os.environ, folder=alone)
    assert ended.returncode == 0, ended.stderr
    assert sorted(ended.stdout.splitlines()) == ["0|2|1,3|a b|--|-x", "1|2|1,3|a b|--|-x"]
