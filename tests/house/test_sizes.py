"""Classes stay small enough to be held in the head, and private names of torch stand in one file."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from zero.engine import Engine

ZERO = Path(__file__).parents[2] / "zero"
MAX_ATTRIBUTES = 18
MAX_METHODS_OF_THE_ENGINE = 45


def targets(node: ast.AST) -> Iterator[ast.expr]:
    """What a statement assigns to, inside tuples too."""
    if isinstance(node, ast.Assign):
        found = node.targets
    else:
        found = [node.target] if isinstance(node, (ast.AnnAssign, ast.AugAssign)) else []
    for target in found:
        yield from target.elts if isinstance(target, (ast.Tuple, ast.List)) else (target,)


def attributes(kind: ast.ClassDef) -> set[str]:
    """What methods of a class assign to `self`, and the fields of a dataclass or tuple."""
    names = {
        target.attr
        for node in ast.walk(kind)
        for target in targets(node)
        if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self"
    }
    fields = {
        node.target.id for node in kind.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    return names | fields


def with_bases(key: str, classes: dict[str, ast.ClassDef]) -> set[str]:
    """Those of a class and of its bases among `classes`, whose keys are `file:name`; a base of its file comes first."""
    names = attributes(classes[key])
    for base in classes[key].bases:
        if isinstance(base, ast.Name):
            same_file = f"{key.rpartition(':')[0]}:{base.id}"
            homes = [same_file] if same_file in classes else [each for each in classes if each.endswith(f":{base.id}")]
            names = names.union(*(with_bases(home, classes) for home in homes if home != key))
    return names


def is_section(path: Path) -> bool:
    """Whether the classes of a file are sections of the configuration, which have a field for each key."""
    return path.is_relative_to(ZERO / "config")


def parsed() -> dict[str, ast.ClassDef]:
    paths = [path for path in sorted(ZERO.rglob("*.py")) if not is_section(path)]
    return {
        f"{path.relative_to(ZERO.parent)}:{node.name}": node
        for path in paths
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path)))
        if isinstance(node, ast.ClassDef)
    }


def test_no_class_has_more_attributes_than_one_can_hold_in_the_head() -> None:
    classes = parsed()
    engine = "zero/engine/engine.py:Engine"
    assert {engine, "zero/core/unit.py:Unit"} <= classes.keys(), "the walk over zero/ finds too little"
    assert {"module", "_training"} <= attributes(classes[engine])
    counts = {key: len(with_bases(key, classes)) for key in classes}
    too_large = {key: count for key, count in counts.items() if count > MAX_ATTRIBUTES}
    assert not too_large, f"more than {MAX_ATTRIBUTES} attributes: {too_large}"


def test_the_engine_has_few_methods_of_its_own() -> None:
    own = [name for name in vars(Engine) if not name.startswith("_")]
    assert "step" in own
    assert "save_checkpoint" in own
    assert len(own) <= MAX_METHODS_OF_THE_ENGINE, own


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("class A:\n def f(self):\n  self.a, self.b = 1, 2\n  self.c: int = 3\n  self.d += 1", {"a", "b", "c", "d"}),
        ("class A:\n x: int = 1\n y = 2\n def f(self):\n  x = 1\n  other.z = self.w", {"x"}),
        ("class A:\n def f(self):\n  if x:\n   self.a = self.b = 1", {"a", "b"}),
    ],
)
def test_attributes_are_seen(source: str, names: set[str]) -> None:
    assert attributes(ast.parse(source).body[0]) == names


def test_those_of_bases_are_counted() -> None:
    body = ast.parse("class A:\n x: int\nclass B(A):\n y: int\nclass C(B): ...").body
    classes = {f"a.py:{node.name}": node for node in body}
    assert with_bases("a.py:C", classes) == {"x", "y"}
    classes["b.py:D"] = ast.parse("class D(B):\n z: int").body[0]
    assert with_bases("b.py:D", classes) == {"x", "y", "z"}


PRIVATE_OF_TORCH = re.compile(
    r"torch\._(?!dynamo|_version__)\w+|\._cdata\b|\._use_count\b|_execution_engine|\._backward_hooks\b(?!\.__)"
)


def test_private_names_of_torch_stand_in_one_file():
    files = [path for path in ZERO.rglob("*.py") if path.name != "torch_private.py"]
    lines = [f"{path.name}: {line.strip()}" for path in files for line in path.read_text().splitlines()]
    assert len(files) > 100
    assert [line for line in lines if PRIVATE_OF_TORCH.search(line.split("#")[0])] == []
