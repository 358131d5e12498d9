"""The promise: a mistake has one message, which says what to do, on stderr, and is the exit status: the table of them.

Of an error that ends all ranks alike one rank speaks; of an error of one rank that rank, with its name, and those that
waited for it say why they end, in a few lines. No frame of zero is shown. Mistakes in scripts are in tests/mistakes.py.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest
from launching import ROOT, Launchers
from marks import longer
from mistakes import ARGUMENTS, CHECKPOINTS, CONFIGS, MISTAKES, START, USE
from nodes import environment
from test_import import fresh

from zero.__main__ import _parser, main

SHORT = ("file ends", "three sections", "model first", "meta", "not the same", "nothing whole", "full disk")


def made(launchers: Launchers, folder: Path, names: list[str]) -> None:
    """Have two ranks make these mistakes, one after the other."""
    for name in names:
        (folder / name).mkdir()
        (folder / name / "train.py").write_text(f"{START}\n{MISTAKES[name].lines}\n")
    words = ("run", "--num_gpus", "2", str(ROOT / "tests" / "mistakes.py"), str(folder), *names)
    ended = launchers.run(*words, environment=environment(OMP_NUM_THREADS="1"))
    assert ended.returncode == 0, ended.stderr


def check(folder: Path, name: str) -> None:
    """Message, stream and status of one of them."""
    mistake = MISTAKES[name]
    statuses = [json.loads((folder / f"statuses.{rank}").read_text())[name] for rank in range(2)]
    out = [(folder / name / f"out.{rank}").read_text() for rank in range(2)]
    # What is logged while all is well is not about the mistake.
    logged = [(folder / name / f"err.{rank}").read_text() for rank in range(2)]
    said = [re.sub(r"(?m)^\[zero\] .*\n", "", text) for text in logged]
    everything = "".join(said)
    assert out == ["", ""]
    assert re.sub(r"(?m)^\[rank\d\]: +", "", everything).count(mistake.says) == 1, everything
    assert "zero/engine" not in everything and "zero/core" not in everything, everything
    if mistake.by is None:
        assert statuses == [1, 1]
        assert "" in said and "[rank" not in everything, everything
        assert everything.count("Traceback") == 1
        return
    assert statuses[mistake.by] == 1
    assert said[mistake.by].startswith(f"[rank{mistake.by}]: ")
    other = said[1 - mistake.by]
    assert mistake.also in other and "Traceback" not in other
    assert len(other.splitlines()) <= 4, other


TABLES = {"few": SHORT, "configs": CONFIGS, "arguments": ARGUMENTS, "checkpoints": CHECKPOINTS, "use": USE}


@pytest.mark.parametrize("table", [SHORT, *longer(CONFIGS, ARGUMENTS, CHECKPOINTS, USE)], ids=TABLES)
def test_mistakes_in_scripts(launchers: Launchers, tmp_path: Path, table: Iterable[str]) -> None:
    made(launchers, tmp_path, list(table))
    for name in table:
        check(tmp_path, name)
    assert len(MISTAKES) >= 40


USAGE = "usage: zero run [options] script [arguments of the script]"
PATH = "a" * 500  # that no file can have
NO_SCRIPT = "there is no script 'aaa"
WORDS = {
    "rn a.py": "zero: error: there is no command 'rn'; did you mean 'run'? There are: run, check, ",
    "a.py": "zero: error: there is no command 'a.py'; did you mean 'zero run a.py'? There are: ",
    "run --num_gpu 2 a.py": f"{USAGE}\nzero run: error: there is no option --num_gpu; did you mean ",
    "run --num_gpus two a.py": "error: argument --num_gpus/--num_accelerators: got 'two', wanted",
    "run --num_gpus 2": f"{USAGE}\nzero run: error: the following arguments are required: script",
    "run --num_gpus 2 b.py": "zero run: error: there is no script 'b.py' in ",
    "run --config b.json a.py": "zero run: error: --config: there is no file 'b.json' in ",
    "run b.json a.py": "zero run: error: 'b.json' is a configuration by its name, and no script; give it by --config b",
    "run --config c.yaml a.py": "c.yaml:\nthe file is YAML; wanted JSON or hjson: an object {...}",
    "run --config c.json a.py": "unknown top-level key 'zero_optimisation'; did you mean 'zero_optimization'?",
    "run --set stage=3 a.py": "unknown top-level key 'stage'; it belongs in 'zero_optimization'",
    "run --set zero_optimization.stage=9 a.py": "zero_optimization.stage: got 9, wanted an integer from 0 to 3",
    "tune --set zero.timeout=no a.py": "zero.timeout: got 'no', wanted a number of at least 1",
    "run --nproc_per_node all a.py": "got 'all', wanted an integer of at least 1",
    "run -m nope.there": "there is no module 'nope'",
    "run --set stage a.py": "zero run: error: --set: got 'stage', wanted KEY=VALUE, such as ",
    "run --rdzv_id 3 a.py": "--rdzv_id: this flag of another launcher is not here: the hosts of",
    "run --num_gpus 0 a.py": "got '0', wanted an integer of at least 1",
    "run --master_port 70000 a.py": "got '70000', wanted a port from 1 to 65535",
    "run --module --no_python a.py": "not allowed with argument",
    "run --launcher impi a.py": "got 'impi', wanted one of ssh, slurm, openmpi, mpich",
    "run --launcher_args ' a.py": "which no shell would split: No closing quotation",
    "run --log_dir a.py a.py": "zero run: error: --log_dir: cannot make a folder in a.py: File exists",
    "run --module nope.there": "there is no module 'nope'",
    "run --no_python nope-program": "there is no program 'nope-program' in PATH",
    "run --num_nodes 2 a.py": "--num_nodes: got 2, but there is this machine only; name others with --hostfile\n",
    "run --world 8 --no_ssh a.py": "--world: got '8', which only the launcher writes; say --num_gpus N",
    "run PATH": NO_SCRIPT,
    "run --config PATH a.py": "--config: there is no file 'aaa",
    "run --hostfile PATH a.py": "File name too long: aaa",
    "check --stagse 3 a.py": "zero check: error: there is no option --stagse; did you mean '--stages'?",
    "check --stages 0,7 a.py": "stages: got [0, 7], wanted some of 0, 1, 2 and 3",
    "tune --space stge a.py": "--space: got 'stge', wanted some of stage, placement, mesh, recomputation, micro_batch",
    "tune --json PATH a.py": "--json: cannot write 'aaa",
    "plan --world 4 --tpp 2": "zero plan: error: there is no option --tpp; did you mean '--tp'?",
    "plan PATH": "wanted module:function",
    "verify none": "zero verify: error: there is no folder none",
    "consolidate PATH out": "there is no folder aaa",
    "config --default --output PATH": "File name too long",
    "config --default --output none/a.json": "--output: cannot write 'none/a.json': No such file or directory",
    "report --run PATH": "File name too long",
}


@pytest.mark.parametrize("line", WORDS)
def test_mistakes_in_command_lines(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.py").write_text("")
    (tmp_path / "c.yaml").write_text("zero_optimization:\n  stage: 3\n")
    (tmp_path / "c.json").write_text('{"zero_optimisation": {"stage": 3}}')
    try:
        status = main(line.replace("PATH", PATH).split())
    except SystemExit as ended:
        status = ended.code
    said = capsys.readouterr()
    assert (status, said.out) == (2, "")
    assert said.err.count(WORDS[line]) == 1, said.err
    assert "Traceback" not in said.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.py", "c.json", "c.yaml"]


def test_zero_alone_prints_its_help(launchers: Launchers, tmp_path: Path) -> None:
    ended = launchers.run(environment=environment(), folder=tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "start a script with one process per rank" in ended.stdout


@pytest.fixture
def two_ranks(launchers: Launchers, tmp_path: Path):
    def run(text: str, *words: str) -> subprocess.CompletedProcess:
        (tmp_path / "train.py").write_text(text)
        words = ("run", *(words or ("--num_gpus", "2")), "train.py")
        return launchers.run(*words, environment=environment(OMP_NUM_THREADS="1"), folder=tmp_path)

    return run


def test_the_launcher_says_that_all_ranks_failed_alike(two_ranks) -> None:
    ended = two_ranks("import zero.config\nzero.config.load('zro.json', 2)\n")
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.count("there is no file 'zro.json'") == 1
    assert re.sub(r"(?s)^Traceback.*ConfigError: config: .*or a dict\n", "", ended.stderr) == (
        "zero run: all ranks failed, with exit code 1\n"
    )


CAUGHT = "try:\n    sys.exit('caught')\nexcept SystemExit as error:\n    assert error.code == 'caught'\n"
ENDS = [
    (f"import sys, zero\n{CAUGHT}sys.exit('no data')\n", 1, "no data\n"),
    *longer(
        (
            "import argparse, zero\nargparse.ArgumentParser(prog='p').parse_args(['--m'])\n",
            2,
            "usage: p [-h]\np: error: unrecognized arguments: --m\n",
        )
    ),
]


@pytest.mark.parametrize(("text", "status", "said"), ENDS)
def test_what_a_script_ends_with_is_said_once(two_ranks, text: str, status: int, said: str) -> None:
    ended = two_ranks(text)
    assert (ended.returncode, ended.stdout) == (status, "")
    assert ended.stderr == f"{said}zero run: all ranks failed, with exit code {status}\n"


def test_the_launcher_names_the_one_rank_that_failed(two_ranks) -> None:
    text = "import os, time, zero\nif os.environ['RANK'] == '1':\n    raise OSError(28, 'full')\ntime.sleep(60)\n"
    ended = two_ranks(text, "--nproc_per_node", "2")
    assert ended.returncode == 1
    *_, error, last = ended.stderr.splitlines()
    assert error == "[rank1]: OSError: [Errno 28] full"
    assert re.fullmatch(r"zero run: rank 1 failed first, with exit code 1 \(pid \d+\)", last)
    assert all(line.startswith("[rank1]: ") for line in ended.stderr.splitlines()[:-1])


def test_what_others_were_told_of_an_error_is_the_same_error(two_ranks) -> None:
    text = (
        "import os, zero\n"
        "told = {'0': ValueError('load_checkpoint: rank 1: the disk is gone'), '1': OSError('the disk is gone')}\n"
        "raise told[os.environ['RANK']]\n"
    )
    said = two_ranks(text).stderr
    assert said.count("Error: ") == 1, said
    assert said.endswith("zero run: all ranks failed, with exit code 1\n")
    assert "all ranks failed" not in two_ranks(text.replace("rank 1: ", "")).stderr, "another error"


def test_a_hook_of_the_script_stays(two_ranks) -> None:
    text = "import sys\nsys.excepthook = lambda *_: print('mine', file=sys.stderr)\nimport zero\nraise ValueError\n"
    said = two_ranks(text).stderr
    assert "mine" in said and "Traceback" not in said


@pytest.mark.long
def test_the_winner_of_several_configurations_is_named(launchers: Launchers, tmp_path: Path) -> None:
    (tmp_path / "zero.json").write_text('{"train_batch_size": 4, "zero_optimization": {"stage": 1}}')
    script = (
        "import torch, zero\n"
        "first = zero.initialize(model=torch.nn.Linear(2, 2))[0]\n"
        "print(first.zero_optimization_stage(), first.train_batch_size())\n"
        "print(zero.initialize(model=torch.nn.Linear(2, 2), config={'train_batch_size': 2})[0].train_batch_size())\n"
    )
    (tmp_path / "train.py").write_text(script)
    words = ("run", "--config", "zero.json", "--set", "zero_optimization.stage=2", "train.py")
    ended = launchers.run(*words, environment=environment(OMP_NUM_THREADS="1"), folder=tmp_path)
    assert ended.stdout.split() == ["2", "4", "2"], ended.stderr
    file = os.path.join(tmp_path, "zero.json")
    assert f"zero_optimization.stage is 2 by --set of zero run, and not 1 as in {file}" in ended.stderr
    assert f"the configuration is config of initialize(), and not --config {file} --set zero_opt" in ended.stderr


def test_what_people_type_is_understood(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """As torchrun, python -m and model cards spell it; what a script is not known to take is said to go to it."""
    parser = _parser()[0]
    assert [parser.parse_args(["plan", "--params", text]).params for text in ("7B", "1.5b", "70e9", "350M")] == [
        *(7e9, 1.5e9, 70e9, 350e6)
    ]
    assert parser.parse_args(["plan", "--device", "H100"]).device == "h100"
    for word in ("gpu", "auto"):
        assert parser.parse_args(["run", "--nproc_per_node", word, "-m", "pkg.train"]).num_gpus is None
    script = tmp_path / "a.py"
    for text, told in (("", True), ("add_argument('--num_gpus')", False)):
        script.write_text(text)
        assert main(["run", "--dry-run", str(script), "--num_gpus", "2", "--lr=1"]) == 0
        said = "--num_gpus behind the script: given to it, which does not name it; options of zero run go before"
        assert (said in capsys.readouterr().err) == told


def test_every_number_on_a_command_line_is_looked_at() -> None:
    """A flag that takes a number says what came and what it wants, whichever command it is of."""
    seen = []
    for name, command in _parser()[1].choices.items():
        for action in command._actions:
            if action.type is None or action.dest in ("launcher", "launcher_args", "log_level", "space", "device"):
                continue
            seen.append((name, action.dest))
            for text in ("", "x", "nan", "inf", "-1"):
                with pytest.raises(argparse.ArgumentTypeError, match=f"^got '{text}', wanted (a|an|numbers) "):
                    action.type(text)
    assert {("config", "world"), ("config", "memory"), ("plan", "nodes"), ("plan", "sequence"), ("tune", "limit")} < {
        *seen
    }
    assert {("check", "steps"), ("check", "timeout"), ("run", "num_gpus"), ("run", "ssh_port")} < {*seen}


def test_a_wrong_path_is_found_before_anything_heavy_is_imported() -> None:
    code = """
        import json
        from zero.__main__ import main
        lines = "verify none", "consolidate none out", "import-deepspeed none out", "plan none"
        print(json.dumps([main(line.split()) for line in lines]))
    """
    assert fresh(code, ("torch", "numpy")) == [2] * 4
