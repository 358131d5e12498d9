"""The promise: behind each of four doors `import deepspeed` gives zero; where none is open it is what it was."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import zero

ROOT = Path(__file__).parents[2]
VERSION = f"0.19.6+zero{zero.__version__}"
REAL = "9.9"  # of a DeepSpeed that is installed
# One write: lines of two ranks are not to mix.
ASK = "import importlib.metadata as m, deepspeed as d; print(d.__version__ + f\" {m.version('deepspeed')}\\n\", end='')"
PYTHON = shlex.quote(sys.executable)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """A script that prints what deepspeed is, beside a folder in which another one is installed."""
    real = tmp_path / "real"
    for path, text in {
        "deepspeed/__init__.py": f"__version__ = '{REAL}'",
        "deepspeed-9.9.dist-info/METADATA": f"Metadata-Version: 2.1\nName: deepspeed\nVersion: {REAL}\n",
    }.items():
        (real / path).parent.mkdir(parents=True, exist_ok=True)
        (real / path).write_text(text)
    path = tmp_path / "ask.py"
    path.write_text(ASK)
    return path


def run(command: str, script: Path, status: int = 0) -> tuple[list[str], str]:
    """The lines that a command of a shell prints, and what it says beside; `real` comes last on its path."""
    there = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(script.parent / "real")]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["sh", "-c", command],
        env={**os.environ, **there},
        cwd=script.parent,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == status, done.stderr
    return done.stdout.splitlines(), done.stderr


def test_without_a_door_it_is_what_it_was(script: Path) -> None:
    assert run(f"{PYTHON} ask.py", script)[0] == [f"{REAL} {REAL}"]
    asked = shlex.quote("import importlib.util as u; print(u.find_spec('deepspeed'))")
    assert run(f"PYTHONPATH={shlex.quote(str(ROOT))} {PYTHON} -c {asked}", script)[0] == ["None"]
    assert run(f"{PYTHON} -c {shlex.quote(f'import zero.launch; {ASK}')}", script)[0] == [f"{REAL} {REAL}"]


@pytest.mark.parametrize(
    ("command", "times"),
    [
        (f"{PYTHON} -m zero.as_deepspeed ask.py", 1),
        (f"{PYTHON} -m zero.as_deepspeed -c {shlex.quote(ASK)}", 1),
        (f'eval "$({PYTHON} -m zero.as_deepspeed --shell)"; {PYTHON} ask.py', 1),
        (f"{PYTHON} -c {shlex.quote(f'import zero.as_deepspeed; {ASK}')}", 1),
        (f"{PYTHON} -m zero run --as-deepspeed --num_gpus 2 ask.py", 2),
        (f'eval "$({PYTHON} -m zero.as_deepspeed --shell)"; deepspeed --num_gpus 2 ask.py', 2),
    ],
    ids=["python -m", "python -m -c", "shell", "import", "zero run", "deepspeed"],
)
def test_behind_a_door_it_is_zero_and_that_is_said_once(script: Path, command: str, times: int) -> None:
    said, beside = run(command, script)
    assert said == [f"{VERSION} {VERSION}"] * times
    assert beside.count(f"deepspeed is zero, as version {VERSION}; the installed DeepSpeed {REAL} is not used") == 1


def test_each_rank_gets_its_local_rank_and_the_line_that_says_so(script: Path) -> None:
    script.write_text("import os, sys; print(' '.join([*sys.argv[1:], os.environ['LOCAL_RANK']]) + '\\n', end='')")
    door = f"{PYTHON} -m zero run --as-deepspeed --num_gpus 2"
    said, beside = run(f"{door} ask.py a", script)
    assert sorted(said) == ["--local_rank=0 a 0", "--local_rank=1 a 1"]
    assert beside.count("--no_local_rank leaves it out") == 1
    said, beside = run(f"{door} --no_local_rank ask.py a", script)
    assert (sorted(said), beside.count("local_rank")) == (["a 0", "a 1"], 0)


def test_a_process_that_a_script_starts_finds_zero_too(script: Path) -> None:
    script.write_text(
        "import zero.as_deepspeed, subprocess, sys, multiprocessing as mp\n"
        f"def ask():\n    {ASK}\n"
        "if __name__ == '__main__':\n"
        "    child = mp.get_context('spawn').Process(target=ask); child.start(); child.join()\n"
        f"    sys.exit(child.exitcode or subprocess.run([sys.executable, '-c', {ASK!r}]).returncode)\n"
    )
    said, beside = run(f"{PYTHON} ask.py", script)
    assert said == [f"{VERSION} {VERSION}"] * 2
    assert beside.count("deepspeed is zero") == 1


def test_a_door_that_comes_too_late_is_refused(script: Path) -> None:
    _, beside = run(f"{PYTHON} -c 'import deepspeed, zero.as_deepspeed'", script, 1)
    assert "import zero.as_deepspeed before deepspeed, which has looked for deepspeed already" in beside


def test_importing_it_brings_no_torch_and_what_is_missing_is_said(script: Path) -> None:
    code = (
        "import sys, deepspeed\nprint('torch' in sys.modules)\n"
        "for what in (lambda: deepspeed.OnDevice, lambda: deepspeed.runtime.zero.no):\n"
        "    try:\n        what()\n    except AttributeError as error:\n        print(error)\n"
    )
    assert run(f"{PYTHON} -m zero.as_deepspeed -c {shlex.quote(code)}", script)[0] == [
        "False",
        "deepspeed.OnDevice is not in zero, which is here as deepspeed: zero.Init, or torch.device as a context",
        "deepspeed.runtime.zero.no is not in zero, which is here as deepspeed: docs/deepspeed.md says what there is",
    ]


def test_a_name_that_cannot_be_imported_keeps_what_to_use(script: Path) -> None:
    for module, name, use in (
        ("deepspeed", "OnDevice", "zero.Init, or torch.device as a context"),
        ("deepspeed.runtime.zero", "MiCS_Init", "`mics_shard_size` of the JSON; deepspeed.zero.Init does for it"),
    ):
        code = f"try:\n    from {module} import {name}\nexcept ImportError as error:\n    print(error, error.name)"
        said = f"{module}.{name} is not in zero, which is here as deepspeed: {use} {name}"
        assert run(f"{PYTHON} -m zero.as_deepspeed -c {shlex.quote(code)}", script)[0] == [said]


@pytest.mark.long
def test_a_process_alone_has_a_group_once_there_is_an_engine(script: Path) -> None:
    script.write_text(
        "import deepspeed, torch\n"
        "config = {'train_batch_size': 1, 'optimizer': {'type': 'AdamW'}}\n"
        "deepspeed.initialize(model=torch.nn.Linear(2, 2), config=config)\n"
        "print(torch.distributed.get_world_size())\n"
    )
    assert run(f"{PYTHON} -m zero.as_deepspeed ask.py", script)[0] == ["1"]
