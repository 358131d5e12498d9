"""The shape of the code: imports point down only, torch stays out of the lowest floor, files and functions stay short.

Every rule is a function from a source text to offences, each one a line to click on; it is tried on made-up
sources first, so that a rule that sees nothing is not mistaken for one that is kept.
"""

from __future__ import annotations

import ast
import functools
import graphlib
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("zero", "csrc", "docs", "examples", "benchmarks", "tests")
SUFFIXES = {".py", ".h", ".cpp", ".cu", ".cuh", ".json", ".md", ".sh"}
MAX_LINES = 450
MAX_FUNCTION_LINES = 60

# Lower may not import higher, and neighbours on a floor may not import each other.
FLOORS = {
    f"zero.{name}" if name != "zero" else name: number
    for number, names in {
        0: "log deepspeed_names plan.grid",
        1: "errors config plan launch",
        2: "kernels watchdog",
        3: "memory",
        4: "core",
        5: "parallel examples optim data checkpoint recompute monitor",
        6: "sizes tiled utils",
        7: "engine checkpointing",
        8: "compat",
        9: "tools",
        10: "zero __main__ lightning",
        11: "as_deepspeed",
    }.items()
    for name in names.split()
}
STEPS_OF_CORE = {"zero.core": 0} | {
    f"zero.core.{name}": number
    for number, names in {
        0: "torch_private quantized_params weak kept",
        1: "tensors tree leaf kinds micro_batches replaced_forward",
        2: "comm released",
        3: "world p2p",
        4: "agree mesh accumulator master param_buffer owner",
        5: "late_gather reduction shard initial_values unit_table",
        6: "gradients gathering refusals",
        7: "mixed_precision unit",
        8: "init init.deferred_param",
        9: "offload conversion finite",
        10: "ratio prefetcher init.builder",
        11: "streaming reducer",
        12: "hooks rounds",
        13: "waits",
        14: "sharded_module",
        15: "values",
        16: "access",
    }.items()
    for name in names.split()
}
COMPILED = ("zero._cpu", "zero._cuda")
WITHOUT_TORCH = ("zero.__main__", *(name for name, number in FLOORS.items() if number < 2))
# Pure files that stand beside their feature: nothing but Python, `zero.plan` and each other.
TORCH_FREE = (
    "zero.watchdog.hang_report",
    "zero.memory.update_costs",
    "zero.recompute.policy",
    "zero.sizes.cost",
    "zero.sizes.shape",
    "zero.tiled.slices",
)
TORCH_ON_USE = "zero.launch.node.node_plan"  # it counts the GPUs, and imports torch only where there can be any


class Import(NamedTuple):
    """`what` is a dotted name, perhaps of something inside a module.

    on_use: it stands inside a function, or is for type checkers only.
    """

    what: str
    line: int
    on_use: bool


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def modules_of_zero() -> dict[str, Path]:
    return {module_name(path): path for path in python_files("zero")}


def where(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


def report(offences: list[str]) -> str:
    return "\n" + "\n".join(offences)


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def imports(tree: ast.AST, package: str, on_use: bool = False) -> Iterator[Import]:
    """All imports, also those of importlib with a plain string; relative ones are resolved from `package`."""
    for node in ast.iter_child_nodes(tree):
        inside = on_use or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)) or for_types(node)
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno, inside) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from (Import(f"{base}.{alias.name}", node.lineno, inside) for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield Import(node.args[0].value, node.lineno, inside)
        yield from imports(node, package, inside)


@functools.cache
def imports_of(path: Path) -> list[Import]:
    name = module_name(path)
    return list(imports(parsed(path), name if path.stem == "__init__" else name.rpartition(".")[0]))


def resolve(what: str, known: dict[str, Path]) -> str | None:
    """The module of zero that `what` is or lies in; None for what is not ours or is compiled."""
    if what in COMPILED:
        return None
    while what and what not in known:
        what = what.rpartition(".")[0]
    return what or None


def floor(module: str) -> int | None:
    """The floor of a module: its own, or that of the first folder under zero."""
    return FLOORS.get(module, FLOORS.get(".".join(module.split(".")[:2])))


def is_torch(what: str) -> bool:
    return what.split(".")[0] in ("torch", "torchvision", "torchaudio", "triton")


# Imports.


def test_every_module_of_zero_has_a_floor() -> None:
    modules = modules_of_zero()
    assert {"zero", "zero.plan.layout", "zero.core.unit"} <= modules.keys(), "the walk over zero/ finds too little"
    homeless = [str(path.relative_to(ROOT)) for name, path in modules.items() if floor(name) is None]
    homeless += [
        str(path.relative_to(ROOT))
        for name, path in modules.items()
        if name.startswith("zero.core") and name not in STEPS_OF_CORE
    ]
    assert not homeless, "say in FLOORS or STEPS_OF_CORE of this test where these belong:" + report(homeless)


def breach(name: str, target: str) -> bool:
    """Whether it is against the floors that module `name` imports `target`."""
    if name in STEPS_OF_CORE and target in STEPS_OF_CORE:
        return STEPS_OF_CORE[target] >= STEPS_OF_CORE[name]
    if name != "zero" and name.split(".")[:2] == target.split(".")[:2]:
        return False  # inside one folder only circles are forbidden
    low, high = floor(target), floor(name)
    return low is not None and high is not None and low >= high  # None: the test above names it


def test_imports_point_down() -> None:
    known, offences = modules_of_zero(), []
    for name, path in known.items():
        for what, line, _ in imports_of(path):
            target = resolve(what, known)
            if target is not None and breach(name, target):
                offences.append(f"{where(path, line)}: {name} must not import {target}, which is not below it")
    assert not offences, report(offences)


def test_only_the_command_line_imports_tools() -> None:
    """Inside a function: each command imports its own."""
    known, offences = modules_of_zero(), []
    for name, path in known.items():
        for what, line, on_use in imports_of(path) if not name.startswith("zero.tools") else ():
            of_tools = (resolve(what, known) or "").startswith("zero.tools")
            if of_tools and not (on_use and name == "zero.__main__"):
                offences.append(f"{where(path, line)}: {name} must not import {what} here")
    assert not offences, report(offences)


def test_the_lowest_floor_imports_no_torch() -> None:
    offences = []
    for name, path in modules_of_zero().items():
        below = any(name == home or name.startswith(f"{home}.") for home in (*WITHOUT_TORCH, *TORCH_FREE))
        for what, line, on_use in imports_of(path) if below or name == "zero" else ():
            if is_torch(what) and not (on_use and name == TORCH_ON_USE):
                offences.append(f"{where(path, line)}: {name} must not import {what}")
    assert not offences, report(offences)


def test_plan_and_the_pure_files_beside_their_feature_need_nothing_but_python() -> None:
    modules = modules_of_zero()
    assert not (gone := set(TORCH_FREE) - modules.keys()), f"TORCH_FREE of this test names what is not there: {gone}"
    offences = [
        f"{where(path, line)}: {name} must not import {what}"
        for name, path in modules.items()
        if name.startswith("zero.plan") or name in TORCH_FREE
        for what, line, _ in imports_of(path)
        if not what.startswith(("zero.plan", *TORCH_FREE)) and what.split(".")[0] not in sys.stdlib_module_names
    ]
    assert not offences, report(offences)


def test_no_imports_go_round_in_circles() -> None:
    known = modules_of_zero()
    graph = {name: {resolve(what, known) for what, *_ in imports_of(path)} - {None} for name, path in known.items()}
    assert len(graph) > 20, "the graph is too small to be that of zero/"
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError with the modules of a circle


# Words and statements.


def names_of_stage(tree: ast.Module) -> list[tuple[int, str]]:
    """Identifiers with the word; comments and docstrings may say it."""
    found = []
    for node in ast.walk(tree):
        for key in ("id", "attr", "arg", "name", "asname", "module", "rest"):
            name = getattr(node, key, None)
            words = re.findall(r"[A-Z]?[a-z]+|[A-Z]+", name) if isinstance(name, str) else ()
            if {"stage", "stages"} & {word.lower() for word in words}:
                found.append((getattr(node, "lineno", 0), f"'{name}' in the sharding code, which knows no stages"))
    return found


def long_functions(tree: ast.Module) -> list[tuple[int, str]]:
    return [
        (node.lineno, f"{node.name} has {length} lines, more than {MAX_FUNCTION_LINES}")
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and (length := node.end_lineno - node.lineno + 1) > MAX_FUNCTION_LINES
    ]


Rule = Callable[[ast.Module], list[tuple[int, str]]]


@pytest.mark.parametrize(
    ("rule", "folders"),
    [
        (names_of_stage, ("zero/core",)),
        (long_functions, ("zero", "csrc", "examples", "benchmarks")),
    ],
)
def test_rules_of_the_house(rule: Rule, folders: tuple[str, ...]) -> None:
    files = python_files(*folders)
    assert files, f"no Python under {folders}"
    offences = [f"{where(path, line)}: {text}" for path in files for line, text in rule(parsed(path))]
    assert not offences, report(offences)


def test_no_file_is_too_long() -> None:
    files = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*")) if path.suffix in SUFFIXES]
    assert len(files) > 40, "the walk over the folders finds too little"
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    offences = [
        f"{where(path, MAX_LINES + 1)}: {lines} lines, more than {MAX_LINES}"
        for path, lines in lengths.items()
        if lines > MAX_LINES and path != ROOT / "docs/config.md"  # which is generated, and is looked up
    ]
    assert not offences, report(offences)


TORCH_HEADER = re.compile(r'^\s*#\s*include\s*[<"](torch|ATen|c10|caffe2)\b')


def torch_headers(text: str) -> list[int]:
    return [number for number, line in enumerate(text.splitlines(), 1) if TORCH_HEADER.match(line)]


def test_kernels_know_no_torch() -> None:
    files = sorted(path for path in (ROOT / "csrc").rglob("*") if path.suffix in {".h", ".cpp", ".cu", ".cuh"})
    assert files, "no sources under csrc/"
    offences = [
        f"{where(path, line)}: a header of torch; kernels take raw pointers"
        for path in files
        for line in torch_headers(path.read_text(encoding="utf-8"))
    ]
    assert not offences, report(offences)


# The rules see what they are there for.


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import torch", [("torch", 1, False)]),
        ("\nfrom torch import nn", [("torch.nn", 2, False)]),
        ("def f():\n    import torch", [("torch", 2, True)]),
        ("if True:\n    try:\n        import torch\n    except ImportError:\n        pass", [("torch", 3, False)]),
        ("from . import comm", [("zero.core.comm", 1, False)]),
        ("from ..plan.units import UnitPlan", [("zero.plan.units.UnitPlan", 1, False)]),
        ("import importlib\nx = importlib.import_module('torch')", [("importlib", 1, False), ("torch", 2, False)]),
        ("f = lambda: __import__('torch')", [("torch", 1, True)]),
        ("if TYPE_CHECKING:\n    import torch", [("torch", 2, True)]),
    ],
)
def test_imports_are_seen(source: str, found: list[tuple[str, int, bool]]) -> None:
    assert list(imports(ast.parse(source), "zero.core")) == found


def test_names_are_resolved_to_modules() -> None:
    known = modules_of_zero()
    assert resolve("zero.core.unit.Unit", known) == "zero.core.unit"
    assert resolve("zero.core.comm", known) == "zero.core.comm"
    assert resolve("zero.config.Config", known) == "zero.config"
    assert resolve("zero.__version__", known) == "zero"
    assert resolve("zero._cpu", known) is None
    assert resolve("torch.nn", known) is None


@pytest.mark.parametrize(
    ("name", "target", "wrong"),
    [
        ("zero.kernels.norm", "zero.core.unit", True),
        ("zero.core.unit", "zero.kernels.norm", False),
        ("zero.core.unit", "zero.core.sharded_module", True),
        ("zero.core.prefetcher", "zero.core.reducer", True),
        ("zero.core.unit", "zero.core", False),
        ("zero.core.sharded_module", "zero.log", False),
        ("zero.plan.units", "zero.plan.layout", False),
        ("zero.plan.units", "zero.config", True),
        ("zero.optim.fused", "zero.engine", True),
        ("zero.engine.engine", "zero", True),
        ("zero.__main__", "zero.launch.args.run", False),
        ("zero", "zero.engine", False),
    ],
)
def test_a_breach_of_the_floors_is_seen(name: str, target: str, wrong: bool) -> None:
    assert breach(name, target) == wrong


@pytest.mark.parametrize(
    ("rule", "source", "lines"),
    [
        (names_of_stage, "stage = 3", [1]),
        (names_of_stage, "def f(zero_stage): ...", [1]),
        (names_of_stage, "\nx = Sharding.of_stage(3)", [2]),
        (names_of_stage, "f(stage=3)", [1]),
        (names_of_stage, "class StageThree: ...", [1]),
        (names_of_stage, "import stages as s", [1]),
        (names_of_stage, "ZERO_STAGE = max_stages", [1, 1]),
        (names_of_stage, "backstage = staged", []),
        (names_of_stage, '"""The stage."""\nx = 3  # stage', []),
        (long_functions, "def f():\n" + "    x = 1\n" * 59, []),
        (long_functions, "\ndef f():\n" + "    x = 1\n" * 60, [2]),
        (long_functions, "class A:\n    async def f():\n" + "        x = 1\n" * 60, [2]),
    ],
)
def test_rules_see_offences(rule: Rule, source: str, lines: list[int]) -> None:
    assert [line for line, _ in rule(ast.parse(source))] == lines


def test_headers_of_torch_are_seen() -> None:
    text = '#include <vector>\n#include <torch/all.h>\n # include "ATen/A.h"\n// #include <c10/x.h>\n#include <c10/x.h>'
    assert torch_headers(text) == [2, 3, 5]
