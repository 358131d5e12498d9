"""The two collectives of ZeRO, asynchronous: gather a full buffer from its shards, reduce one to a shard.

NCCL takes its native all-gather, and its reduce-scatter where `zero.reduce` leaves the sum to it. On gloo both are
made of point-to-point messages: each rank sends every other rank the slice it owns. That moves the same bytes as a
ring, starts at once instead of queueing for gloo's two worker threads, and was the fastest of what gloo offers
(benchmarks/collectives.py; table in benchmarks/README.md). Above all it leaves the sum to us: rows are added in fp32 in
the order of ranks, so the bits of a reduced gradient depend neither on how a buffer was cut nor on which stage asked.
On request they are added as a binary tree over the ranks. Where the sum is ours, NCCL moves the rows in an all-to-all.

NCCL takes the messages of one call as a batch, over the communicator of their group; for one outside of a batch it
would make another communicator for each pair of ranks. A batch may be of some ranks only, but for the first call of a
group, in which NCCL connects them all: see `connect`. Messages of one communicator follow each other in the order of
calls, whatever their tags. Over gloo they find each other by tags.

A tag is made of the engine, and of the unit and direction or of the kind of message, so that ranks which diverge wait
for each other instead of taking one unit's bytes for another's. Updates that run beside the training loop send as well,
and those of two engines in an order of their own on every rank.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import NamedTuple
from zlib import crc32

import torch
import torch.distributed as dist
from torch.distributed import irecv, isend

from zero.core.tree import sum_tree
from zero.kernels.bucket import sum_rows
from zero.kernels.wire import sum_messages
from zero.plan.formats import WIRE_BLOCK, WIRE_RECORD
from zero.watchdog.rank_status import Collective
from zero.watchdog.watchdog import Watchdog

# Our messages must not meet those that a user sends with small tags of their own.
FIRST_TAG = 1 << 20
# Each engine has so many tags. They are used again by the engine that comes so many engines later: a tag has 31 bits.
TAGS, ENGINES = 1 << 17, 1 << 12
INTS = TAGS - 1  # the tag of integers, which arrive in order
# And those from here on of small exchanges and of attention: TURNS for each kind, another one each time. So ranks that
# diverge wait for each other, and what nobody took is not taken for what comes later.
KINDS, TURNS = TAGS // 2, 1 << 8

Message = tuple[torch.Tensor, int]  # contiguous memory, and the place along the axis to send to or to receive from

# Elements per message of a reduction: the sum of one piece overlaps the arrival of the next. Smaller messages cost more
# than that saves: while the loop sends one, gloo's thread spins on the lock of the pair.
PIECE = 64_000 * WIRE_RECORD  # where elements have 8 bits: bytes, of whole groups of blocks (zero/kernels/wire.py)

# torch 2.13 renamed both and warns on the old names; older releases have only those.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class Axis:
    """Ranks that exchange something: one axis of a mesh, or the world.

    group_ref: the process group along it, None for an axis of one rank. Weakly: it is to end when it is destroyed, and
           gloo's threads with it, not with the last that holds this axis. Gathers in flight hold theirs, as do updates;
    rank:  this process's place along it, of `size`;
    native: NCCL carries its messages: take the backend's own reduce-scatter and all-gather;
    watchdog: watches its waits;
    ranks: the global ranks along it, in order;
    second_ref: with NCCL, another communicator of the same ranks, for reductions, which are not to wait for gathers;
    summed_here: with NCCL, elements of up to so many bytes are added up here, in the order of ranks, not by it.
    """

    group_ref: weakref.ref[dist.ProcessGroup] | None
    size: int
    rank: int
    native: bool
    watchdog: Watchdog = field(default_factory=Watchdog)
    ranks: tuple[int, ...] = (0,)
    second_ref: weakref.ref[dist.ProcessGroup] | None = None
    summed_here: int = 0

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group along it, None for an axis of one rank. Raises RuntimeError once it is destroyed."""
        return alive(self.group_ref)

    @property
    def reducing_group(self) -> dist.ProcessGroup | None:
        """As `group`, for reductions."""
        return alive(self.second_ref or self.group_ref)

    @property
    def global_rank(self) -> int:
        """This process's rank in the default process group, the one that messages name."""
        return self.ranks[self.rank]

    @property
    def ordered(self) -> bool:
        """Whether all ranks must begin collectives in one order: NCCL wants that, and so does a check of the order.

        Our messages over gloo find each other by their tags.
        """
        return self.size > 1 and (self.native or self.watchdog.order is not None)


class Pending(NamedTuple):
    """A collective that this rank has begun, and who looks after its waits."""

    collective: Collective
    watchdog: Watchdog

    def wait(self, works: Sequence[dist.Work]) -> None:
        """Wait for some of its messages; RuntimeError that names the missing ranks when they do not come."""
        self.watchdog.wait(works, self.collective)


class Transfer(NamedTuple):
    """A gather in flight. Keeps the buffers of the messages alive, and the host copy where one is needed."""

    works: Sequence[dist.Work]
    full: torch.Tensor
    host: torch.Tensor | None = None
    pending: Pending | None = None  # None: nothing was sent
    group: dist.ProcessGroup | None = None  # which the program may destroy: it is to live until all has come

    # Whether `full` is whole without a wait.
    done = property(lambda self: self.host is None and all(work.is_completed() for work in self.works))

    def wait(self) -> None:
        """Return when `full` is whole (on CUDA: when the current stream will see it whole)."""
        if self.pending is not None:
            self.pending.wait(self.works)
        if self.host is not None:
            self.full.view(self.host.shape).copy_(self.host)


def gather(full: torch.Tensor, axis: Axis, tag: int, rows: int = 1) -> Transfer:
    """Start to fill `full` [rows x axis.size x n] from every rank's slices [rows x n] of it.

    Those of rank j are `full.view(rows, axis.size, n)[:, j]`; the own ones must be in place already.
    """
    if axis.size == 1:
        return Transfer((), full)
    pending = Pending(axis.watchdog.began(tag, _sent(full, axis), axis.ranks), axis.watchdog)
    if axis.native:
        return _gather_native(full, axis, pending, rows)
    tag = own_tag(tag, axis)
    host = full.cpu() if full.is_cuda else None  # gloo sends from host memory only
    buffers = (full if host is None else host).chunk(rows)
    works = []
    with axis.watchdog.sending(pending.collective):
        for step in range(1, axis.size):
            peer = (axis.rank + step) % axis.size
            for row in buffers:
                works.append(dist.irecv(_slice(row, axis, peer), group=axis.group, group_src=peer, tag=tag))
        for step in range(1, axis.size):
            peer = (axis.rank - step) % axis.size
            for row in buffers:
                works.append(dist.isend(_slice(row, axis, axis.rank), group=axis.group, group_dst=peer, tag=tag))
    return Transfer(works, full, host, pending, axis.group)


def _gather_native(full: torch.Tensor, axis: Axis, pending: Pending, rows: int) -> Transfer:
    # NCCL sends from GPU memory only; a model that is being built may lie elsewhere.
    there = full if full.is_cuda else full.to(local_device())
    if rows == 1:
        work = all_gather_single(there, _slice(there, axis, axis.rank), group=axis.group, async_op=True)
        return Transfer((work,), full, None if there is full else there, pending, axis.group)
    own = there.view(rows, axis.size, -1)[:, axis.rank].contiguous()
    received = torch.empty_like(there)  # by rank first
    work = all_gather_single(received, own.view(-1), group=axis.group, async_op=True)
    return Transfer((work,), full, received.view(axis.size, rows, -1).transpose(0, 1), pending, axis.group)


class Inbox(NamedTuple):
    """A scatter in flight: one row per rank, in the order of ranks, ours among them.

    `rows` are slices of `flat` (ours) and of the receive buffer; all of it lives until `sum` has returned,
    because messages read and write it. Those of uint8 hold elements in 8 bits (zero/kernels/wire.py).
    """

    flat: torch.Tensor
    rows: Sequence[torch.Tensor]
    arrivals: Sequence[Sequence[dist.Work]]  # per piece of `piece` elements: what to wait for
    departures: Sequence[dist.Work]
    piece: int
    pending: Pending | None = None  # None: nothing was sent
    pairwise: bool = False  # add the rows as a binary tree

    @property
    def numel(self) -> int:
        """Elements of the sum."""
        row = self.rows[0]
        return row.numel() // WIRE_RECORD * WIRE_BLOCK if row.dtype == torch.uint8 else row.numel()

    def arrive(self) -> None:
        """Wait for everything, where there is a single row and so nothing to add."""
        for works in (*self.arrivals, self.departures) if self.pending is not None else ():
            self.pending.wait(works)

    def sum(self, out: torch.Tensor, accumulate: bool) -> None:
        """out [n] fp32 = (out if accumulate) + rows[0] + rows[1] + ..., each piece as soon as it is here.

        `pairwise` sums are not accumulated, and `out` must not be one of their rows.
        """
        coded = self.rows[0].dtype == torch.uint8
        add = sum_tree if self.pairwise else partial(sum_messages if coded else sum_rows, accumulate=accumulate)
        host = out.cpu() if out.device != self.rows[0].device else out
        for index, works in enumerate(self.arrivals):
            if self.pending is not None:
                self.pending.wait(works)
            begin, end = index * self.piece, (index + 1) * self.piece
            of_out = (begin // WIRE_RECORD * WIRE_BLOCK, end // WIRE_RECORD * WIRE_BLOCK) if coded else (begin, end)
            add([row[begin:end] for row in self.rows], host[slice(*of_out)])
        if host is not out:
            out.copy_(host)
        if self.departures and self.pending is not None:
            self.pending.wait(self.departures)


def scatter(flat: torch.Tensor, axis: Axis, tag: int, pairwise: bool = False) -> Inbox:
    """Start to send every rank its slice of `flat` [axis.size x n] and to receive everyone's slice for us.

    `pairwise`: the slices will be added as a binary tree over the ranks, a power of two of them.
    """
    numel = flat.numel() // axis.size
    if axis.size == 1:
        return Inbox(flat, (flat,), ((),), (), max(1, numel), None, pairwise)
    pending = Pending(axis.watchdog.began(tag, _sent(flat, axis), axis.ranks), axis.watchdog)
    if axis.native and (pairwise or flat.dtype == torch.uint8 or flat.itemsize <= axis.summed_here):
        received = torch.empty_like(flat)
        work = dist.all_to_all_single(received, flat, group=axis.reducing_group, async_op=True)
        return Inbox(flat, received.chunk(axis.size), ((work,),), (), max(1, numel), pending, pairwise)
    if axis.native:
        own = torch.empty(numel, dtype=flat.dtype, device=flat.device)
        work = reduce_scatter_single(own, flat, group=axis.reducing_group, async_op=True)
        return Inbox(flat, (own,), ((work,),), (), max(1, numel), pending)
    tag = own_tag(tag, axis)
    flat = flat.cpu()  # no copy but for CUDA: gloo sends from host memory only
    peers = [(axis.rank + step) % axis.size for step in range(1, axis.size)]
    received = torch.empty((axis.size - 1, numel), dtype=flat.dtype)
    rows = {peer: received[index] for index, peer in enumerate(peers)}
    rows[axis.rank] = _slice(flat, axis, axis.rank)
    starts = range(0, numel, PIECE)
    with axis.watchdog.sending(pending.collective):
        # All receives first: a message that finds its buffer waiting is written straight into it.
        arrivals = [
            [dist.irecv(rows[peer][at : at + PIECE], group=axis.group, group_src=peer, tag=tag) for peer in peers]
            for at in starts
        ]
        departures = [
            dist.isend(_slice(flat, axis, peer)[at : at + PIECE], group=axis.group, group_dst=peer, tag=tag)
            for at in starts
            for peer in peers
        ]
    return Inbox(flat, [rows[rank] for rank in range(axis.size)], arrivals, departures, PIECE, pending, pairwise)


def broadcast(tensor: torch.Tensor, source: int, axis: Axis, unit: str = "") -> None:
    """Overwrite `tensor` on every rank of the axis with that of rank `source`; blocking, as far as the current stream.

    `unit`: for messages.

    Any strides and any dtype: of a transposed or expanded tensor a backend would send, and overwrite, the memory
    behind its first element.
    """
    if axis.size == 1:
        return
    # An expanded dimension is sent once.
    tensor = tensor.detach()
    for dim, stride in enumerate(tensor.stride()):
        tensor = tensor if stride else tensor.narrow(dim, 0, min(1, tensor.shape[dim]))
    sent = (tensor.to(local_device()) if axis.native else tensor).contiguous()  # NCCL sends from GPU memory only
    leaves = sent.nbytes if axis.rank == source else 0
    collective = axis.watchdog.begin("broadcast", unit, leaves, axis.ranks, (axis.ranks[source],))
    with axis.watchdog.sending(collective):
        # As bytes: not every backend knows every dtype.
        work = dist.broadcast(sent.view(-1).view(torch.uint8), group=axis.group, group_src=source, async_op=True)
    axis.watchdog.wait((work,), collective)
    if sent.data_ptr() != tensor.data_ptr():
        tensor.copy_(sent)


def deal(values: torch.Tensor, numel: int, axis: Axis) -> torch.Tensor:
    """This rank's `numel` elements of rank 0's `values` [at most axis.size x numel]; blocking.

    Beyond the values come zeros. On the other ranks only dtype and shape of `values` matter. The result lies where the
    backend works: NCCL on the GPU, gloo in main memory.
    """
    borders = [min(rank * numel, values.numel()) for rank in range(axis.size + 1)]  # where each rank's elements begin
    counts, nothing = [stop - begin for begin, stop in pairwise(borders)], [0] * axis.size
    there = messages_device(axis, local_device())
    if axis.rank == 0:
        flat, sends = values.reshape(-1).to(there), counts
    else:
        flat, sends = torch.empty(0, dtype=values.dtype, device=there), nothing
    own = torch.zeros(numel, dtype=values.dtype, device=there)
    count = counts[axis.rank]
    own[:count] = exchange(flat, sends, [count, *nothing[1:]], axis, "scatter", axis.ranks[:1])
    return own


def exchange(
    flat: torch.Tensor,
    sends: Sequence[int],
    receives: Sequence[int],
    axis: Axis,
    what: str,
    needs: tuple[int, ...] | None = None,
) -> torch.Tensor:
    """Send each rank `sends[rank]` elements of `flat` [sum], in order; `receives[rank]` of each come [sum].

    Blocking, as far as the current stream. `what` they are, for messages; `needs`: the global ranks that send, by
    default all. Ranks begin the exchanges along an axis in one order.
    """
    if axis.size == 1:
        return flat
    leaves = (flat.numel() - sends[axis.rank]) * flat.itemsize
    collective = axis.watchdog.begin(what, "", leaves, axis.ranks, needs or axis.ranks, attends=needs is None)
    if axis.group_ref is None:
        return flat.new_empty(sum(receives))  # of a plan's ranks
    sent = flat.to(messages_device(axis, flat.device))
    out = torch.empty(sum(receives), dtype=flat.dtype, device=sent.device)
    counts = [[count * flat.itemsize for count in part] for part in (receives, sends)]
    parts = [part.view(torch.uint8) for part in (out, sent)]  # as bytes: not every backend knows every dtype
    with axis.watchdog.sending(collective):
        if axis.native:
            works = [dist.all_to_all_single(*parts, *counts, group=axis.group, async_op=True)]
        else:
            came, leaves = (part.split(count) for part, count in zip(parts, counts, strict=True))
            came[axis.rank].copy_(leaves[axis.rank])
            works = _trade(leaves, came, axis, collective)
    axis.watchdog.wait(works, collective)
    return out.to(flat.device)


def gather_scalars(values: torch.Tensor, axis: Axis, what: str = "gradient norm", read: bool = True) -> torch.Tensor:
    """Every rank's `values` [k] in order of ranks, as [size, k]; blocking. `what` they are, for messages.

    `read`: the host reads them at once; else only the current stream sees them whole, where the backend is NCCL.
    """
    if axis.size == 1:
        return values[None]
    out = torch.empty(axis.size, values.numel(), dtype=values.dtype, device=values.device if axis.native else "cpu")
    collective = axis.watchdog.begin(what, "", _sent(out, axis), axis.ranks)
    with axis.watchdog.sending(collective):
        if axis.native:
            works = [all_gather_single(out.view(-1), values.contiguous(), group=axis.group, async_op=True)]
        else:
            out[axis.rank] = values.reshape(-1)
            works = _trade([out[axis.rank]] * axis.size, out, axis, collective)
    axis.watchdog.wait(works, collective, on_host=read)
    return out.to(values.device)


def connect(axis: Axis) -> None:
    """Have NCCL make the communicator that messages from rank to rank will use; collective along the axis.

    It does so at the first call of a group, in which all ranks must take part; messages are of some of them.
    """
    if axis.native:
        gather_scalars(torch.zeros(1, device=local_device()), axis, "connection", read=False)


def _sent(full: torch.Tensor, axis: Axis) -> int:
    """Bytes that leave this rank in a gather or a scatter of `full`: a part for each other rank, or those of a ring."""
    return full.nbytes // axis.size * (axis.size - 1)


def _trade(
    sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor], axis: Axis, collective: Collective
) -> list[dist.Work]:
    """Start to send each other rank its tensor, and to receive from it; what is empty does not travel.

    Not by a collective of gloo: that takes what comes for what was meant, and ends the process over another size.
    """
    peers = [(axis.rank + step) % axis.size for step in range(1, axis.size)]
    ways = [[(each[peer], peer) for peer in peers if each[peer].numel()] for each in (sent, received)]
    return start(*ways, axis, tag_of(collective, axis))


def _slice(flat: torch.Tensor, axis: Axis, rank: int) -> torch.Tensor:
    numel = flat.numel() // axis.size
    return flat.narrow(0, rank * numel, numel)


def start(sends: Iterable[Message], receives: Iterable[Message], axis: Axis, tag: int) -> list[dist.Work]:
    """Start to send and to receive these, as one batch."""
    ops = [dist.P2POp(irecv, each, group=axis.group, group_peer=place, tag=tag) for each, place in receives]
    ops += [dist.P2POp(isend, each, group=axis.group, group_peer=place, tag=tag) for each, place in sends]
    return dist.batch_isend_irecv(ops) if ops else []


def messages_device(axis: Axis, device: torch.device) -> torch.device:
    """Where messages lie of tensors on `device`: gloo sends from host memory only."""
    return device if axis.native else torch.device("cpu")


def tag_of(collective: Collective, axis: Axis) -> int:
    """The tag of a collective that is of no unit."""
    return tag_of_kind(collective.direction, axis, collective.attempt, collective.turn)


def tag_of_kind(kind: str, axis: Axis, attempt: int = 0, turn: int = 0) -> int:
    """The tag of a kind of messages that is of no unit."""
    number = crc32(kind.encode()) + attempt
    return own_tag(KINDS + number % ((INTS - KINDS) // TURNS) * TURNS + turn % TURNS, axis)


def own_tag(tag: int, axis: Axis) -> int:
    """A tag of this engine alone."""
    return FIRST_TAG + axis.watchdog.number % ENGINES * TAGS + tag


def alive(ref: weakref.ref[dist.ProcessGroup] | None) -> dist.ProcessGroup | None:
    """The process group, None where there is none. Raises RuntimeError where it was destroyed."""
    group = ref and ref()
    if ref is not None and group is None:
        raise RuntimeError("the process group was destroyed; call zero.initialize() again after init_process_group()")
    return group


def backend_of(group: dist.ProcessGroup, device: torch.device) -> str:
    """The name of the backend that carries a group's messages of tensors on `device`, "" where none does.

    A group that was made without naming a backend, or with several ("cpu:gloo,cuda:nccl"), has one per device.
    """
    backends = dict(entry.split(":") for entry in dist.get_backend_config(group).split(","))
    return backends.get(device.type, "")


def local_device() -> torch.device:
    """The GPU of this process (LOCAL_RANK, wrapped round when ranks share GPUs), else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    return torch.device("cpu")
