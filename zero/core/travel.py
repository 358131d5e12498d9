"""How the full parameters of one unit come from other ranks: as they are, in 8 bits, or from a second copy on the node.

8 bits are made once in a step, of the exact values, by the rank that owns them, and all ranks, the owner too, compute
with what they decode (ZeRO++'s qwZ, Wang et al. 2023, section 3.1, which encodes what was rounded, at each gather).
Nothing that is kept is made of decoded values, and who asks for exact ones gets them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from zero.core import comm
from zero.core.comm import Transfer
from zero.core.master_sync import MasterSync
from zero.core.mesh import Mesh
from zero.core.param_buffer import ParamBuffer
from zero.core.secondary import SecondaryShard
from zero.kernels.wire import decode, encode
from zero.memory.state_placement import StatePlacement
from zero.plan.formats import wire_nbytes


class Decoding(NamedTuple):
    """A gather of 8 bits on its way, and the full buffer that they are decoded into."""

    transfer: Transfer
    full: torch.Tensor

    def wait(self) -> None:
        """See `Transfer.wait`."""
        self.transfer.wait()
        decode(self.transfer.full, self.full)


class Travel:
    """Begins the gathers of one unit.

    secondary: with hpZ, the second copy on this node: of the parameters, or of their 8 bits;
    message:   this rank's shard in 8 bits, as zero/kernels/wire.py has them; None where the values travel;
    exact:     the next gather is of the values all the same;
    decoded:   the last one was of 8 bits, and the full copy is not exact.
    """

    def __init__(
        self, mesh: Mesh, masters: MasterSync, buffer: ParamBuffer, placement: StatePlacement, tag: int
    ) -> None:
        self.secondary: SecondaryShard | None = None
        self.message: torch.Tensor | None = None
        self.exact = self.decoded = False
        self._mesh, self._masters, self._buffer, self._placement, self._tag = mesh, masters, buffer, placement, tag
        self._fresh = False  # the message is of what the exact values are now

    @property
    def nbytes(self) -> int:
        """Bytes that are kept for it."""
        second = 0 if self.secondary is None else self.secondary.values.nbytes
        return second + (0 if self.message is None else self.message.nbytes)

    def keep_second(self) -> None:
        """With hpZ: keep a second copy from now on; the full buffer is valid."""
        if self._buffer.cut and self._mesh.secondary is not None:
            self.secondary = SecondaryShard(self._mesh, self._buffer.full)

    def quantize(self) -> None:
        """From now on 8 bits travel, where anything does; the parameters are trained."""
        if not self._buffer.cut or self._mesh.shard.size == 1:
            return
        numel = wire_nbytes(self._masters.window.numel)
        self.message = torch.empty(numel, dtype=torch.uint8, device=self._buffer.full.device)
        if self.secondary is not None:
            self.secondary = SecondaryShard(self._mesh, self._room())
            self.secondary.invalidate()

    def room(self) -> torch.Tensor:
        """What the gather that comes now fills: the full buffer, or memory for 8 bits, of the stream that reads it."""
        self.decoded = self.message is not None and not self.exact
        if not self.decoded:
            return self._buffer.full
        self.encode()
        return self._room()

    def begin(self, room: torch.Tensor) -> Transfer | Decoding:
        """Start the gather into that."""
        axis, full = self._mesh.shard, self._buffer.full
        if self.secondary is not None and (self.decoded or self.message is None):
            self.send_secondary()
            transfer = self.secondary.gather(room, self._tag)
        else:
            if self.decoded:
                room.chunk(axis.size)[axis.rank].copy_(self.message)
            elif self._buffer.cut:
                self._masters.fill()
            transfer = comm.gather(room, axis, self._tag)
        return Decoding(transfer, full) if self.decoded else transfer

    def send_secondary(self) -> None:
        """With hpZ: start to bring this rank's secondary shard from the other nodes, unless it is there or coming."""
        if self.secondary is None or self.secondary.fresh:
            return
        if self.message is not None:
            self.encode()
            self.secondary.send(self.message, self._tag)
            return
        self._masters.wait_copies()
        self._placement.shard_store.acquire()
        try:
            self.secondary.send(self._masters.shard, self._tag)
        finally:
            self._placement.shard_store.write_back(changed=False)

    def encode(self) -> None:
        """Have the 8 bits be those of the exact values, if any travel; brings these, if they rest elsewhere."""
        if self.message is not None and not self._fresh:
            with self._masters.acquired():
                self.encode_acquired()

    def encode_acquired(self) -> None:
        """The same where the caller has the exact values at hand: it has just updated them."""
        if self.message is not None:
            self.message.copy_(encode(self._masters.master.values()))
            self._fresh = True

    def keep_writes(self) -> None:
        """Before the full copy goes: take what a forward has written into it."""
        if not self._masters.keep_writes(self._own_decoded if self.decoded else None):
            return
        if self.message is not None:
            self.changed()
        elif self.secondary is not None:
            self.secondary.copy_from(self._buffer.full)

    def changed(self) -> None:
        """The shards of all ranks change, or have changed."""
        self._fresh = False
        if self.secondary is not None:
            self.secondary.invalidate()

    def _own_decoded(self) -> torch.Tensor:
        return decode(self.message, torch.empty_like(self._masters.own_part()))

    def _room(self) -> torch.Tensor:
        return self.message.new_empty(self._mesh.shard.size * self.message.numel())
