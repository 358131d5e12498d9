"""Hooks that stay behind when their module is copied or saved whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class OwnHook:
    """Calls `hook` on the module that it was registered on, and does nothing on a copy of that module.

    It runs as it is also where the user has compiled the module: a compiler cannot follow how parameters come and go.

    A copy has whole parameters of its own. With the hooks it would gather those of the original, which needs all
    ranks, and an averaged copy that one rank evaluates would wait for ever.
    """

    def __init__(self, hook: Callable[..., Any]) -> None:
        self._hook = hook

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Pass the call on."""
        if not torch.compiler.is_compiling():
            return self._hook(*args, **kwargs)
        # Made at each call: what is stored in the middle of a forward, a compiler may store too early or not at all.
        return torch.compiler.disable(self._hook)(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        """What copies and saved files get instead; used by `copy.deepcopy` and by `torch.save`."""
        return OwnHook, (nothing,)


def nothing(*args: Any, **kwargs: Any) -> None:
    """The hook of a copy."""
