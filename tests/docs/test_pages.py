"""The promise: every block of Python and JSON in the README and on the pages of docs/ is right, and so are commands.

On each page one program runs in `make test`; all of them, and the commands, in `make test-long`.
"""

from __future__ import annotations

import itertools
import os
import re
from pathlib import Path
from typing import Any

import hjson
import pytest
from pages import PAGES, ROOT, Command, blocks, commands, files, run_script, run_session, session
from ports import free_port

from zero.config import load

LANGUAGES = r"python|json|sh|text|\{[\w-]+\}"  # the last are directives of Sphinx
# Their programs want a model and a folder, and more of them is promised: see the tests in tests/huggingface.
ELSEWHERE = {"huggingface.md": "test_scripts.py", "lightning.md": "test_lightning_script.py"}
HERE = [page for page in PAGES if page.name not in ELSEWHERE]
HOSTFILE = "worker-0 slots=4\nworker-1 slots=4\n"
DOOR = ("--as-deepspeed", "accelerate")  # one of these in a command or a script: it runs behind a door


def names(page: Path) -> set[str]:
    """The scripts of a page."""
    return {block.name for block in blocks(page) if block.name.endswith(".py")}


def started(page: Path) -> list[Command]:
    """The commands that start one of them."""
    return [command for command in commands(page) if command.script(names(page)) is not None]


def write(page: Path, folder: Path) -> None:
    for name, text in files(page).items():
        (folder / name).write_text(text)
    (folder / "hostfile").write_text(HOSTFILE)


def same(said: str, written: str) -> bool:
    """Word for word; the last digits of a number may differ between machines."""
    try:
        return float(said) == pytest.approx(float(written), rel=1e-2)
    except ValueError:
        return said == written


def start(request: pytest.FixtureRequest, page: Path, folder: Path, command: Command) -> None:
    """Run a script on ranks as a command does, and compare what it prints."""
    words = command.words[command.script(names(page)) :]
    behind = any(word in command.words or word in files(page)[words[0]] for word in DOOR)
    port = None if command.words[0] == "python" else free_port()
    pool = request.getfixturevalue("door" if behind else "pool")
    said = pool.run(command.ranks, run_script, str(folder), words, port)[0]
    if command.output is not None:
        pairs = itertools.zip_longest(said.split(), command.output.split(), fillvalue="")
        assert all(same(*pair) for pair in pairs), f"it prints:\n{said}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_is_of_a_kind_that_is_looked_at(page: Path) -> None:
    strange = {block.line: block.language for block in blocks(page) if not re.fullmatch(LANGUAGES, block.language)}
    assert not strange, f"{page.name}: a block begins with ``` and one of {LANGUAGES}"
    started = {word for command in commands(page) for word in command.words}
    assert names(page) - {"net.py"} - started == set(), "no command of the page starts these"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_json_is_a_config_or_a_part_of_one(page: Path) -> None:
    for block in blocks(page):
        if block.language == "json":
            text = block.text if block.text.lstrip().startswith("{") else "{" + block.text + "}"
            values = hjson.loads(text)
            if not {"train_batch_size", "train_micro_batch_size_per_gpu"} & values.keys():
                values["train_micro_batch_size_per_gpu"] = 1
            load(values, 2, filled=False)


@pytest.mark.parametrize("page", [page for page in HERE if session(page) or started(page)], ids=lambda page: page.name)
def test_the_first_program_of_a_page_runs(request: pytest.FixtureRequest, page: Path, tmp_path: Path) -> None:
    write(page, tmp_path)
    if blocks := session(page):
        request.getfixturevalue("pool").run(2, run_session, str(tmp_path), page.name, blocks[:1])
    else:
        start(request, page, tmp_path, started(page)[0])


@pytest.mark.long
@pytest.mark.parametrize("page", HERE, ids=lambda page: page.name)
def test_all_of_a_page_runs(request: pytest.FixtureRequest, launchers: Any, page: Path, tmp_path: Path) -> None:
    """What a reader types: the programs, then the commands in their order; what needs other hosts by `--dry-run`."""
    write(page, tmp_path)
    if blocks := session(page):
        request.getfixturevalue("pool").run(2, run_session, str(tmp_path), page.name, blocks)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    for command in commands(page):
        first, *words = command.words
        if "--hostfile" not in words and command.script(names(page)) is not None:
            start(request, page, tmp_path, command)
        elif first == "zero" and words[0] != "ssh":
            if words[0] == "run" and "--dry-run" not in words:
                words.insert(1, "--dry-run")
            for script in (word for word in words if re.fullmatch(r"\w+\.py", word)):
                (tmp_path / script).touch()
            done = launchers.run(*words, environment=environment, folder=tmp_path)
            assert done.returncode == 0, (command.words, done.stdout, done.stderr)
