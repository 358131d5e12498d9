"""`zero report` says what is there, what is missing and what follows; a closed pipe ends the command line quietly."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from marks import longer
from nodes import environment

from zero.__main__ import main
from zero.kernels import native
from zero.tools.report.machine import Facts, gather, lines, measure

compiled = pytest.mark.skipif(native.load() is None, reason="no compiled CPU kernels")

# A process that starts with this text has no compiled kernels.
WITHOUT_KERNELS = """
import importlib.abc, sys

class Forbid(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name in ("zero._cpu", "zero._cuda"):
            raise ImportError(f"{name} is not built")

sys.meta_path.insert(0, Forbid())
from zero.__main__ import main
from zero.kernels import native
status = main(["report"])
print(native.missing_text())
native.load()
sys.exit(status)
"""
HELP = """
import sys
from zero.__main__ import main
try:
    main(["report", "--help"])
except SystemExit:
    sys.exit("torch" in sys.modules)
"""


def python(code: str) -> subprocess.CompletedProcess:
    how = {"capture_output": True, "text": True, "timeout": 120, "check": False}
    return subprocess.run([sys.executable, "-c", code], env=environment(), **how)


@pytest.fixture(scope="module")
def facts() -> Facts:
    return gather()


def test_the_report_names_versions_kernels_and_machine(capsys: pytest.CaptureFixture, facts: Facts) -> None:
    status = main(["report", "--no-measure"])
    said = capsys.readouterr().out
    for text in ("zero", torch.__version__, "gloo there", "CPU kernels", "CUDA kernels", "not measured"):
        assert text in said
    assert status == (1 if "problem: " in said else 0)
    assert main(["report", "--no-measure", "--json"]) == status
    said = json.loads(capsys.readouterr().out)
    assert said.pop("speed") is None
    assert said == facts
    assert status == (1 if said["problems"] else 0)


def test_missing_kernels_are_a_problem_with_the_words_of_the_warning() -> None:
    ended = python(WITHOUT_KERNELS)
    assert ended.returncode == 1, ended.stderr
    *report, text = ended.stdout.splitlines()
    assert report[-1] == f"problem: {text}"
    assert "zero._cpu is not built" in text and "plain torch operations" in text and "ZERO_REQUIRE_NATIVE=1" in text
    assert "not measured, as there are no compiled CPU kernels" in ended.stdout
    assert ended.stderr.count(text) == 1 == ended.stderr.count("missing"), "the report itself must not warn"


def test_a_gpu_without_its_kernels_is_shown_as_such(facts: Facts) -> None:
    gpu = {"name": "Some GPU", "capability": "9.0", "memory_nbytes": 80 << 30, "runs_kernels": False}
    there = facts | {"gpus": [gpu], "cuda": {"compiled": ["80", "90"], "missing": None}}
    assert any("Some GPU, compute capability 9.0, 80.0 GiB, runs plain torch" in line for line in lines(there, None))
    there = there | {"gpus": [gpu | {"runs_kernels": True}]}
    text = "\n".join(lines(there, None))
    assert "GiB, runs the kernels" in text and "compiled for 80 90" in text


@compiled
def test_the_measurement_compares_the_step_with_memory(facts: Facts) -> None:
    assert any(f"{facts['cpu']['picked']} in use" in line for line in lines(facts, None))
    speed = measure(seconds=0.0, numel=1 << 16)
    assert [speed[name] for name in ("numel", "threads", "rounds")] == [1 << 16, torch.get_num_threads(), 3]
    fastest = max(speed["copy"], speed["update"])
    assert speed["mixed_share"] == pytest.approx(100 * speed["mixed"] / fastest)
    assert speed["fp32_share"] == pytest.approx(100 * speed["fp32"] / fastest)
    text = "\n".join(lines(facts, speed))
    assert "26 B/parameter" in text and "28 B/parameter" in text and "not measured" not in text


def test_help_imports_no_torch() -> None:
    ended = python(HELP)
    assert ended.returncode == 0 and "--no-measure" in ended.stdout, ended.stderr


@pytest.mark.parametrize(
    ("arguments", "buffered"),
    [(["schema"], False), (["run", "--help"], True), *longer((["report", "--no-measure"], True))],
)
def test_a_closed_pipe_ends_the_command_quietly(arguments: list[str], buffered: bool) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, *([] if buffered else ["-u"]), "-m", "zero", *arguments]
    with os.fdopen(writer, "w") as pipe:
        ended = subprocess.run(
            command, env=environment(), stdout=pipe, stderr=subprocess.PIPE, timeout=120, check=False
        )
    assert ended.stderr == b""
    if arguments[0] != "run":  # argparse looks over it where nothing is buffered
        assert ended.returncode == 141
