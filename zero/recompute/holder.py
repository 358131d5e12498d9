"""What `zero.checkpointing` finds without being handed an engine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import NamedTuple

from zero.core.world import Axis
from zero.recompute.saved_inputs import ALONE, InputStore
from zero.recompute.seeds import SeedTracker


class Scope(NamedTuple):
    """What surrounds a call: where its inputs are kept, and whether it lies inside another call that is recomputed."""

    inputs: InputStore | None = None
    inside: bool = False


NOWHERE = Scope()


class Holder:
    """The state of `zero.checkpointing`.

    inputs: what `configure` has asked for, None before;
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
        """What surrounds the caller; `configure` goes before an engine's JSON."""
        here = self._scope.get(NOWHERE)
        return here if here.inside or self.inputs is None else here._replace(inputs=self.inputs)

    @contextlib.contextmanager
    def within(self, scope: Scope) -> Iterator[None]:
        """Inside, `scope` is what surrounds a call."""
        token = self._scope.set(scope)
        try:
            yield
        finally:
            self._scope.reset(token)


# DeepSpeed's functions are called inside of models that know no engine: `configure` once per process, `checkpoint`
# with a function only. This is the one place where they meet; what the JSON says of modules does not come by here.
HOLDER = Holder()
