"""The promise: a shell that asks argcomplete is told the commands and options of `zero`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("zero re", {"report"}),
        ("zero to", {"top"}),
        ("zero report --ru", {"--run"}),
        ("zero run --num_", {"--num_gpus", "--num_nodes"}),
        ("zero report --js", {"--json"}),
    ],
)
def test_commands_and_options_are_offered(line: str, offered: set[str], tmp_path: Path) -> None:
    pytest.importorskip("argcomplete")
    asked = {"_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line)), "COMP_TYPE": "9"}
    out = tmp_path / "out"
    asked |= {"_ARGCOMPLETE_STDOUT_FILENAME": str(out), "_ARGCOMPLETE_IFS": "\n", "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-m", "zero"], env={**os.environ, **asked}, check=True, timeout=60)
    assert offered <= {word.strip() for word in out.read_text().split("\n")}
