"""`zero doctor` lets ranks talk, and says of what is missing what it is for and how to get it."""

from __future__ import annotations

import shutil
import socket
from collections import namedtuple
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from marks import longer

from zero.__main__ import main
from zero.tools import doctor
from zero.tools.doctor import NOTE, OK, PROBLEM, Finding
from zero.tools.report.collectives import collectives, problems
from zero.tools.report.machine import gather


@pytest.mark.ranks(2)
def test_each_collective_gives_what_it_should_and_one_that_does_nothing_is_seen() -> None:
    where = dist.get_rank(), 2, torch.device("cpu")
    names = {name for name, *_ in collectives(*where)}
    assert {"broadcast", "all-reduce", "all-gather", "reduce-scatter", "all-to-all"} <= names
    assert problems(*where) == []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", lambda values: None)
        assert problems(*where) == [f"all-reduce: got [{where[0] + 1.0}], wanted [3.0]"]


@pytest.mark.parametrize(("backend", "state"), longer(("gloo", OK), ("no_backend", PROBLEM)))
def test_ranks_are_started_and_their_word_is_taken(backend: str, state: str) -> None:
    found = doctor.collectives(backend, 2)
    assert (found.name, found.state) == (f"{backend} on 2 ranks", state)
    assert state == OK or "no_backend" in found.text


def states(findings: object) -> dict[str, tuple[str, str]]:
    return {name: (state, text) for name, state, text in findings}


def test_programs_that_are_missing_are_notes_that_say_how_to_get_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PATH", "CXX", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.setenv(name, "")
    found = states(doctor.programs(gpus=True))
    assert {"C++ compiler", "nvcc", "ssh", "mpirun"} == found.keys()
    for name, (state, text) in found.items():
        if name != "nvcc" or state != OK:  # which is found in /usr/local/cuda, too
            assert state == NOTE and "To get it: " in text, name
    assert "nvcc" not in states(doctor.programs(gpus=False))


PROGRAMS = {  # what stands there, and what is said of it
    "c++": ("#!/bin/sh\nexit 0", ""),
    "nvcc": ("#!/no/such/interpreter", "No such file or directory"),
    "ssh": ("#!/bin/sh\nsleep 60 & wait", "/ssh -V` has not ended after 0.3 s"),
    "mpirun": (
        "#!/bin/sh\necho mpirun: libmpi.so.40: cannot open shared object file >&2; exit 127",
        "exit status 127: mpirun: libmpi.so.40: cannot open shared object file",
    ),
}


def test_a_program_that_does_not_run_is_a_note_with_what_it_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, (text, _) in PROGRAMS.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(doctor, "_TRY_SECONDS", 0.3)
    found = states(doctor.programs(gpus=True))
    assert found.pop("C++ compiler") == (OK, str(tmp_path / "c++"))
    assert found.keys() == {"nvcc", "ssh", "mpirun"}
    for name, (state, text) in found.items():
        assert state == NOTE and PROGRAMS[name][1] in text


def test_a_port_that_is_taken_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        monkeypatch.setattr(doctor, "PORT", other.getsockname()[1])
        state, text = states(doctor.network())[f"port {doctor.PORT}"]
    assert state == NOTE and "--master_port" in text
    assert states(doctor.network())[f"port {doctor.PORT}"] == (OK, "free")


def test_little_room_is_a_note_and_none_a_problem(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for free, state in ((2**20, PROBLEM), (2 * 2**30, NOTE), (2**40, OK)):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: namedtuple("Usage", "free")(free))
        (disk,) = doctor.disks([tmp_path, tmp_path])
        assert disk.state == state
        if state == PROBLEM:
            assert states(doctor.limits()).get("shared memory", (NOTE,))[0] == NOTE
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda _: (256, 256))
    assert states(doctor.limits())["open files"][0] == NOTE


@pytest.mark.parametrize("problems", [(), ("CPU kernels are missing",)])
def test_the_exit_status_says_whether_there_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, problems: tuple[str, ...]
) -> None:
    facts = gather() | {"problems": problems, "gpus": ()}
    monkeypatch.setattr(doctor, "gather", lambda: facts)
    monkeypatch.setattr(
        doctor, "collectives", lambda backend, ranks: Finding(f"{backend} on {ranks} ranks", OK, "well")
    )
    monkeypatch.setattr(doctor, "disks", lambda folders: [])
    assert main(["doctor"]) == len(problems)
    said = capsys.readouterr().out.splitlines()
    assert ("problem  kernels: CPU kernels are missing" in said) == bool(problems)
    assert said[-1].startswith("1 problem, " if problems else "0 problems, ")
    assert "ok       gloo on 2 ranks: well" in said
