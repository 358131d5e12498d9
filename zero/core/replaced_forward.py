"""A module whose forward is another function for a while, without a change of its class, its name or its hooks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn


class ReplacedForward:
    """Stands in place of the forward of one module until `undo`. Copies of it, also in files, get the plain one.

    module: the module; plain: its forward before.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.plain: Callable[..., Any] = module.forward
        self._own = "forward" in module.__dict__
        functools.update_wrapper(self, self.plain, updated=())  # for code that reads the names of its arguments
        module.forward = self

    def undo(self) -> None:
        """Restore the module's own forward."""
        if self.module.__dict__.get("forward") is self:
            if self._own:
                self.module.forward = self.plain
            else:
                del self.module.forward

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        """The replacement in copies and saved files; used by `copy.deepcopy` and by `torch.save`."""
        # The copy of the module has no `forward` attribute yet when this is called, so it finds that of its class.
        return (_itself, (self.plain,)) if self._own else (getattr, (self.module, "forward"))


def _itself(forward: Any) -> Any:
    return forward
