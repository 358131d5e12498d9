"""A run that a command (`zero check`, `zero tune`) wants of a script, with a configuration in place of its own."""

from __future__ import annotations

import atexit
import copy
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from zero.config import Config
from zero.log import rank_zero

_SHOWN = ("tensorboard", "wandb", "csv_monitor", "comet", "flops_profiler", "comms_logger")
_SHOWN_OF_ZERO = ("report", "unit_norms", "alarm", "profile")


def unseen(raw: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a configuration whose run writes no files and logs no steps."""
    found = {key: copy.deepcopy(value) for key, value in raw.items() if key not in _SHOWN}
    if isinstance(section := found.get("zero"), dict):
        found["zero"] = {key: value for key, value in section.items() if key not in _SHOWN_OF_ZERO}
    return found | {"steps_per_print": float("inf"), "wall_clock_breakdown": False, "memory_breakdown": False}


def wrap(engine: Any, name: str, before: Callable[..., Any], after: Callable[[], Any] = bool) -> None:
    """Have these called around a method of an engine, `before` with its arguments.

    On the object, in front of the method of its class: the script's loop must not see a difference.
    """
    method = getattr(engine, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        before(*args, **kwargs)
        result = method(*args, **kwargs)
        after()
        return result

    setattr(engine, name, call)


class AssignedRun:
    """What is wanted of this process. It writes at its end how many steps the script has taken.

    plain: whether the run is one in plain torch; folder: for what comes of it.
    """

    plain = False

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

    def end(self, command: str) -> NoReturn:
        """End the script: all steps are done. Collective."""
        if dist.is_initialized():
            dist.barrier()  # a rank that ends early may take what others still need with it
        rank_zero(logging.INFO, "%s: %d steps are done, which is all; the script ends here", command, self.taken)
        raise SystemExit(0)

    def _write_steps(self) -> None:
        if self.folder.is_dir():
            (self.folder / "steps.txt").write_text(str(self.taken))
