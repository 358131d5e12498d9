"""The promise of `make gpu`: every part runs whatever others found, all of it is JSON, and a second call goes on."""

from __future__ import annotations

import importlib.util
import json
import shlex
import sys
import threading
from pathlib import Path
from types import ModuleType

import pytest
from nodes import eventually

SOURCE = Path(__file__).resolve().parent.parent.parent / "benchmarks" / "gpu.py"
TWO_TESTS = """
from pathlib import Path

HERE = Path(__file__).parent

def test_one():
    with (HERE / "ran").open("a") as file:
        file.write("one ")

def test_two():
    with (HERE / "ran").open("a") as file:
        file.write("two ")
    assert (HERE / "mended").exists(), "not mended"
"""


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """benchmarks/gpu.py with small parts, where torch sees no GPU."""
    spec = importlib.util.spec_from_file_location("gpu", SOURCE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (tmp_path / "test_two.py").write_text(TWO_TESTS)
    two_tests = f"{module.PYTEST} -c /dev/null --rootdir {tmp_path} {tmp_path}/test_two.py"
    parts = {
        "dies": module.Part("", None, "-c 'import os; os.abort()'"),
        "tests": module.Part("", None, two_tests),
        "table": module.Part("", None, "-c 'print(\"|  | ms |\\n|--|----|\\n| one step | 3 |\")'"),
        "nothing": module.Part("", "-c 1", None, "it needs a GPU"),
        "absent": module.Part("", None, "-c 1", needs="a-program-that-is-nowhere"),
    }
    monkeypatch.setattr(module, "PARTS", parts)
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")  # as in `make test`: a part is no worker of ours
    monkeypatch.setattr(module, "device", lambda: "")
    return module


def call(gpu: ModuleType, folder: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--out", str(folder), *arguments])
    return gpu.main()


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "lines.jsonl").read_text().splitlines()]


def test_parts(gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    folder = tmp_path / "found"
    assert call(gpu, folder, monkeypatch, "--list") == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(gpu.PARTS)

    assert call(gpu, folder, monkeypatch) == 1
    said = capsys.readouterr().out
    assert said.startswith("torch sees no GPU: the parts run on a stand-in")
    assert "failed: test_two.py::test_two" in said and "needs a GPU" in said and "nowhere is not installed" in said
    found = lines(folder)
    statuses = [line["status"] for line in found if "status" in line]
    assert statuses == ["failed", "failed", "passed", "skipped", "skipped"]
    outcomes = {line["test"]: line["outcome"] for line in found if "test" in line}
    assert outcomes == {"test_two.py::test_one": "passed", "test_two.py::test_two": "failed"}
    assert any("not mended" in line.get("text", "") for line in found)
    assert [line["row"] for line in found if "row" in line] == [{"": "one step", "ms": "3"}]

    (tmp_path / "mended").touch()
    assert call(gpu, folder, monkeypatch, "tests", "table", "nothing") == 0
    assert (tmp_path / "ran").read_text() == "one two two "
    assert "table: passed before" in capsys.readouterr().out
    assert lines(folder)[-1]["passed"] == 2 and "failed" not in lines(folder)[-1]

    assert call(gpu, folder, monkeypatch, "table", "--anew") == 0
    assert [line["row"] for line in lines(folder) if "row" in line] == [{"": "one step", "ms": "3"}]
    assert {line["part"] for line in lines(folder)} == set(gpu.PARTS)
    with pytest.raises(SystemExit):
        call(gpu, folder, monkeypatch, "no-such-part")


def test_what_passed_in_the_lines_of_another_folder_is_left_out(
    gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert call(gpu, tmp_path / "lost", monkeypatch, "tests", "table") == 1
    earlier = tmp_path / "lost" / "lines.jsonl"
    with earlier.open("a") as file:
        file.write('{"part": "tests", "te')  # as the machine ended
    (tmp_path / "mended").touch()
    for _ in range(2):  # they are not taken in twice
        assert call(gpu, tmp_path / "found", monkeypatch, "tests", "table", "--again", str(earlier)) == 0
    assert (tmp_path / "ran").read_text() == "one two two "
    outcomes = [line["outcome"] for line in lines(tmp_path / "found") if "test" in line]
    assert sorted(outcomes) == ["failed", "passed", "passed"]
    assert call(gpu, tmp_path / "lost", monkeypatch, "table") == 0 and lines(tmp_path / "lost")
    with pytest.raises(SystemExit):
        call(gpu, tmp_path / "found", monkeypatch, "--again", str(tmp_path / "nowhere"))


def test_a_row_is_there_while_its_program_still_runs(gpu: ModuleType, tmp_path: Path) -> None:
    program = f"""
import pathlib, time
print("|  | ms |\\n|--|--|\\n| a | 3 |\\n| half a r", end="", flush=True)
while not pathlib.Path({str(tmp_path)!r}, "seen").exists():
    time.sleep(0.1)
"""
    gpu.PARTS["table"] = gpu.Part("", None, f"-c {shlex.quote(program)}")
    found = gpu.Lines(tmp_path / "lines.jsonl")
    part = threading.Thread(target=gpu.run_part, args=("table", found, "", 600.0))
    part.start()
    assert eventually(lambda: found.all() == [{"part": "table", "row": {"": "a", "ms": "3"}}])
    (tmp_path / "seen").touch()
    part.join()
    assert found.all()[-1]["status"] == "passed"


def test_a_group_is_a_few_parts_that_share_their_time(
    gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert all(max(ends.values()) < 360 for ends in gpu.GROUPS.values())
    limits = {}
    monkeypatch.setitem(gpu.GROUPS, "first", {"nothing": 100, "table": 200, "absent": 0})
    monkeypatch.setattr(gpu, "device", lambda: "a GPU")
    monkeypatch.setattr(
        gpu,
        "run_part",
        lambda name, found, gpu, limit: limits.update({name: limit}) or found.add(part=name, status="cut"),
    )
    assert call(gpu, tmp_path / "found", monkeypatch, "first") == 1
    assert list(limits) == ["table", "nothing", "absent"] and limits["absent"] == 1.0
    assert 90 < limits["nothing"] <= 100 < 190 < limits["table"] <= 200
    limits.clear()
    call(gpu, tmp_path / "all", monkeypatch)
    assert limits == dict.fromkeys(["dies", "tests"], gpu.SECONDS), "the others, without first"


def test_a_part_whose_time_is_over_is_ended(gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gpu.PARTS, "dies", gpu.Part("", None, "-c 'import time; time.sleep(3600)'"))
    monkeypatch.setattr(gpu, "SECONDS", 0.5)
    assert call(gpu, tmp_path / "found", monkeypatch, "dies", "nothing") == 1
    assert [line["status"] for line in lines(tmp_path / "found")] == ["cut", "skipped"]
