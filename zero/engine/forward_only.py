"""Engines that only run forward on a model which another engine has: DeepSpeed lets programs make several of one model.

The parameters are those of the engine with the optimizer, or of the first where none has one; the others run its
forward. A program may so make one to look at its model before it trains it, or beside.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from zero.config import Config
from zero.core.owner import owner_of
from zero.core.unit import Unit
from zero.engine.status import Status

_SAME = ("compute_dtype", "autocast_dtype", "sequence_parallel_size")  # what a forward depends on
_PARTS = ("_sharded", "_training", "_saving", "_loading", "_weights", "_offload", "_compiler")


def engine_of(model: nn.Module) -> Any | None:
    """The engine, neither dropped nor destroyed, that has the parameters of `model`."""
    units = (owner.unit for owner in map(owner_of, model.parameters()) if owner is not None)
    found = (unit.engine() for unit in units if isinstance(unit, Unit))
    return next((engine for engine in found if engine is not None and engine._sharded is not None), None)


def sharer(model: nn.Module, settings: Config) -> Any | None:
    """The engine of `model`, if an engine with `settings` would run the same forward."""
    engine = engine_of(model)
    same = engine is not None and engine.module is model
    return engine if same and all(getattr(engine._config, key) == getattr(settings, key) for key in _SAME) else None


def follower(engine: Any) -> Any:
    """One more engine for the model of this one; it only runs forward."""
    other = type(engine).__new__(type(engine))
    other.__dict__.update(engine.__dict__, _modules=dict(engine._modules))
    other.optimizer = other.lr_scheduler = other.training_dataloader = None
    other._status = Status(None)
    retire(other)
    other._status.follows = True
    return other


def hand_over(engine: Any) -> None:
    """Let the next engine of the model of this one, which has no optimizer, take the parameters."""
    engine._saving.join()
    engine._let_go()
    engine._recorder.end()
    retire(engine)
    engine._status.follows = True


def retire(engine: Any) -> None:
    """Leave an engine without parts."""
    engine._status.destroyed = True
    for part in _PARTS:
        setattr(engine, part, None)


def acting(engine: Any) -> Any:
    """Whose forward a call of this engine runs."""
    if not engine._status.follows:
        return engine
    if (found := engine_of(engine.module)) is None:
        raise RuntimeError(
            "the engine that had this model is gone, and this one only ran its forward; call the module itself, or "
            "make a new engine with zero.initialize"
        )
    return found
