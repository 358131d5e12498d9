"""Where one unit lives: which memory its shard, its optimizer state and its gradient rest in, and who updates it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from zero.memory.copy_stream import CopyStream
from zero.memory.host_gradients import HostGradAccumulator
from zero.memory.store import Resident, Store


@dataclass(frozen=True)
class StatePlacement:
    """What a unit is told about its places.

    updates:     the device that computes the optimizer's step: masters and moments are lent there;
    shards:      the device on which the parameter shard is lent;
    up:          a lane for copies to the device;
    away:        the host computes the step, although the parameters are used on the device;
    shards_away: the shard does not rest on the device between uses;
    mirrored:    master and shard are on two devices, so that the master has a copy of the shard beside it;
    states:      where masters and moments rest;
    kept:        where the shard rests;
    gradients:   where the reduced gradient rests; None: on the device.
    """

    updates: torch.device
    shards: torch.device
    up: CopyStream
    away: bool = False
    shards_away: bool = False
    mirrored: bool = False
    states: Store = field(default_factory=Resident)
    kept: Store = field(default_factory=Resident)
    gradients: HostGradAccumulator | None = None

    @property
    def permanent(self) -> bool:
        """Whether shard and state may be read and written at any time, where they rest."""
        return self.states.permanent and self.kept.permanent

    @staticmethod
    def here(device: torch.device) -> StatePlacement:
        """Everything on the device."""
        return StatePlacement(device, device, CopyStream(torch.device("cpu")))

    def keep_shard(self, own: torch.Tensor) -> torch.Tensor:
        """A copy of `own` [n] where the shard rests."""
        shard = own.to(self.shards, copy=True)
        self.kept.put([shard])
        return shard
