"""Private names of torch stand in one file; those that no training here needs are asked, so that changes show."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAMES = re.compile(
    r"torch\._(?!dynamo|_version__)\w+|\._cdata\b|\._use_count\b|_execution_engine|\._backward_hooks\b(?!\.__)"
)


def test_they_stand_in_one_file():
    files = [path for path in (ROOT / "zero").rglob("*.py") if path.name != "torch_private.py"]
    lines = [f"{path.name}: {line.strip()}" for path in files for line in path.read_text().splitlines()]
    assert len(files) > 100
    assert [line for line in lines if NAMES.search(line.split("#")[0])] == []
