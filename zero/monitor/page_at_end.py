"""The page at the end of a run, made by a separate process so that it cannot affect the run."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from zero.log import logger

_PATIENCE = 30.0  # seconds that the end of a run waits for it; 10,000 steps take some two


def make_page(folder: Path) -> None:
    """Make DIR/report.html in another process. A failed run does not wait for it; an error is one line of the log.

    Call it after the last line of rank 0, with the outcome of the run, is written.
    """
    if importlib.util.find_spec("bokeh") is None:
        logger.info("zero.report: pip install 'zero[report]', and zero report --run %s makes a page of it", folder)
        return
    path = folder.resolve()
    process = subprocess.Popen(
        [sys.executable, "-m", "zero", "report", "--run", str(path)],
        cwd=Path(__file__).parents[2],  # so that this zero is imported, not one in the script's folder
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # it survives when the ranks of a failed job are killed
    )
    if _last_line(path / "rank-0.jsonl").get("status") == "failed":
        logger.info("zero.report: %s is being made", path / "report.html")
        return
    try:
        said = process.communicate(timeout=_PATIENCE)[1].strip()
    except subprocess.TimeoutExpired:
        said = f"not made within {_PATIENCE:.0f} s; it may still come"
    if process.returncode == 0:
        logger.info("zero.report: %s", path / "report.html")
    else:
        logger.warning("zero.report: no page: %s", said.splitlines()[-1] if said else "it died")


def _last_line(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 2**16))
        return json.loads(file.read().splitlines()[-1])
