"""The forwards of modules, replaced for a while: there is no other place that sees one run again in the backward."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Stamp = float | torch.cuda.Event
By = Callable[[Callable[..., Any]], Callable[..., Any]]


class Taps:
    """Replaces forwards of one engine's modules, each for somebody, who may end it at any time."""

    def __init__(self) -> None:
        # By object and name: the object, what stood there before all of us, and who has replaced it by what, in order.
        self._chains: dict[tuple[int, str], tuple[Any, Any, list[tuple[object, By]]]] = {}

    def replace(self, who: object, module: nn.Module, by: By) -> None:
        """Have the forward of a module be `by(forward)`, on this object only."""
        self._replace(who, *_forward_of(module), by)

    def _replace(self, who: object, owner: Any, name: str, by: By) -> None:
        chain = self._chains.setdefault((id(owner), name), (owner, vars(owner).get(name), []))
        chain[2].append((who, by))
        setattr(owner, name, by(getattr(owner, name)))

    def remove(self, who: object) -> None:
        """Undo what was replaced for `who`."""
        for (key, name), (owner, before, links) in list(self._chains.items()):
            kept = [link for link in links if link[0] is not who]
            if len(kept) == len(links):
                continue
            del self._chains[key, name]
            delattr(owner, name)
            if before is not None:
                setattr(owner, name, before)
            for other, by in kept:
                self._replace(other, owner, name, by)


def _forward_of(module: nn.Module) -> tuple[Any, str]:
    """Where the forward of a module is replaced, so that what `zero.recompute` runs again goes through it, too."""
    own = vars(module).get("forward")
    return (own, "inner") if hasattr(own, "inner") else (module, "forward")


def now(device: torch.device) -> Stamp:
    """This moment, on a GPU that of its current stream."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def ended(stamp: Stamp) -> bool:
    """Whether the moment is past."""
    return isinstance(stamp, float) or stamp.query()


def seconds(start: Stamp, end: Stamp) -> float:
    """Between two moments that are past."""
    return end - start if isinstance(end, float) else start.elapsed_time(end) / 1e3
