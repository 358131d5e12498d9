"""The pages of words say where each term lives, and that of the inside has every class of the centre; CONTRIBUTING.md
maps every file."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ZERO = ROOT / "zero"
WORDS = (ROOT / "docs" / "words.md").read_text()  # those that users meet
PAGE = WORDS + (ROOT / "docs" / "internals.md").read_text()
CENTRE = ("plan", "core", "core/init", "memory", "optim", "watchdog")
TERMS = re.findall(r"^\| ([^|`]+) \| .+ \| `(\S+\.py)` `(\w+)` \|$", PAGE, re.MULTILINE)
CLASSES = re.findall(r"^\| `(\w+)` \| .+ \| `(\S+\.py)` \|$", PAGE, re.MULTILINE)


def public_classes(path: Path) -> list[str]:
    nodes = ast.parse(path.read_text()).body
    return [node.name for node in nodes if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]


def test_every_class_of_the_centre_is_on_the_page_with_its_file():
    files = [path for folder in CENTRE for path in (ZERO / folder).glob("*.py")]
    there = {(name, path.relative_to(ZERO).as_posix()) for path in files for name in public_classes(path)}
    assert len(there) > 50
    assert set(CLASSES) == there


@pytest.mark.parametrize(("term", "file", "name"), TERMS, ids=[term for term, *_ in TERMS])
def test_every_term_lives_where_the_page_says(term: str, file: str, name: str):
    assert re.search(rf"\b(class|def) {name}\b|self\.{name}\b", (ZERO / file).read_text())


def test_the_terms_of_other_systems_are_on_the_page_of_users_which_is_short():
    assert WORDS.count("\n| ") - 1 <= 40, "a term that only the code uses, or a class, stands in docs/internals.md"
    terms = {word for term, *_ in TERMS if f"| {term} |" in WORDS for word in re.split(r"[,:] | \w*: ", term)}
    assert {"gather", "reduce-scatter", "all-reduce", "prefetch", "offload", "watchdog", "HSDP", "hpZ"} <= terms


def test_the_map_has_every_file_and_no_other():
    """A line of the map begins with a folder or with files of the folder above it, by its indentation."""
    lines = (ROOT / "CONTRIBUTING.md").read_text().split("## Where things live\n")[1].split("\n```\n")[0].splitlines()
    folders: list[tuple[int, Path]] = []
    listed = set()
    for line in filter(None, lines):
        indent, words = len(line) - len(line.lstrip()), line.split()
        while folders and folders[-1][0] >= indent:
            folders.pop()
        if words[0].endswith("/"):
            folders.append((indent, (folders[-1][1] if folders else ROOT) / words[0]))
        where = folders[-1][1] if folders else ROOT
        listed |= {where / word.strip(",:;") for word in words if re.fullmatch(r"\w+\.py[,:;]?", word)}
    centre = [ZERO / folder for folder in CENTRE]
    there = {path for folder in centre for path in folder.glob("*.py") if path.name != "__init__.py"}
    assert there - listed == set(), "files that the map lacks"
    assert {path for path in listed if path.parent in centre} - there == set(), "files that are gone"
