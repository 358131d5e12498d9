"""Where the parameter shard, the optimizer state and the gradient of one unit rest, and which device updates it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from zero.memory.host_gradients import HostGradAccumulator
from zero.memory.store import Store
from zero.memory.streams import Streams
from zero.watchdog.watchdog import Events


@dataclass(frozen=True)
class StatePlacement:
    """One unit's placement. Its methods work for every placement, so callers need not ask for it.

    update_device:   computes the optimizer's step; masters and moments are used there;
    shard_device:    the parameter shard is used there;
    streams:         those of the engine, beside the one that computes;
    shard_offloaded: the shard does not rest on the device that computes forward and backward;
    shard_copied:    shard and master are used in different memories, so the master has a copy of the shard beside it;
    state_store:     where masters and moments rest;
    shard_store:     where the shard rests;
    host_gradients:  where the reduced gradient rests if the host computes the step; else None;
    streamed:        the device computes the step, though the state rests elsewhere;
    queued:          streamed, and the step reads nothing from a drive, so no thread has to wait for one;
    events:          of the engine; unit: the name of this one.
    """

    update_device: torch.device
    shard_device: torch.device
    streams: Streams = field(default_factory=lambda: Streams.create(torch.device("cpu")))
    shard_offloaded: bool = False
    shard_copied: bool = False
    state_store: Store = field(default_factory=Store)
    shard_store: Store = field(default_factory=Store)
    host_gradients: HostGradAccumulator | None = None
    streamed: bool = False
    queued: bool = False
    events: Events = field(default_factory=Events)
    unit: str = ""

    @property
    def updated_on_host(self) -> bool:
        """Whether the host computes the step although the parameters are used on the device."""
        return self.host_gradients is not None

    @property
    def state_offloaded(self) -> bool:
        """Whether the state rests off the device; it is updated beside the training loop then."""
        return self.updated_on_host or self.streamed

    @property
    def resident(self) -> bool:
        """Whether shard and state may be read and written at any time."""
        return self.state_store.resident and self.shard_store.resident

    @property
    def in_place(self) -> bool:
        """Whether shard and master may be written at any time: nothing is copied or written back."""
        return self.resident and not self.shard_copied

    @contextlib.contextmanager
    def acquired(self, changed: bool, step: bool = False) -> Iterator[None]:
        """Inside, shard, master and moments may be read, and written if `changed`.

        `step`: for the optimizer's step; a shard of which the master has a copy is only written, as a whole.
        After an exception nothing is written back, so the values at rest are unchanged.
        """
        complete = False
        with self._span("wait read", self.state_store):
            self.state_store.acquire()
        try:
            with self._span("wait read", self.shard_store):
                self.shard_store.acquire(overwrite=step and self.shard_copied)
            try:
                yield
                complete = changed
            finally:
                with self._span("write", self.shard_store):
                    self.shard_store.write_back(complete)
        finally:
            with self._span("write", self.state_store):
                self.state_store.write_back(complete)

    def _span(self, verb: str, store: Store) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if store.resident else self.events.span(verb, self.unit)

    def close(self) -> None:
        """Free the memory of shard and state; their values are lost."""
        self.state_store.close()
        self.shard_store.close()
