"""Methods of live objects replaced for a while, so that what watches an engine costs nothing while nothing watches."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from zero.core.world import Axis
from zero.watchdog.rank_status import Collective

Stamp = float | torch.cuda.Event
By = Callable[[Callable[..., Any]], Callable[..., Any]]
Told = Callable[["Collective", Stamp, Stamp, Stamp], None]  # a collective, its begin, and one wait for it: begin, end


class Taps:
    """Replaces methods on the objects of one engine, each for somebody, who may end it at any time."""

    def __init__(self) -> None:
        # By object and name: the object, what stood there before all of us, and who has replaced it by what, in order.
        self._chains: dict[tuple[int, str], tuple[Any, Any, list[tuple[object, By]]]] = {}

    def replace(self, who: object, owner: Any, name: str, by: By) -> None:
        """Have `owner.name` be `by(owner.name)`, on this object only."""
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
                self.replace(other, owner, name, by)

    def waits(self, who: object, axis: Axis, device: torch.device, told: Told) -> None:
        """Call `told` after each wait for a collective of the axis's engine, on the thread that has waited.

        On a GPU the stamps are events of its current stream, of which a wait takes as long as the stream stood still.
        """
        # Of a backend that is not the device's own the host waits itself.
        clock = device if axis.native else torch.device("cpu")

        def begun(begin: Callable[..., Collective]) -> Callable[..., Collective]:
            def call(*args: Any, **kwargs: Any) -> Collective:
                collective = _Begun(*begin(*args, **kwargs))
                collective.at = now(clock)
                return collective

            return call

        def waited(wait: Callable[..., None]) -> Callable[..., None]:
            def call(works: Sequence[Any], collective: Collective, **more: Any) -> None:
                start = now(clock)
                wait(works, collective, **more)
                told(collective, getattr(collective, "at", start), start, now(clock))

            return call

        self.replace(who, axis.watchdog, "begin", begun)
        self.replace(who, axis.watchdog, "wait", waited)


class _Begun(Collective):
    """With the stamp of its begin in `at`."""

    at: Stamp


def forward_of(module: nn.Module) -> tuple[Any, str]:
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
