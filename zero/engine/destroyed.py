"""What an engine is after `destroy()`: it says what its configuration and its counters say, and refuses all else."""

from __future__ import annotations

import functools
from typing import Any, NoReturn

from torch import nn

from zero.engine.queries import Queries

_GO_ON = {"destroy", "was_step_applied", "get_global_grad_norm", "is_gradient_accumulation_boundary"}


@functools.cache
def destroyed_class(kind: type[nn.Module]) -> type[nn.Module]:
    """The class that an engine of class `kind` has from `destroy()` on. What torch's modules have they keep."""
    ours = [base for base in kind.__mro__[: kind.__mro__.index(nn.Module)] if base is not Queries]
    names = {name for base in ours for name in vars(base) if not name.startswith("_")} - _GO_ON
    refusing = {name: property(_refuse) if isinstance(getattr(kind, name), property) else _refuse for name in names}
    # A method that was looked up before asks this one.
    return type(f"Destroyed{kind.__name__}", (kind,), {**refusing, "_alive": _refuse, "__doc__": kind.__doc__})


def _refuse(engine: Any, *args: Any, **kwargs: Any) -> NoReturn:
    raise RuntimeError("this engine was destroyed; make a new one with zero.initialize")
