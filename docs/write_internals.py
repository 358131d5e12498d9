"""Writes what docs/internals.md says of classes, and the map of CONTRIBUTING.md, from the docstrings of the code.

tests/docs/test_generated.py says when they are old.
"""

from __future__ import annotations

import ast
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[1]
ZERO = ROOT / "zero"
INTERNALS, CONTRIBUTING = ROOT / "docs" / "internals.md", ROOT / "CONTRIBUTING.md"
CENTRE = {
    "plan": "decisions as plain values",
    "core": "parameters and gradients between ranks",
    "memory": "where state rests",
    "optim": "the step on shards",
    "watchdog": "ranks that wait for each other",
}
BEGIN, END = "<!-- from here on written by docs/write_internals.py -->\n", "```\n"
OTHERS = {
    "csrc": "C++17 and CUDA over raw pointers, without torch; tests/ runs under sanitizers",
    "docs": "one subject per page; write_*.py write parts of them, figures/draw.py the figures",
    "examples": "experts/, gpt/, images/, masked/, operators/, pipeline/, ray/, serve/, tensors/",
    "tests": "one promise per file, by topic; oracle.py is plain torch, ranks.py a pool of real processes",
    "benchmarks": "one question per file",
}


def internals() -> str:
    """The page, with its tables of classes as the code has them."""
    parts = [INTERNALS.read_text(encoding="utf-8").split(BEGIN)[0] + BEGIN]
    for folder, about in CENTRE.items():
        rows = [row for path in sorted((ZERO / folder).rglob("*.py")) for row in _classes(path)]
        parts.append(
            "\n".join([f"\n## {folder}: {about}\n", "| class | what it is | where |", "|---|---|---|", *rows, ""])
        )
    return "".join(parts)


def contributing() -> str:
    """The page, with its map of the tree."""
    before, begin, rest = CONTRIBUTING.read_text(encoding="utf-8").partition("```text\nzero/\n")
    lines = [line for path in sorted(ZERO.glob("*/__init__.py")) for line in _folder(path.parent)]
    lines += [f"{f'{name}/':18}{about}" for name, about in OTHERS.items()]
    return before + begin + "\n".join(lines) + "\n" + END + rest.partition(END)[2]


def main() -> None:
    """Write both."""
    INTERNALS.write_text(internals(), encoding="utf-8")
    CONTRIBUTING.write_text(contributing(), encoding="utf-8")


def _classes(path: Path) -> list[str]:
    nodes = [node for node in _tree(path).body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]
    where = path.relative_to(ZERO).as_posix()
    return [f"| `{node.name}` | {_first(node)} | `{where}` |" for node in nodes]


def _folder(folder: Path) -> list[str]:
    """What it is, and of the centre its files, or those folders inside that have files of their own."""
    lines = textwrap.wrap(_first(_tree(folder / "__init__.py")), 98)
    lines = [f"  {f'{folder.name}/' if index == 0 else '':16}{line}" for index, line in enumerate(lines)]
    if folder.name in CENTRE:
        names = [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*.py"))]
        listed = " ".join(name for name in names if not name.endswith("__init__.py"))
        lines += textwrap.indent(textwrap.fill(listed, 108, break_on_hyphens=False), " " * 8).splitlines()
    return lines


def _first(node: ast.Module | ast.ClassDef) -> str:
    """The first line of a docstring, without its full stop."""
    return (ast.get_docstring(node) or "").split("\n")[0].replace("|", r"\|").rstrip(".")


def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


if __name__ == "__main__":
    main()
