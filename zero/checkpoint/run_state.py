"""The state of a run in a checkpoint, without the model's tensors: read, and checked before any of it is used.

`zero.engine.checkpoint.resume` takes it from an engine, and puts it into one.
"""

from __future__ import annotations

import contextlib
import random
import struct
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, Literal

import torch
from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError, with_config
from typing_extensions import NotRequired, TypedDict

from zero.checkpoint.consistency import named_tensors
from zero.checkpoint.index import Count, Damaged, first_error
from zero.checkpoint.plain_values import decode
from zero.checkpoint.reader import Reader

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NUMPY_KINDS = Literal["MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64"]
EXACT = ConfigDict(strict=True, arbitrary_types_allowed=True)  # no text for a number; keys of later versions pass


def _bytes(value: torch.Tensor) -> torch.Tensor:
    if value.dtype != torch.uint8 or value.dim() != 1:
        raise ValueError("wanted bytes")
    return value


Bytes = Annotated[torch.Tensor, AfterValidator(_bytes)]


@with_config(EXACT)
class Counters(TypedDict):
    """Of `zero.engine.status`."""

    global_steps: Count
    global_samples: Count
    skipped_steps: Count
    micro_steps: Count


@with_config(EXACT)
class Scheduler(TypedDict):
    """The class of a learning-rate scheduler, and what its state_dict() gave."""

    kind: str
    state: Any


@with_config(EXACT)
class Scale(TypedDict):
    """Of `zero.optim.scaler`."""

    scale: Positive
    hysteresis: int
    iteration: Count
    last_overflow: Annotated[int, Field(ge=-1)]
    forced: Positive | None
    unit: NotRequired[Positive | None]  # older checkpoints have none


@with_config(EXACT)
class Dealing(TypedDict):
    """Of `zero.data.position.Partition`."""

    source: str
    batch_size: Annotated[int, Field(gt=0)]
    world_size: Annotated[int, Field(gt=0)]
    together: Count
    workers: Annotated[int, Field(gt=0)]
    samples: Count | None
    seed: int


@with_config(EXACT)
class Data(TypedDict):
    """Of `zero.data.position.Position`."""

    epoch: Annotated[int, Field(ge=0, lt=1 << 32)]
    start: Annotated[list[Count], Field(min_length=1)]
    batches: Count
    seen: Annotated[list[Count], Field(min_length=1)]
    dealing: Dealing


@with_config(EXACT)
class Randomness(TypedDict):
    """Of `zero.engine.randomness`."""

    base: list[int]
    place: Annotated[list[Count], Field(min_length=2, max_length=2)]
    forwards: Count


@with_config(EXACT)
class Alarms(TypedDict):
    """Of `zero.engine.alarm`."""

    last: dict[str, list[float]]
    quiet_until: Count


@with_config(EXACT)
class EngineState(TypedDict):
    """The same on all ranks."""

    counters: Counters
    scheduler: Scheduler | None
    loss_scaler: Scale | None
    data: Data | None
    groups: list[dict[str, Any]] | None
    randomness: Randomness | None
    own_buffers: list[str] | None
    alarms: NotRequired[Alarms | None]  # older checkpoints have none


@with_config(EXACT)
class Python(TypedDict):
    """Of Python's `random`."""

    version: int
    words: Bytes
    gauss: float | None


@with_config(EXACT)
class Numpy(TypedDict):
    """Of NumPy's global generator."""

    bit_generator: NUMPY_KINDS
    state: dict[str, Any]


@with_config(EXACT)
class Streams(TypedDict):
    """Of `zero.recompute.holder`."""

    states: dict[str, Bytes | None]
    seeds: list[int]


@with_config(EXACT)
class Random(TypedDict):
    """Of all generators of a process."""

    torch: Bytes
    cuda: Bytes | None
    python: Python
    numpy: Numpy | None
    streams: Streams


def _fits_generators(state: Random) -> Random:
    """A state that generators of its kinds take; no generator of the process is touched."""
    try:
        torch.Generator().set_state(state["torch"])
        random.Random().setstate(python_state(state["python"]))
        _fits_numpy(state["numpy"])
    except Exception as error:  # each generator has exceptions of its own
        raise ValueError(f"no state of a generator ({type(error).__name__}: {error})") from None
    return state


def _fits_numpy(state: Mapping[str, Any] | None) -> None:
    if state is None:
        return
    inner = state["state"]
    # NumPy goes on to read at these places, wherever they are.
    if not 0 <= inner.get("pos", 0) <= 624 or not 0 <= state.get("buffer_pos", 0) <= 4:
        raise ValueError("a place outside of its words")
    with contextlib.suppress(ImportError):
        import numpy

        numpy.random.RandomState(getattr(numpy.random, state["bit_generator"])(0)).set_state(dict(state))


@with_config(EXACT)
class RankState(TypedDict):
    """Each rank's own."""

    random: Annotated[Random, AfterValidator(_fits_generators)]


_ENGINE, _RANK, _DICT = TypeAdapter(EngineState), TypeAdapter(RankState), TypeAdapter(dict[Any, Any])


class RunState:
    """The values of one checkpoint, each read when it is asked for. Raises Damaged."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._index = reader.index
        self._shared: Mapping[str, Any] = self._index.shared or {}

    @property
    def steps(self) -> int:
        """Of the optimizer."""
        return self._shared.get("global_steps", 0)

    def engine(self) -> EngineState | None:
        """None in a checkpoint that another program has written."""
        state = self._value("engine_state", self._shared.get("state"), _ENGINE)
        if state is not None:
            if state["counters"]["global_steps"] != self.steps:
                step = state["counters"]["global_steps"]
                raise self._damaged("engine_state", f"it has step {step}, and the index {self.steps}")
            last = max(
                (-1 if each.group is None else each.group for each in self._index.parameters.values()), default=-1
            )
            if last >= (count := len(state["groups"] or ())):
                text = f"it has {count} parameter groups, and parameters are in group {last}"
                raise self._damaged("engine_state", text)
        return state

    def rank(self, rank: int) -> RankState | None:
        """None where no random numbers were saved."""
        return self._value(f"rank_state/{rank}", (self._index.ranks[rank] or {}).get("state"), _RANK)

    def client(self) -> dict[str, Any]:
        """Of the caller of save_checkpoint."""
        return self._value("client_state", self._index.client, _DICT) or {}

    def extra(self) -> dict[str, Any]:
        """What modules gave by `get_extra_state`, by name in a state_dict."""
        return self._value("extra_state", self._shared.get("extra_state"), _DICT) or {}

    def problems(self) -> list[str]:
        """All that is raised by any of these."""
        found = []
        of_ranks = [partial(self.rank, rank) for rank in range(self._index.world_size)]
        for ask in (self.engine, self.client, self.extra, *of_ranks):
            try:
                ask()
            except (Damaged, OSError) as error:
                found.append(str(error))
        return found

    def _value(self, what: str, plain: Any, form: TypeAdapter[Any]) -> Any:
        """What `encode` was given, which is of this form; None as it is."""
        if plain is None:
            return None
        tensors, index = {}, self._index
        for name in named_tensors(plain)[0] & index.tensors.keys():
            tensors[name] = self._reader.whole(index.tensors[name], f"tensor '{name}'")
        try:
            value = decode(plain, tensors)
            form.validate_python(value)
        except ValidationError as error:
            raise self._damaged(what, first_error(error)) from None
        except (ValueError, RecursionError) as error:
            raise self._damaged(what, error) from None
        return value

    def _damaged(self, what: str, why: object) -> Damaged:
        return Damaged(f"{what} in {self._reader.folder} is damaged: {why}")


def python_state(state: Mapping[str, Any]) -> tuple[int, tuple[int, ...], float | None]:
    """As `random.setstate` takes it."""
    raw = bytes(state["words"].tolist())
    return state["version"], struct.unpack(f"<{len(raw) // 4}I", raw), state["gauss"]
