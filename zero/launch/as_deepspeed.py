"""The folder in which zero has DeepSpeed's name, and what a process needs in its environment to find it there."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Mapping
from pathlib import Path

SITE = str(Path(__file__).parents[1] / "as_deepspeed" / "site")


def variables(environment: Mapping[str, str]) -> dict[str, str]:
    """What is to be set so that `import deepspeed` and the command `deepspeed` are zero's; the rest of each stays."""
    added = {"PYTHONPATH": SITE, "PATH": str(Path(SITE, "bin"))}
    return {name: _first(path, environment.get(name, "")) for name, path in added.items()} | {
        "ZERO_PYTHON": sys.executable  # for the commands there
    }


def is_open(environment: Mapping[str, str]) -> bool:
    """Whether processes with this environment find zero as deepspeed."""
    return environment.get("PYTHONPATH", "").split(os.pathsep)[0] == SITE


def note() -> str:
    """One line for people: that deepspeed is zero, and which real one is out of sight for that."""
    real = _version([path for path in sys.path if path != SITE])
    hidden = f"; the installed DeepSpeed {real} is not used" if real else ""
    return f"deepspeed is zero, as version {_version([SITE])}{hidden}"


def _version(path: list[str]) -> str | None:
    return next((found.version for found in importlib.metadata.distributions(name="deepspeed", path=path)), None)


def _first(path: str, others: str) -> str:
    rest = [each for each in others.split(os.pathsep) if each not in ("", path)]
    return os.pathsep.join([path, *rest])
