"""Tensors and integers from rank to rank, outside of the two collectives; zero/core/comm.py says how they travel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from zero.core import comm
from zero.core.comm import Axis, Message, Pending
from zero.watchdog.rank_status import Collective


class Passage(NamedTuple):
    """Tensors in flight to other ranks, and from others. Keeps the memory of both alive."""

    works: Sequence[dist.Work]
    sent: Sequence[torch.Tensor]
    received: Sequence[torch.Tensor]
    pending: Pending
    device: torch.device

    @property
    def done(self) -> bool:
        """Whether all have left and arrived."""
        return all(work.is_completed() for work in self.works)

    def wait(self) -> list[torch.Tensor]:
        """What has come (on CUDA: as the current stream will see it)."""
        self.pending.wait(self.works)
        return [each.to(self.device) for each in self.received]


def begin(
    sends: Sequence[Message],
    receives: Sequence[Message],
    axis: Axis,
    collective: Collective,
    tag: int,
    device: torch.device,
) -> Passage:
    """Start to send and to receive these; what comes will be brought to `device`."""
    with axis.watchdog.sending(collective):
        works = comm.start(sends, receives, axis, tag)
    tensors = ([each for each, _ in ways] for ways in (sends, receives))
    return Passage(works, *tensors, Pending(collective, axis.watchdog), device)


def send_on(
    outgoing: Sequence[torch.Tensor],
    to: int,
    shapes: Sequence[Sequence[int]],
    source: int,
    axis: Axis,
    what: str,
    like: torch.Tensor,
) -> Passage:
    """Start to send contiguous tensors to the rank at place `to`, and to receive others from the one at `source`.

    shapes: of what comes, as that rank sends it, of device and dtype of `like`; `what` it is, for messages.
    """
    there = comm.messages_device(axis, like.device)
    sends = [(each.to(there), to) for each in outgoing]
    receives = [(torch.empty(shape, dtype=like.dtype, device=there), source) for shape in shapes]
    leaves, ends = sum(each.nbytes for each, _ in sends), (axis.ranks[to], axis.ranks[source])
    collective = axis.watchdog.begin(what, "", leaves, axis.ranks, ends, True)
    return begin(sends, receives, axis, collective, comm.tag_of(collective, axis), like.device)


def send_ints(numbers: Sequence[int], places: Sequence[int], axis: Axis) -> Passage:
    """Start to send integers to the ranks at these places, which `receive_ints` as many.

    It is no collective, and not counted as one: ranks compare how many of these each has begun.
    """
    sent = torch.tensor(numbers, device=ints_device(axis))
    collective = Collective("integers that others receive", "", axis.watchdog.status.number + 1)
    return begin([(sent, place) for place in places], (), axis, collective, comm.own_tag(comm.INTS, axis), sent.device)


def receive_ints(count: int, place: int, axis: Axis, what: str) -> list[int]:
    """The next `count` integers that the rank at this place sends; blocking. `what` they are, for messages."""
    if not count:
        return []
    received = torch.empty(count, dtype=torch.int64, device=ints_device(axis))
    collective = Collective(what, "", axis.watchdog.status.number + 1)  # it comes before the next one
    works = begin((), [(received, place)], axis, collective, comm.own_tag(comm.INTS, axis), received.device).works
    axis.watchdog.wait(works, collective, on_host=True)
    return received.tolist()


def ints_device(axis: Axis) -> torch.device:
    """Where integers lie that the host sends: in its own memory, if the backend can."""
    there = axis.size == 1 or comm.backend_of(axis.group, torch.device("cpu")) == "gloo"
    return torch.device("cpu") if there else comm.local_device()
