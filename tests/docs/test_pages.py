"""The promise: every block of Python and JSON in the README and on the pages of docs/ is right, and so are commands.

On each page one program runs in `make test`; all of them, and the commands, in `make test-long`.
"""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import hjson
import pytest
from launching import Launchers
from markdown_it import MarkdownIt
from nodes import environment
from pages import PAGES, ROOT, TUTORIAL, Command, blocks, commands, diffs, files, run_script, run_session, session
from ports import free_port
from ranks import Pool

from zero.config import load

LANGUAGES = r"python|json|yaml|sh|text|\{[\w-]+\}"  # the last are directives of Sphinx
# Their programs want a model and a folder, and more of them is promised: see the tests in tests/huggingface.
ELSEWHERE = {"huggingface.md": "test_programs.py", "lightning.md": "test_lightning_checkpoints.py"}
HERE = [page for page in PAGES if page.name not in ELSEWHERE]
HOSTFILE = "worker-0 slots=4\nworker-1 slots=4\n"


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


def compare(said: str, command: Command) -> None:
    if command.output is not None:
        pairs = itertools.zip_longest(said.split(), command.output.split(), fillvalue="")
        assert all(same(*pair) for pair in pairs), f"it prints:\n{said}"


def printed(pool: Pool, page: Path, command: Command, folder: Path) -> str:
    """What a command that starts a script prints, run on ranks that are there already."""
    words = command.words[command.script(names(page)) :]
    port = None if command.words[0] == "python" else free_port()
    said = pool.run(command.ranks, run_script, str(folder), words, port)[0]
    compare(said, command)
    return said


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_is_of_a_kind_that_is_looked_at(page: Path) -> None:
    strange = {block.line: block.language for block in blocks(page) if not re.fullmatch(LANGUAGES, block.language)}
    assert not strange, f"{page.name}: a block begins with ``` and one of {LANGUAGES}"
    started = {word for command in commands(page) for word in command.words}
    assert names(page) - {"net.py"} - started == set(), "no command of the page starts these"


def links(page: Path) -> list[Path]:
    """The files that a page links to."""
    return [(page.parent / link).resolve() for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())]


def test_the_readme_is_short_and_its_links_lead_somewhere() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) < 190 and diffs(ROOT / "README.md")
    assert len(links(ROOT / "README.md")) > 15
    assert [link for link in links(ROOT / "README.md") if not link.exists()] == []


def test_the_links_of_the_pages_lead_to_pages() -> None:
    """The built pages have nothing that lies outside of their folder: a name in backticks serves there."""
    docs = ROOT / "docs"
    led = [link for page in docs.glob("*.md") for link in links(page)]
    assert len(led) > 15
    assert [link for link in led if not link.is_relative_to(docs) or not link.exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_text_above_a_file_names_it(page: Path) -> None:
    """What a reader sees of a block does not have the name that stands behind its language."""
    text, unnamed = "", []
    for token in MarkdownIt().parse(page.read_text()):
        if token.type == "inline":
            text = token.content
        elif token.type == "fence":
            unnamed += [name for name in token.info.split()[1:] if f"`{name}`" not in text]
    assert unnamed == []


def test_the_tutorial_starts_from_the_losses_of_plain_torch(pool: Pool, tmp_path: Path) -> None:
    write(TUTORIAL, tmp_path)
    plain, ours = (printed(pool, TUTORIAL, command, tmp_path) for command in started(TUTORIAL)[:2])
    assert plain == ours != ""


def cells(text: str, above: str) -> list[list[str]]:
    """The rows of the first table from a line with these words on, without its head."""
    lines = itertools.dropwhile(lambda line: line[:1] != "|", text[text.index(above) :].splitlines()[1:])
    table = itertools.takewhile(lambda line: line[:1] == "|", lines)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    return [row for row in rows if row[-1][:3] != "---"]


def test_the_readme_shows_what_the_benchmark_has_measured() -> None:
    """Of each stage and of its peer the bytes behind the backward and the median of the time; and the day."""
    of_step = (ROOT / "benchmarks" / "README.md").read_text().split("## step.py", 1)[1]
    measured = [(row[0], row[5], row[1].split()[0]) for row in cells(of_step, "27.3M parameters (Psi), 2 gloo ranks")]
    text = (ROOT / "README.md").read_text()
    shown = cells(text, "| stage: what is cut |")
    rows = [(f"zero stage {row[0][0]}", *row[1:3]) for row in shown] + [tuple(row[3:]) for row in shown]
    assert len(rows) == 8
    for name, *figures in rows:
        assert next(list(found[1:]) for found in measured if found[0].startswith(name)) == figures, name
    assert f"Measured on {re.search(r', (20[-0-9]+): `python benchmarks/step.py', of_step)[1]}" in text


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
def test_the_first_program_of_a_page_runs(pool: Pool, page: Path, tmp_path: Path) -> None:
    write(page, tmp_path)
    if blocks := session(page):
        pool.run(2, run_session, str(tmp_path), page.name, blocks[:1])
    else:
        printed(pool, page, started(page)[0], tmp_path)


@pytest.mark.parametrize("page", [page for page in HERE if diffs(page)], ids=lambda page: page.name)
def test_both_sides_of_a_diff_print_the_same(pool: Pool, page: Path, tmp_path: Path) -> None:
    write(page, tmp_path)
    for pair in diffs(page):
        sides = [each for each in started(page) if each.words[each.script(names(page))] in pair]
        before, after = (printed(pool, page, each, tmp_path) for each in sides)
        assert before == after != "", pair


def runnable(page: Path) -> list[Command]:
    """The commands of a page that can run here: those of zero, and those that start a script of the page."""
    return [each for each in commands(page) if each.words[0] == "zero" or each.script(names(page)) is not None]


@pytest.mark.long
@pytest.mark.parametrize("page", [page for page in HERE if session(page) or runnable(page)], ids=lambda page: page.name)
def test_all_of_a_page_runs(launchers: Launchers, pool: Pool, page: Path, tmp_path: Path) -> None:
    """What a reader types: the programs, then the commands in their order; what needs other hosts by `--dry-run`."""
    write(page, tmp_path)
    for path in map(tmp_path.joinpath, names(page)):
        if "import zero" not in (text := path.read_text()):  # torch may abort it behind a message (pytorch#190489)
            path.write_text(f"{text}\n__import__('time').sleep(0.1)\n")
    if blocks := session(page):
        pool.run(2, run_session, str(tmp_path), page.name, blocks)
    left_out = []
    for command in runnable(page):
        at = command.script(names(page))
        if at is not None and "accelerate" in files(page)[command.words[at]] and not find_spec("accelerate"):
            left_out.append(command.words[at])
            continue
        done = run(launchers, command.words, at is not None and "--hostfile" not in command.words, tmp_path)
        assert done.returncode == 0, (command.words, done.stdout, done.stderr)
        compare(done.stdout, command)
    if left_out:
        pytest.skip(f"{left_out}: accelerate is not installed; the other commands have run")


def run(launchers: Launchers, words: list[str], really: bool, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command line; a `zero run` that is not to run `really` says who would run where."""
    there = environment(OMP_NUM_THREADS="1")
    if words[0] in ("python", "torchrun"):
        words = ["-m", "torch.distributed.run", "--standalone", *words[1:]] if words[0] == "torchrun" else words[1:]
        how = {"env": there, "cwd": folder, "capture_output": True, "text": True, "check": False}
        return subprocess.run([sys.executable, *words], **how)
    if words[1] == "run" and not really:
        (folder / "train.py").touch()
        words = [*words[:2], "--dry-run", *words[2:]]
    return launchers.run(*words[1:], environment=there, folder=folder, seconds=900)
