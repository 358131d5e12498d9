"""Ranks of this machine that run a module of zero.tools, each of which leaves a file in a folder."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

SECONDS = 180  # for ranks to start, do their work and end


class RanksEnded(NamedTuple):
    """status: None where the time was over; said: the last lines that they printed; wrote: by rank, what they left."""

    status: int | None
    said: str
    wrote: dict[int, str]


def run_on_ranks(ranks: int, module: str, *words: str) -> RanksEnded:
    """Start them as `zero run` does. The module is called with a folder, before the words, for files named by rank."""
    with tempfile.TemporaryDirectory(prefix="zero-ranks-") as folder:
        command: Sequence[str] = ["run", "--quiet", "--hostfile", "", "--num_gpus", str(ranks), "--module", module]
        process = subprocess.Popen(
            [sys.executable, "-m", "zero", *command, folder, *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            output, status = process.communicate(timeout=SECONDS)[0], process.returncode
        except subprocess.TimeoutExpired:
            process.terminate()
            output, status = process.communicate()[0], None
        wrote = {int(path.name): path.read_text(encoding="utf-8") for path in sorted(Path(folder).iterdir())}
    return RanksEnded(status, "\n".join(output.strip().splitlines()[-10:]), wrote)
