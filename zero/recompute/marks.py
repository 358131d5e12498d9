"""`module.recompute()`: what the JSON says of modules by name, said of one in the program."""

from __future__ import annotations

from typing import TypeVar

from torch import nn

M = TypeVar("M", bound=nn.Module)

MARK = "_zero_recompute"


def recompute(self: M, mode: bool = True) -> M:
    """Have an engine compute this module's activations again in the backward; returns the module.

    False inside of one that is recomputed: what the operators of this module give is kept.
    """
    self.__dict__[MARK] = mode
    return self


nn.Module.recompute = recompute  # type: ignore[attr-defined]
