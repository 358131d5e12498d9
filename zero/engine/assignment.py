"""Which run of a script `initialize` makes an engine for: the script's own, or one that a command assigns to it.

`zero check` and `zero tune` start a script with a configuration in place of its own, and record it.
"""

from __future__ import annotations

import atexit
import copy
import functools
import importlib
import json
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch.distributed as dist

from zero.config import Config
from zero.launch.contract import ASSIGNED
from zero.log import rank_zero

_SHOWN = ("tensorboard", "wandb", "csv_monitor", "comet", "flops_profiler", "comms_logger")
_SHOWN_OF_ZERO = ("report", "unit_norms", "alarm", "profile")


class Given(NamedTuple):
    """What an engine is made of: arguments of `initialize`, and the checked configuration."""

    model: Any
    optimizer: Any
    model_parameters: Any
    lr_scheduler: Any
    settings: Config


class ScriptRun:
    """The script's own run. `initialize` loads every configuration and makes every engine through one of these.

    plain: whether the run is one in plain torch.
    """

    plain = False

    def load(self, load: Callable[..., Config], source: Any, model: Any, **checks: Any) -> Config:
        """The configuration of an engine of `model`; `checks`: of `load`, of what the script itself has written."""
        return load(source, **checks)

    def engine(self, make: Callable[[Given], Any], given: Given) -> Any:
        """The engine; `make` makes one with the scheduler set."""
        return make(given)


class AssignedRun(ScriptRun):
    """A run that a command wants of this process. It writes at its end how many steps the script has taken.

    folder: for what comes of it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        atexit.register(self._write_steps)

    @property
    def taken(self) -> int:
        """Optimizer steps so far."""
        raise NotImplementedError

    def config(self, settings: Config, model: Any) -> dict[str, Any]:
        """The configuration that replaces the script's, for an engine of `model`."""
        raise NotImplementedError

    def watch(self, engine: Any) -> None:
        """Record this engine; the script ends when its steps are done."""
        raise NotImplementedError

    def load(self, load: Callable[..., Config], source: Any, model: Any, **checks: Any) -> Config:
        """See `ScriptRun.load`."""
        return load(self.config(load(source, filled=False, **checks), model), filled=False)

    def engine(self, make: Callable[[Given], Any], given: Given) -> Any:
        """See `ScriptRun.engine`."""
        engine = make(given)
        self.watch(engine)
        return engine

    def end(self, command: str) -> NoReturn:
        """End the script: all steps are done. Collective."""
        if dist.is_initialized():
            dist.barrier()  # a rank that ends early may take what others still need with it
        rank_zero(logging.INFO, "%s: %d steps are done, which is all; the script ends here", command, self.taken)
        raise SystemExit(0)

    def _write_steps(self) -> None:
        if self.folder.is_dir():
            (self.folder / "steps.txt").write_text(str(self.taken))


@functools.cache
def assigned_run() -> ScriptRun:
    """The run that this process was started for. Read once."""
    if (text := os.environ.get(ASSIGNED)) is None:
        return ScriptRun()
    values = json.loads(text)
    module, folder = importlib.import_module(values.pop("module")), Path(values.pop("folder"))
    return module.make_run(folder, **values)


def environment(module: str, folder: Path, **values: Any) -> dict[str, str]:
    """The variable that tells a script's processes of a run, which the module's `make_run(folder, **values)` makes."""
    return {ASSIGNED: json.dumps({"module": module, "folder": str(folder), **values})}


def unseen(raw: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a configuration whose run writes no files and logs no steps."""
    found = {key: copy.deepcopy(value) for key, value in raw.items() if key not in _SHOWN}
    if isinstance(section := found.get("zero"), dict):
        found["zero"] = {key: value for key, value in section.items() if key not in _SHOWN_OF_ZERO}
    return found | {"steps_per_print": float("inf"), "wall_clock_breakdown": False, "memory_breakdown": False}


def wrap(
    engine: Any, name: str, before: Callable[..., Any] | None = None, stepped: Callable[[], Any] | None = None
) -> None:
    """Call `before`, with its arguments, ahead of a method of an engine, and `stepped` behind a step of its optimizer.

    On the object, in front of the method of its class: the script's loop must not see a difference.
    """
    method = getattr(engine, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        steps = engine.global_steps
        if before is not None:
            before(*args, **kwargs)
        result = method(*args, **kwargs)
        if stepped is not None and engine.global_steps > steps:
            stepped()
        return result

    setattr(engine, name, call)
