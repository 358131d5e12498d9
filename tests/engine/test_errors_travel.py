"""The promise: an exception of ours crosses processes: pickle, copy and a process pool leave it as it was."""

from __future__ import annotations

import copy
import importlib
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import zero


def exceptions_of_ours() -> list[type[Exception]]:
    root = Path(zero.__file__).parent
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root.parent).with_suffix("").parts
        # Importing a door opens it; Lightning is an extra.
        if parts[-1] != "__main__" and parts[1] not in ("as_deepspeed", "lightning"):
            importlib.import_module(".".join(parts).removesuffix(".__init__"))
    found, looked_at = [], [Exception]
    while looked_at:
        for kind in type.__subclasses__(looked_at.pop()):
            looked_at.append(kind)
            found += [kind] if kind.__module__.partition(".")[0] == "zero" else []
    return found


def test_every_exception_of_ours_is_the_same_elsewhere():
    arguments = {
        "ConfigError": (["fp16.enabled: got 3, wanted true or false", "second"], "zero.json"),
    }
    kinds = exceptions_of_ours()
    assert {"ConfigError", "ScheduleError", "Damaged", "LaunchError"} <= {kind.__name__ for kind in kinds}
    made = [kind(*arguments.get(kind.__name__, ("lr: wanted a number",))) for kind in kinds]
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        elsewhere = list(pool.map(copy.copy, made))
    for error, *others in zip(made, elsewhere, map(copy.copy, made), map(copy.deepcopy, made), strict=True):
        for other in others:
            assert (type(other), str(other), vars(other)) == (type(error), str(error), vars(error))
