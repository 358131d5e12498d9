"""The blocks of README.md and of the pages in docs/, as they stand there."""

from __future__ import annotations

import contextlib
import gc
import io
import itertools
import os
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TUTORIAL = ROOT / "docs" / "tutorial.md"
_COMMENT = re.compile(r"\s{2,}#.*")


class Block(NamedTuple):
    """One block of code: `name` is the file that it stands for, "" where it is none; `line` counts from 1.

    A diff stands for two blocks of Python, with the file before and the one after.
    """

    language: str
    name: str
    text: str
    line: int


class Command(NamedTuple):
    """One line of a shell block, and what the block of text right below says it prints, where there is one."""

    words: list[str]
    output: str | None

    def script(self, names: set[str]) -> int | None:
        """Where among the words one of these scripts is, of which this command starts processes of Python."""
        starts = self.words[0] in ("python", "torchrun") or self.words[:2] == ["zero", "run"]
        return next((at for at, word in enumerate(self.words) if starts and word in names), None)

    @property
    def ranks(self) -> int:
        """The number of processes that it starts."""
        flag = next((each for each in ("--num_gpus", "--nproc_per_node") if each in self.words), None)
        return 1 if flag is None else int(self.words[self.words.index(flag) + 1])


def blocks(page: Path) -> list[Block]:
    """All blocks of a page; one without a fence has the language ""."""
    found = []
    for token in MarkdownIt().parse(page.read_text()):
        if token.type in ("fence", "code_block"):
            language, _, name = token.info.partition(" ")
            line, text = token.map[0] + 1, token.content
            if language == "diff":
                for file, other in zip(name.split(), "+-", strict=True):
                    side = [each[1:] or each for each in text.splitlines(keepends=True) if each[0] != other]
                    found.append(Block("python", file, "".join(side), line))
            else:
                found.append(Block(language, name, text, line))
    return found


def diffs(page: Path) -> list[tuple[str, str]]:
    """The files before and after of each diff of a page."""
    return [
        (before.name, after.name) for before, after in itertools.pairwise(blocks(page)) if before.line == after.line
    ]


def commands(page: Path) -> Iterator[Command]:
    """The command lines of the shell blocks of a page, without their comments."""
    there = blocks(page)
    for block, follows in itertools.zip_longest(there, there[1:]):
        if block.language == "sh":
            end = block.line + block.text.count("\n") + 1
            shown = follows is not None and follows.language == "text" and follows.line == end + 2
            output = follows.text if shown else None
            lines = (_COMMENT.sub("", line) for line in block.text.splitlines())
            yield from (Command(shlex.split(line), output) for line in lines if line.strip())


def files(page: Path) -> dict[str, str]:
    """The files that stand on a page, by name, and those of the tutorial, which other pages use."""
    return {block.name: block.text for each in (TUTORIAL, page) for block in blocks(each) if block.name}


def session(page: Path) -> list[Block]:
    """The blocks of Python without a name, each of which goes on from those before it."""
    return [block for block in blocks(page) if block.language == "python" and not block.name]


@contextlib.contextmanager
def _in(folder: str) -> Iterator[None]:
    """As in a process that was started in `folder` and has imported nothing from there."""
    before, modules, argv, variables = Path.cwd(), set(sys.modules), sys.argv, dict(os.environ)
    os.chdir(folder)
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)
        os.chdir(before)
        sys.argv = argv
        os.environ.clear()
        os.environ.update(variables)
        for name in set(sys.modules) - modules:
            if str(getattr(sys.modules[name], "__file__", None)).startswith(folder):
                del sys.modules[name]
        gc.collect()


def run_session(folder: str, page: str, texts: list[Block]) -> None:
    """Run blocks of a page on this rank, one after another, and end what engines they have made."""
    import zero

    with _in(folder):
        space = {"__name__": "__main__"}
        for block in texts:
            exec(compile("\n" * block.line + block.text, page, "exec"), space)
        for value in space.values():
            if isinstance(value, zero.Engine):
                value.destroy()


def run_script(folder: str, words: list[str], port: int | None) -> str:
    """Run a script with arguments on this rank; what it prints.

    port: where the ranks meet, as a launcher tells them; None: a process alone.
    """
    import torch.distributed as dist

    dist.barrier()  # a rank that is still connecting must find the others there
    dist.destroy_process_group()  # the script makes one
    said = io.StringIO()
    with _in(folder), contextlib.redirect_stdout(said):
        if port is None:
            for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
                del os.environ[name]
        else:
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")
    return said.getvalue()
