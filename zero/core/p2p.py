"""Messages from rank to rank, their tags, and integers that the host sends.

NCCL takes the messages of one call as a batch, over the communicator of their group; for one outside of a batch it
would make another communicator for each pair of ranks. A batch may be of some ranks only, but for the first call of a
group, in which NCCL connects them all: see `comm.connect`. Messages of one communicator follow each other in the order
of calls, whatever their tags. Over gloo they find each other by tags.

A tag is made of the engine, and of the unit and direction or of the kind of message, so that ranks which diverge wait
for each other instead of taking one unit's bytes for another's. Updates that run beside the training loop send as well,
and those of two engines in an order of their own on every rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple
from zlib import crc32

import torch
import torch.distributed as dist
from torch.distributed import irecv, isend

from zero.core.world import Axis, backend_of, local_device
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


class Pending(NamedTuple):
    """A collective that this rank has begun, and who looks after its waits."""

    collective: Collective
    watchdog: Watchdog

    def wait(self, works: Sequence[dist.Work]) -> None:
        """Wait for some of its messages; RuntimeError that names the missing ranks when they do not come."""
        self.watchdog.wait(works, self.collective)


def start(sends: Iterable[Message], receives: Iterable[Message], axis: Axis, tag: int) -> list[dist.Work]:
    """Start to send and to receive these, as one batch."""
    ops = [dist.P2POp(irecv, each, group=axis.group, group_peer=place, tag=tag) for each, place in receives]
    ops += [dist.P2POp(isend, each, group=axis.group, group_peer=place, tag=tag) for each, place in sends]
    return dist.batch_isend_irecv(ops) if ops else []


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
        works = start(sends, receives, axis, tag)
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
    there = messages_device(axis, like.device)
    sends = [(each.to(there), to) for each in outgoing]
    receives = [(torch.empty(shape, dtype=like.dtype, device=there), source) for shape in shapes]
    leaves, ends = sum(each.nbytes for each, _ in sends), (axis.ranks[to], axis.ranks[source])
    collective = axis.watchdog.begin(what, "", leaves, axis.ranks, ends, True)
    return begin(sends, receives, axis, collective, tag_of(collective, axis), like.device)


def send_ints(numbers: Sequence[int], places: Sequence[int], axis: Axis) -> Passage:
    """Start to send integers to the ranks at these places, which `receive_ints` as many.

    It is no collective, and not counted as one: ranks compare how many of these each has begun.
    """
    sent = torch.tensor(numbers, device=ints_device(axis))
    collective = Collective("integers that others receive", "", axis.watchdog.status.number + 1)
    return begin([(sent, place) for place in places], (), axis, collective, own_tag(INTS, axis), sent.device)


def receive_ints(count: int, place: int, axis: Axis, what: str) -> list[int]:
    """The next `count` integers that the rank at this place sends; blocking. `what` they are, for messages."""
    if not count:
        return []
    received = torch.empty(count, dtype=torch.int64, device=ints_device(axis))
    collective = Collective(what, "", axis.watchdog.status.number + 1)  # it comes before the next one
    works = begin((), [(received, place)], axis, collective, own_tag(INTS, axis), received.device).works
    axis.watchdog.wait(works, collective, on_host=True)
    return received.tolist()


def ints_device(axis: Axis) -> torch.device:
    """Where integers lie that the host sends: in its own memory, if the backend can."""
    there = axis.size == 1 or backend_of(axis.group, torch.device("cpu")) == "gloo"
    return torch.device("cpu") if there else local_device()


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
