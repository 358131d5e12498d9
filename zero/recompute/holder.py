"""The state that `zero.checkpointing` uses without an engine as an argument.

Of it are named streams of random numbers, so that ranks of one axis may draw the same numbers or different ones.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch

from zero.core.comm import Axis
from zero.recompute.saved_inputs import ALONE, InputStore

MODEL_PARALLEL = "model-parallel-rng"


class SeedTracker:
    """Named states of this process's generator: its CUDA device's, else the CPU's."""

    def __init__(self) -> None:
        self._states: dict[str, torch.Tensor] = {}
        self._seeds: set[int] = set()

    def reset(self) -> None:
        """Drop all streams."""
        self._states, self._seeds = {}, set()

    def get_states(self) -> dict[str, torch.Tensor]:
        """The state of each stream."""
        return dict(self._states)

    def set_states(self, states: Mapping[str, torch.Tensor]) -> None:
        """Restore the streams from `get_states`."""
        self._states = dict(states)

    def state_dict(self) -> dict[str, Any]:
        """All streams, and the used seeds, as plain values and uint8 tensors."""
        return {"states": self.get_states(), "seeds": sorted(self._seeds)}

    def load_state_dict(self, state: Mapping[str, Any], seed: int) -> None:
        """Continue the streams of `state_dict`; one of another kind of device restarts from its name and `seed`."""
        if not state["states"]:  # then no generator is needed
            self._states, self._seeds = {}, set(state["seeds"])
            return
        states = {}
        with _preserved() as generator:
            for name, kept in state["states"].items():
                generator.manual_seed(zlib.crc32(name.encode()) ^ seed)
                new = generator.get_state()
                states[name] = kept if kept is not None and kept.shape == new.shape else new
        self._states, self._seeds = states, set(state["seeds"])

    def add(self, name: str, seed: int) -> None:
        """Begin a stream. Raises ValueError for a name or a seed that is already used."""
        if seed in self._seeds:
            raise ValueError(f"seed: another stream has {seed} already; give each its own")
        if name in self._states:
            raise ValueError(f"name: there is a stream {name!r} already; call reset() first")
        self._seeds.add(seed)
        with _preserved() as generator:
            generator.manual_seed(seed)
            self._states[name] = generator.get_state()

    def seed_model_parallel(self, seed: int, rank: int) -> None:
        """Seed torch equally on the ranks of the model axis, and their stream `MODEL_PARALLEL` differently."""
        self.reset()
        _generator().manual_seed(seed)
        self.add(MODEL_PARALLEL, seed + 2718 + rank)  # DeepSpeed's offset, so that a run's masks stay the same

    @contextlib.contextmanager
    def fork(self, name: str = MODEL_PARALLEL) -> Iterator[None]:
        """Inside, torch draws from the stream `name`; the state outside does not change."""
        if name not in self._states:
            raise ValueError(f"name: there is no stream {name!r}; add() one of {sorted(self._states)} or a new one")
        with _preserved() as generator:
            generator.set_state(self._states[name])
            try:
                yield
            finally:
                self._states[name] = generator.get_state()

    @contextlib.contextmanager
    def as_of(self, states: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Inside, the streams are at `states`; draws inside do not change them outside."""
        now = self.get_states()
        self.set_states(states)
        try:
            yield
        finally:
            self.set_states(now)


class Scope(NamedTuple):
    """The surroundings of a call: where its inputs are kept, and how many recomputed calls it is inside of.

    kept: it is inside of a module whose results are kept.
    """

    inputs: InputStore | None = None
    inside: int = 0
    kept: bool = False


NOWHERE = Scope()


class Holder:
    """The state of `zero.checkpointing`: the store that `configure` made, its axis, and streams of random numbers."""

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


@contextlib.contextmanager
def _preserved() -> Iterator[torch.Generator]:
    """The generator; its state is restored afterwards."""
    generator = _generator()
    before = generator.get_state()
    try:
        yield generator
    finally:
        generator.set_state(before)


def _generator() -> torch.Generator:
    if torch.cuda.is_available():
        torch.cuda.init()
        return torch.cuda.default_generators[torch.cuda.current_device()]
    return torch.default_generator


# DeepSpeed's functions are called inside models that know no engine: `configure` once per process, `checkpoint`
# with only a function. They share this one object; modules named in the JSON do not use it.
HOLDER = Holder()
