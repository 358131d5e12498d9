"""How the full parameters of one unit come from other ranks: as they are, from a second copy on the node, or in 8 bits.

Each way is a strategy with the same verbs. A unit has one; beside that of 8 bits it has a second, for exact values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from zero.core import comm
from zero.core.comm import Transfer
from zero.core.mesh import Mesh
from zero.core.param_buffer import ParamBuffer
from zero.core.shard import Shard
from zero.kernels.wire import decode, encode
from zero.plan.formats import wire_nbytes


class Gathering:
    """Gathers the values of one unit from the ranks along its shard axis.

    exact:       the way that brings the exact values: this one, unless it sends 8 bits;
    reads_shard: a gather reads the shard from wherever it rests.
    """

    reads_shard = True

    def __init__(self, mesh: Mesh, shard: Shard, buffer: ParamBuffer, tag: int) -> None:
        self.exact: Gathering = self
        self._mesh, self._shard, self._buffer, self._tag = mesh, shard, buffer, tag

    @property
    def nbytes(self) -> int:
        """Bytes that it keeps between gathers."""
        return 0

    def room(self) -> torch.Tensor:
        """The tensor that the next gather fills; its memory belongs to the current stream, which reads it."""
        return self._buffer.full

    def begin(self, room: torch.Tensor) -> Transfer | Decoding:
        """Start to gather into `room`; when the result's `wait` returns, the full buffer is whole."""
        if self._buffer.resharded:
            self._shard.fill()
        return comm.gather(room, self._mesh.shard, self._tag)

    def invalidate(self) -> None:
        """What was gathered or encoded before is old: the shards of all ranks change, or have changed."""

    def encode(self) -> None:
        """Encode the shard, which the optimizer has changed; the exact values are still acquired."""

    def publish(self) -> None:
        """Start to send a changed shard to where it is needed before the next gather."""

    def decoded_shard(self) -> torch.Tensor | None:
        """The values that a gather puts in the shard's place in the full buffer [window.numel]; None: the shard's."""
        return None

    def refresh_from_full(self) -> None:
        """Take from the full buffer, which was written on all ranks alike, and which the shards have followed."""


class SecondaryShard:
    """hpZ: a second copy of one unit's values, cut over the ranks of one node (ZeRO++, Wang et al. 2023, section 3.2).

    State is sharded over all ranks. Once after each update, a rank gathers the slices of its place in the node from the
    ranks with the same place in the other nodes: [nodes, n] of [nodes, ranks of a node, n]. Every gather until
    the next update then stays inside the node.

    values: flat [nodes * n]; valid, or in flight, if `fresh`.
    """

    def __init__(self, mesh: Mesh, full: torch.Tensor) -> None:
        """`full`: a tensor of the shape, dtype and device of what is gathered."""
        self._inside, self._across = mesh.secondary, mesh.across
        self.values = torch.empty(full.numel() // self._inside.size, dtype=full.dtype, device=full.device)
        self._transfer: Transfer | None = None
        self.fresh = False

    def copy_from(self, full: torch.Tensor) -> None:
        """The full buffer is valid, and equal on all ranks: take our slices from it."""
        self.values.view(self._across.size, -1).copy_(self._slices(full))
        self.fresh = True

    def invalidate(self) -> None:
        """The shards of all ranks change."""
        self._wait()
        self.fresh = False

    def send(self, shard: torch.Tensor, tag: int) -> None:
        """Start to bring the slices from the other nodes; `shard` is ours."""
        self.values.view(self._across.size, -1)[self._across.rank].copy_(shard)
        self._transfer = comm.gather(self.values, self._across, tag)
        self.fresh = True

    def gather(self, full: torch.Tensor, tag: int) -> Transfer:
        """Start to fill `full` from the secondary shards of the node."""
        self._wait()
        self._slices(full).copy_(self.values.view(self._across.size, -1))
        return comm.gather(full, self._inside, tag, rows=self._across.size)

    def _slices(self, full: torch.Tensor) -> torch.Tensor:
        return full.view(self._across.size, self._inside.size, -1)[:, self._inside.rank]

    def _wait(self) -> None:
        transfer, self._transfer = self._transfer, None
        if transfer is not None:
            transfer.wait()


class SecondaryGathering(Gathering):
    """Gathers the values from the ranks of this node, each of which has a `SecondaryShard`."""

    def __init__(self, mesh: Mesh, shard: Shard, buffer: ParamBuffer, tag: int) -> None:
        """The full buffer is valid."""
        super().__init__(mesh, shard, buffer, tag)
        self._secondary = SecondaryShard(mesh, buffer.full)
        self._secondary.copy_from(buffer.full)

    @property
    def nbytes(self) -> int:
        return self._secondary.values.nbytes

    def begin(self, room: torch.Tensor) -> Transfer:
        self.publish()
        return self._secondary.gather(room, self._tag)

    def invalidate(self) -> None:
        self._secondary.invalidate()

    def publish(self) -> None:
        """Bring this rank's secondary shard from the other nodes, unless it is valid or in flight."""
        if self._secondary.fresh:
            return
        self._shard.wait_copies()
        store = self._shard.placement.shard_store
        store.acquire()
        try:
            self._secondary.send(self._shard.values, self._tag)
        finally:
            store.write_back(changed=False)

    def refresh_from_full(self) -> None:
        self._secondary.copy_from(self._buffer.full)


class Decoding(NamedTuple):
    """A gather of 8 bits in flight, a part from each rank, and the full buffer that it is decoded into."""

    transfer: Transfer
    full: torch.Tensor
    parts: int
    done = False  # what is here is still to be decoded

    def wait(self) -> None:
        self.transfer.wait()
        decode(self.transfer.full, self.full, self.parts)


class QuantizedGathering(Gathering):
    """Gathers the values in 8 bits (ZeRO++'s qwZ, Wang et al. 2023, section 3.1); with hpZ, from a second copy of them.

    The rank that owns the exact values encodes them once in a step (the paper encodes what was rounded, at each
    gather), and all ranks, the owner too, compute with what they decode. Nothing that is kept is made from
    decoded values; `exact` gathers the exact ones.
    """

    reads_shard = False  # what the other ranks need is on the device

    def __init__(self, mesh: Mesh, shard: Shard, buffer: ParamBuffer, tag: int) -> None:
        super().__init__(mesh, shard, buffer, tag)
        self.exact = Gathering(mesh, shard, buffer, tag)
        # This rank's shard as zero/kernels/wire.py encodes it.
        self._message = torch.empty(wire_nbytes(shard.window.numel), dtype=torch.uint8, device=buffer.full.device)
        self._encoded = False  # the message encodes the present exact values
        self._secondary = None if mesh.secondary is None else SecondaryShard(mesh, self._messages())

    @property
    def nbytes(self) -> int:
        return self._message.nbytes + (0 if self._secondary is None else self._secondary.values.nbytes)

    def room(self) -> torch.Tensor:
        """Memory for the messages of all ranks; encodes ours, for which the exact values may have to be fetched."""
        self._encode_if_old()
        return self._messages()

    def begin(self, room: torch.Tensor) -> Decoding:
        axis = self._mesh.shard
        if self._secondary is not None:
            self.publish()
            return Decoding(self._secondary.gather(room, self._tag), self._buffer.full, axis.size)
        room.chunk(axis.size)[axis.rank].copy_(self._message)
        return Decoding(comm.gather(room, axis, self._tag), self._buffer.full, axis.size)

    def invalidate(self) -> None:
        self._encoded = False
        if self._secondary is not None:
            self._secondary.invalidate()

    def encode(self) -> None:
        self._message.copy_(encode(self._shard.master.values()))
        self._encoded = True

    def publish(self) -> None:
        if self._secondary is not None and not self._secondary.fresh:
            self._encode_if_old()
            self._secondary.send(self._message, self._tag)

    def decoded_shard(self) -> torch.Tensor:
        return decode(self._message, torch.empty_like(self._shard.own_part()))

    def refresh_from_full(self) -> None:
        self.invalidate()

    def _encode_if_old(self) -> None:
        if not self._encoded:
            with self._shard.acquired():
                self.encode()

    def _messages(self) -> torch.Tensor:
        return self._message.new_empty(self._mesh.shard.size * self._message.numel())


Policy = Callable[[Mesh, Shard, ParamBuffer, int], Gathering]  # makes that of a unit whose full buffer is valid


def exactly(mesh: Mesh, shard: Shard, buffer: ParamBuffer, tag: int) -> Gathering:
    """The values themselves; with hpZ, from a second copy of them."""
    kind = SecondaryGathering if buffer.resharded and mesh.secondary is not None else Gathering
    return kind(mesh, shard, buffer, tag)


def in_8_bits(mesh: Mesh, shard: Shard, buffer: ParamBuffer, tag: int) -> Gathering:
    """Values in 8 bits, if anything is sent."""
    sends = buffer.resharded and mesh.shard.size > 1
    return (QuantizedGathering if sends else exactly)(mesh, shard, buffer, tag)
