"""The tree does not grow unseen: each part has a limit of lines of Python, csrc/ of all its sources, and so the sum.

Who adds lines raises a limit here, and so says it; who takes some away lowers it. tests/ as a whole has an upper limit
only: its lines move with what they are about.
"""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SUFFIXES = {".py", ".h", ".cpp", ".cu", ".cuh"}
SLACK = 50  # lines that a part may have less than its limit
LIMITS = {
    "csrc": 4875,
    "tests": 54800,
    "zero/*.py": 1136,
    "zero/as_deepspeed": 1589,
    "zero/checkpoint": 3183,
    "zero/compat": 1889,
    "zero/config": 2562,
    "zero/core": 7655,
    "zero/data": 1075,
    "zero/engine": 7898,
    "zero/examples": 99,
    "zero/kernels": 2017,
    "zero/launch": 4285,
    "zero/memory": 1525,
    "zero/monitor": 1188,
    "zero/optim": 2789,
    "zero/parallel": 5453,
    "zero/plan": 2147,
    "zero/recompute": 1233,
    "zero/sizes": 2033,
    "zero/tiled": 698,
    "zero/tools": 4989,
    "zero/utils": 428,
    "zero/watchdog": 1549,
}
SUM = 117095


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
        if count < limit - SLACK and name != "tests":
            said.append(f"{name}: {count} lines, more than {SLACK} below its limit of {limit}: lower the limit")
    return said


def test_no_part_has_more_lines_than_its_limit_or_far_fewer() -> None:
    found = parts()
    wrong = offences(found, LIMITS)
    assert not wrong, "\n" + "\n".join(wrong)
    assert sum(LIMITS.values()) == SUM, f"SUM is that of LIMITS, which is {sum(LIMITS.values())} now"


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({"a": 100, "tests": 10}, ""),
        ({"a": 50, "tests": 100}, ""),
        ({"a": 101, "tests": 1}, "a: 101 lines, more than its limit of 100"),
        ({"a": 49, "tests": 1}, "a: 49 lines, more than 50 below its limit of 100: lower the limit"),
        ({"a": 100, "tests": 101}, "tests: 101 lines, more than its limit of 100"),
        ({"a": 100, "b": 1, "tests": 1}, "b: no limit in LIMITS for its 1 lines"),
        ({"tests": 1}, "a: 0 lines, more than 50 below its limit of 100: lower the limit"),
    ],
)
def test_offences_are_seen(found: dict[str, int], said: str) -> None:
    assert offences(found, {"a": 100, "tests": 100}) == ([said] if said else [])
