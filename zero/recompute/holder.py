"""The state that `zero.checkpointing` uses without an engine as an argument."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import NamedTuple

from zero.core.world import Axis
from zero.recompute.saved_inputs import ALONE, InputStore
from zero.recompute.seeds import SeedTracker


class Scope(NamedTuple):
    """The surroundings of a call: where its inputs are kept, and how many recomputed calls it is inside of."""

    inputs: InputStore | None = None
    inside: int = 0


NOWHERE = Scope()


class Holder:
    """The state of `zero.checkpointing`.

    inputs: the store that `configure` made, None before;
    axis:  the ranks that inputs are cut over;
    seeds: named streams of random numbers.
    """

    def __init__(self) -> None:
        self.inputs: InputStore | None = None
        self.axis: Axis = ALONE
        self.seeds = SeedTracker()
        self._scope: ContextVar[Scope] = ContextVar("zero.recompute")  # of this thread

    @property
    def scope(self) -> Scope:
        """The scope of the caller; `configure` takes precedence over an engine's JSON."""
        here = self._scope.get(NOWHERE)
        return here if here.inside or self.inputs is None else here._replace(inputs=self.inputs)

    @contextlib.contextmanager
    def within(self, scope: Scope) -> Iterator[None]:
        """Inside, `scope` is the scope of calls."""
        token = self._scope.set(scope)
        try:
            yield
        finally:
            self._scope.reset(token)


# DeepSpeed's functions are called inside models that know no engine: `configure` once per process, `checkpoint`
# with only a function. They share this one object; modules named in the JSON do not use it.
HOLDER = Holder()
