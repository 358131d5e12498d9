"""A backend that behaves as NCCL does in what matters, between tensors on the stand-in for a GPU.

- A call returns at once, and so does `wait()`: it orders the device's work, and the host knows nothing of the message.
- Calls of one communicator run one after the other; two communicators run beside each other.
- The first call connects all ranks of a communicator. Messages from rank to rank run together in a batch; outside of it
  they are noted as "send" and "recv", for which NCCL would make a communicator of two ranks.
- Ranks that begin different ones on a communicator, or not all of them, never see them end.
- Tensors that lie on the host, or whose elements lie apart, are refused. Messages carry no tags.

Bytes travel by gloo, from a thread for each communicator.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from stand_in_device import StandIn
from torch.utils._python_dispatch import _disable_current_modes

NAME = "fakenccl"
FOREVER = timedelta(days=1)
UNKNOWN = {torch.int16, torch.uint16, torch.uint32, torch.complex64}  # dtypes that it does not send


class FakeWork(dist.Work):
    """One operation on its way. `ordered`: the device's stream waits for it; `done`: it has ended."""

    def __init__(self, text: str, sources: list[torch.Tensor], targets: list[torch.Tensor], device: StandIn) -> None:
        super().__init__()
        self.text, self.sources, self.targets, self._device = text, sources, targets, device
        with _disable_current_modes():
            self.sent = [each.detach().clone() for each in sources]  # as it is in the order of the stream
        self.received: Sequence[torch.Tensor] = ()
        self.ordered = False
        self.done = threading.Event()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Later work of the device comes after it."""
        if not self.ordered:
            self.ordered = True
            self._device.ordered(self)
        return True

    def is_completed(self) -> bool:
        """What a look at its event says."""
        return self.done.is_set()

    def land(self) -> None:
        """See `stand_in_device.Message`."""
        assert self.ordered, f"the device works on a buffer of the {self.text}, for which no stream waits"
        self.done.wait()
        for target, values in zip(self.targets, self.received, strict=False):
            if target.untyped_storage().nbytes():  # else its memory was given back, in the order of the stream
                target.data.view(-1).copy_(values.view(-1))


class FakeNccl(dist.ProcessGroup):
    """A communicator. `begun`: texts of what was begun in it; `timeout`: what it was made with.

    `hosts`: gloo is beside it, for tensors on the host; `made`: all communicators of this process.
    """

    made: ClassVar[list[FakeNccl]] = []

    def __init__(
        self, store: dist.Store, rank: int, size: int, timeout: timedelta, device: StandIn, hosts: bool
    ) -> None:
        super().__init__(rank, size)
        self.timeout, self.begun = timeout, []
        self._device, self._size, self._rank = device, size, rank
        self._gloo = dist.ProcessGroupGloo(store, rank, size, FOREVER)
        self._hosts = dist.ProcessGroupGloo(dist.PrefixStore("hosts", store), rank, size, FOREVER) if hosts else None
        self._works: queue.SimpleQueue = queue.SimpleQueue()
        self._open: list[FakeWork] = []
        self._batch: list[tuple[FakeWork, Callable]] | None = None  # that is being collected
        self._aborted = False
        threading.Thread(target=self._run, daemon=True).start()

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> FakeWork:
        return self._collective("all_gather", [input], [output], lambda rows: torch.cat(rows))

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> FakeWork:
        return self._collective("reduce_scatter", [input], [output], lambda rows: sum(self._slices(rows)))

    def all_to_all_single(
        self, output: torch.Tensor, input: torch.Tensor, received: Any = (), sent: Any = (), opts: Any = None
    ) -> FakeWork:
        def exchange(values: torch.Tensor) -> torch.Tensor:
            out = torch.empty(output.shape, dtype=output.dtype)
            self._gloo.alltoall_base(out, values, received, sent, dist.AllToAllOptions()).wait()
            return out

        if received:  # numbers of elements that differ
            return self._begin("all_to_all", [input], [output], exchange)
        return self._collective("all_to_all", [input], [output], lambda rows: torch.cat(self._slices(rows)))

    _allgather_base, _reduce_scatter_base, alltoall_base = all_gather_single, reduce_scatter_single, all_to_all_single

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> FakeWork:
        return self._collective(f"broadcast from {opts.rootRank}", tensors, tensors, lambda rows: rows[opts.rootRank])

    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> FakeWork:
        most = opts.reduceOp == dist.ReduceOp.MAX
        how: Callable = (lambda rows: torch.stack(rows).amax(0)) if most else sum
        return self._collective("all_reduce", tensors, tensors, how)

    def send(self, tensors: list[torch.Tensor], to: int, tag: int = 0) -> FakeWork:
        return self._message("send", tensors, [], lambda sent: (self._gloo.send([sent], to, 0), None))

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int = 0) -> FakeWork:
        def receive(_: None) -> tuple[dist.Work, torch.Tensor]:
            values = torch.empty(tensors[0].shape, dtype=tensors[0].dtype)
            return self._gloo.recv([values], source, 0), values

        return self._message("recv", [], tensors, receive)

    @contextlib.contextmanager
    def batch(self) -> Iterator[None]:
        """Messages that are begun inside run together."""
        self._batch = []
        try:
            yield
        finally:
            batch, self._batch = self._batch, None
            if batch:
                self.begun.append("batch")
                self._works.put(batch)

    def _message(self, text: str, sources: list, targets: list, post: Callable) -> FakeWork:
        def exchange(sent: torch.Tensor | None) -> Callable[[], torch.Tensor | None]:
            work, values = post(sent)
            return lambda: work.wait() and values

        return self._begin(text, sources, targets, exchange)

    def set_timeout(self, timeout: timedelta) -> None:
        self.timeout = timeout

    def barrier(self, opts: Any = None) -> dist.Work:
        return self._gloo.barrier()

    def abort(self) -> None:
        """End what is on its way, with nothing received."""
        self._aborted = True
        for work in self._open:
            work.done.set()

    def shutdown(self) -> None:
        self._works.put(None)

    def getBackendName(self) -> str:
        return NAME

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:
        return self._name

    def _slices(self, rows: list[torch.Tensor]) -> list[torch.Tensor]:
        return [row.chunk(self._size)[self._rank] for row in rows]

    def _collective(self, name: str, sources: list, targets: list, how: Callable) -> FakeWork:
        text = f"{name} of {sources[0].numel()} {sources[0].dtype}"
        if self._hosts is not None and not self._device.holds(sources[0]):
            targets[0].view(-1).copy_(how(self._everyone(sources[0], self._hosts)).view(-1))
            work = FakeWork(text, sources, targets, self._device)
            work.done.set()
            return work

        def exchange(sent: torch.Tensor) -> torch.Tensor | None:
            mine = torch.tensor([zlib.crc32(text.encode())])
            if len({int(each) for each in self._everyone(mine)}) > 1:
                return None  # ranks have begun different ones
            return how([row.view(sent.dtype) for row in self._everyone(sent.view(-1).view(torch.uint8))])

        return self._begin(text, sources, targets, exchange)

    def _everyone(self, mine: torch.Tensor, by: dist.ProcessGroupGloo | None = None) -> list[torch.Tensor]:
        rows = [torch.empty_like(mine) for _ in range(self._size)]
        (by or self._gloo).allgather([rows], [mine]).wait()
        return rows

    def _begin(self, text: str, sources: list, targets: list, exchange: Callable) -> FakeWork:
        for tensor in (*sources, *targets):
            if not self._device.holds(tensor):
                raise RuntimeError("No backend type associated with device type cpu")
            if not tensor.is_contiguous() or tensor.dtype in UNKNOWN:
                raise ValueError(f"Tensors must be contiguous, and of a dtype that NCCL knows: {text}")
            self._device.touch(tensor, any(tensor is each for each in targets))
        work = FakeWork(text, sources, targets, self._device)
        self._open.append(work)
        self._device.on_way.append(work)
        self._device.begun(work)
        if self._batch is not None:
            self._batch.append((work, exchange))
        else:
            self.begun.append(text)
            self._works.put([(work, exchange)])
        return work

    def _run(self) -> None:
        connected = False
        with contextlib.suppress(RuntimeError):  # the other rank is gone
            while (batch := self._works.get()) is not None:
                if not connected:
                    connected = bool(self._everyone(torch.zeros(1)))
                begun = [(work, exchange(*work.sent or [None])) for work, exchange in batch]
                for work, received in begun:
                    values = received() if callable(received) else received
                    if self._aborted or (values is None and work.targets):
                        return  # nothing of this communicator will ever end
                    work.received = [values]
                    self._open.remove(work)
                    work.done.set()


def on_fake_nccl(patch: pytest.MonkeyPatch, hosts: bool = False, device: StandIn | None = None) -> StandIn:
    """A device to enter (`with`), whose ranks, those of the pool, talk over the fake, which our code takes for NCCL.

    `hosts`: over gloo, too, as after `init_process_group()`; `device`: this one, by default a new one.
    """
    device, of_hosts = device or StandIn(), "gloo" if hosts else ""
    for name in ("core.world", "core.comm", "optim.norm"):
        patch.setattr(f"zero.{name}.backend_of", lambda group, there: "nccl" if there.type == "cuda" else of_hosts)
    patch.setattr("zero.core.world.nccl_options", lambda timeout: "those of NCCL")

    def together(ops: list[dist.P2POp], plain: Callable = dist.batch_isend_irecv) -> list[dist.Work]:
        native = isinstance(ops[0].group, FakeNccl) and device.holds(ops[0].tensor)
        with ops[0].group.batch() if native else contextlib.nullcontext():
            return plain(ops)

    patch.setattr(dist, "batch_isend_irecv", together)
    rank, size = dist.get_rank(), dist.get_world_size()
    store = dist.PrefixStore(NAME, dist.distributed_c10d._get_default_store())
    dist.barrier()  # another rank may still be connecting to this one
    dist.destroy_process_group()

    FakeNccl.made = []

    def make(how: Any, options: Any) -> FakeNccl:
        made = FakeNccl(how.store, how.group_rank, how.group_size, how.timeout, device, hosts)
        made.options = options
        FakeNccl.made.append(made)
        return made

    dist.Backend.register_backend(NAME, make, extended_api=True, devices=["cpu"])
    dist.init_process_group(NAME, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=90))
    return device
