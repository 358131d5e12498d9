"""The tree does not grow unseen: each part has a limit of lines of Python, csrc/ of all its sources.

Who adds lines beyond a limit raises it here, and so says it. A limit is the next ten above the lines (hundred for tests
and csrc); who takes many away lowers it, but need not for a few.
"""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SUFFIXES = {".py", ".h", ".cpp", ".cu", ".cuh"}
MARGIN = 300  # lines that a part may have less than its limit
LIMITS = {
    "csrc": 5100,
    "tests": 60200,
    "zero/*.py": 1250,
    "zero/as_deepspeed": 1540,
    "zero/checkpoint": 2950,
    "zero/compat": 700,
    "zero/config": 2610,
    "zero/core": 8230,
    "zero/data": 1060,
    "zero/engine": 9770,
    "zero/examples": 100,
    "zero/kernels": 1890,
    "zero/launch": 4420,
    "zero/memory": 1530,
    "zero/monitor": 1350,
    "zero/optim": 2760,
    "zero/parallel": 6980,
    "zero/plan": 2170,
    "zero/recompute": 1220,
    "zero/sizes": 2120,
    "zero/tiled": 690,
    "zero/tools": 3450,
    "zero/utils": 410,
    "zero/watchdog": 1650,
}


def parts() -> dict[str, int]:
    """Lines by part: files of zero/ itself, each folder of it, csrc/ and tests/."""
    files = {"zero/*.py": list((ROOT / "zero").glob("*.py"))}
    files |= {f"zero/{path.name}": list(path.rglob("*")) for path in (ROOT / "zero").iterdir() if path.is_dir()}
    files |= {name: list((ROOT / name).rglob("*")) for name in ("csrc", "tests")}
    counts = {name: sum(map(lines, paths)) for name, paths in files.items()}
    return {name: count for name, count in sorted(counts.items()) if count}


def lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines()) if path.is_file() and path.suffix in SUFFIXES else 0


def offences(found: dict[str, int], limits: dict[str, int]) -> list[str]:
    said = [f"{name}: no limit in LIMITS for its {count} lines" for name, count in found.items() if name not in limits]
    for name, limit in limits.items():
        count = found.get(name, 0)
        if count > limit:
            said.append(f"{name}: {count} lines, more than its limit of {limit}")
        if count < limit - MARGIN:
            said.append(f"{name}: {count} lines, more than {MARGIN} below its limit of {limit}: lower the limit")
    return said


def test_no_part_has_more_lines_than_its_limit_or_far_fewer() -> None:
    found = parts()
    wrong = offences(found, LIMITS)
    assert not wrong, "\n" + "\n".join(wrong)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({"a": 500, "tests": 200}, ""),
        ({"a": 200, "tests": 500}, ""),
        ({"a": 501, "tests": 300}, "a: 501 lines, more than its limit of 500"),
        ({"a": 199, "tests": 300}, "a: 199 lines, more than 300 below its limit of 500: lower the limit"),
        ({"a": 500, "b": 1, "tests": 300}, "b: no limit in LIMITS for its 1 lines"),
        ({"tests": 300}, "a: 0 lines, more than 300 below its limit of 500: lower the limit"),
    ],
)
def test_offences_are_seen(found: dict[str, int], said: str) -> None:
    assert offences(found, {"a": 500, "tests": 500}) == ([said] if said else [])
