"""Modules that are gathered on their own although a larger one around them is gathered as a block.

Planning reads the mark when an engine is made: all parameters below such a module are units of their own, and the
block keeps the rest. Inside a leaf, which is gathered at once, the mark says nothing.
"""

from __future__ import annotations

from torch import nn

_MARK = "_zero_apart"


def set_apart(module: nn.Module) -> None:
    """Have this module's parameters gathered when it runs, not when the block around it does."""
    module.__dict__[_MARK] = True


def is_apart(module: nn.Module) -> bool:
    """Whether the module was set apart."""
    return module.__dict__.get(_MARK, False)
