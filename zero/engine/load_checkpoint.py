"""Loading a checkpoint into an engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from zero.checkpoint import folder
from zero.checkpoint.index import Index
from zero.core.wrap import Sharded
from zero.engine.loading import Source, load_unit, renew
from zero.engine.saving import saved_buffers
from zero.log import logger
from zero.optim.optimizer import ZeroOptimizer


class LoadCheckpoint:
    """`load_checkpoint`; mixed into the engine."""

    module: nn.Module
    optimizer: ZeroOptimizer | None
    global_steps: int
    _sharded: Sharded

    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: str | int | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Take everything from `load_dir`/`tag` (default: what `latest` names)."""
        self._alive()
        tag = folder.latest(Path(load_dir)) if tag is None else str(tag)
        if tag is None:
            logger.warning("load_checkpoint: %s has no file '%s'; nothing is loaded", load_dir, folder.LATEST)
            return None, None
        place = Path(load_dir) / tag
        index = folder.read_index(place)
        self._load(place, index, load_optimizer_states and not load_module_only)
        self.global_steps = index.shared["global_steps"]
        return str(place), {}

    def _load(self, place: Path, index: Index, states: bool) -> None:
        source = Source(place, index)
        for unit in self._sharded.units:
            unit.invalidate()
            names = {spec.name: spec.name for spec in unit.plan.params}
            load_unit(unit, self.optimizer, source, names, states, True)
        renew(self._sharded.units)
        buffers = saved_buffers(self.module)
        for name, stored in index.buffers.items():
            buffers[name].copy_(source.whole(stored, f"buffer '{name}'"))
