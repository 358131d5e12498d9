"""A plugin of pytest: a run that has so much time, and files of tests by turns where that is not enough for all.

    make test-long ARGS="--until $(($(date +%s) + 1800))"

Files in folders of what was changed in the last day of commits come first. Each of the two parts begins at a file that
the date chooses, so that a few days see all of them. What has not begun when the time is over is skipped, and listed at
the end. All of it follows from the option and from the history, since each process of pytest-xdist sorts for itself.
"""

from __future__ import annotations

import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
DAY = 86400  # seconds
GOLDEN = 0.618034  # a step of this share of a circle soon comes near to every place
LEFT_OUT = "left out: the time of this run was over"
# Where the tests of a folder of zero/, or beside it, are, if their folder is not called alike.
TESTED_IN = {
    "as_deepspeed": "huggingface", "compat": "huggingface", "csrc": "kernels", "examples": "docs", "memory": "offload",
    "optim": "engine", "sizes": "plan", "tiled": "recompute", "utils": "core",
}  # fmt: skip


def pytest_addoption(parser: pytest.Parser) -> None:
    about = "begin no test after this time of Unix; list those that are left out"
    parser.addoption("--until", type=int, metavar="SECONDS", help=about)


def changed(root: Path) -> set[str]:
    """The folders of tests/ that the last day of commits is about; none where there is no history."""

    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", root, "log", *words], capture_output=True, text=True, check=True).stdout

    try:
        begin = int(git("-1", "--format=%ct")) - DAY
        paths = [Path(name).parts for name in git(f"--since={begin}", "--format=", "--name-only").splitlines()]
    except (OSError, ValueError, subprocess.CalledProcessError):
        return set()
    folders = [parts[1] if parts[0] in ("zero", "tests") else parts[0] for parts in paths if len(parts) > 1]
    return {name for folder in folders if (root / "tests" / (name := TESTED_IN.get(folder, folder))).is_dir()}


def in_turn(files: list[Path], first: set[str], day: int) -> list[Path]:
    """The files in the order of a day, those in the folders `first` before the others."""
    begin = int(day * GOLDEN % 1 * len(files))
    return sorted(files[begin:] + files[:begin], key=lambda file: file.parent.name not in first)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if until := config.getoption("until"):
        order = in_turn(list(dict.fromkeys(item.path for item in items)), changed(ROOT), until // DAY)
        items.sort(key=lambda item: order.index(item.path))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    until = item.config.getoption("until")
    if until and time.time() > until:
        pytest.skip(LEFT_OUT)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """The files that took most, which pytest does not add up, and what was left out."""
    say, took, left = terminalreporter.write_line, Counter[str](), Counter[str]()
    for report in (each for kind in terminalreporter.stats.values() for each in kind if hasattr(each, "duration")):
        file = report.nodeid.partition("::")[0]
        took[file] += report.duration
        left[file] += report.skipped and LEFT_OUT in str(report.longrepr)
    for file, seconds in took.most_common(20 if config.getoption("durations") else 0):
        say(f"{seconds:7.1f} s in {file}")
    if until := config.getoption("until"):
        say(f"changed, and therefore first: {', '.join(sorted(changed(ROOT))) or 'no folder'}")
        say(f"{left.total()} tests were left out at {time.ctime(until)}; without --until all run")
        for file, count in sorted((+left).items()):
            say(f"{count:5} of {file}")
