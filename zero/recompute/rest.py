"""Where the inputs of recomputed calls rest between forward and backward: in slices, in one slab, in host memory.

Forward puts the tensors of a call away as one parcel, and backward takes them out again. While one call is recomputed
the parcel of the call before it, which backward comes to next, is on its way back already.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from zero.core import comm
from zero.core.mesh import Axis
from zero.log import log_once
from zero.memory.copy_stream import CopyStream, wait_event
from zero.plan.layout import round_up
from zero.recompute.settings import RestSettings
from zero.recompute.slots import Slots
from zero.recompute.times import Times

ALIGNMENT = 64  # bytes at which a tensor begins inside a slot

ALONE = Axis(None, 1, 0, False)


class Form(NamedTuple):
    """What a tensor was like; `strides` are those of its restored copy, the same if it was dense."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


class Ticket(NamedTuple):
    """Stands for a tensor that was put away; keeps its parcel, and so the memory where it rests."""

    parcel: Parcel
    index: int


class Parcel:
    """The tensors of one call, away from where they are computed with. Its slot lives as long as the graph needs it."""

    def __init__(self, rest: Rest, tensors: Sequence[torch.Tensor], before: weakref.ref[Parcel] | None) -> None:
        self._rest = rest
        self._before = before
        self._device = tensors[0].device
        self._forms = [_form(tensor) for tensor in tensors]
        counts = [-(-tensor.numel() // rest.axis.size) for tensor in tensors]
        sizes = [count * tensor.itemsize for count, tensor in zip(counts, tensors, strict=True)]
        slot = rest.slots.take(sum(round_up(size, ALIGNMENT) for size in sizes))
        weakref.finalize(self, rest.slots.give_back, slot).atexit = False
        self._places, start = [], 0
        for size, tensor in zip(sizes, tensors, strict=True):
            self._places.append(slot.narrow(0, start, size).view(tensor.dtype))
            start += round_up(size, ALIGNMENT)
        self._back: dict[int, torch.Tensor] = {}  # own slices, here again or on their way
        self._arrival: Any = None
        for place, tensor in zip(self._places, tensors, strict=True):
            self._put(place, tensor)

    def fetch(self) -> None:
        """Start to bring the own slices back to the device."""
        if self._back:
            return
        for index, place in enumerate(self._places):
            self._back[index] = torch.empty(place.shape, dtype=place.dtype, device=self._device)
            self._rest.lane.record_stream(self._back[index])
        with self._rest.lane.after_current():
            for index, place in enumerate(self._places):
                self._back[index].copy_(place, non_blocking=True)
        self._arrival = self._rest.lane.record_event()

    def take(self, index: int) -> torch.Tensor:
        """A copy of the tensor, with its values, strides and need of a gradient, but no graph; collective if cut."""
        if index not in self._back:
            self._back.clear()
            self.fetch()
        wait_event(self._arrival, self._device)
        flat = self._back.pop(index)
        before = self._before() if self._before is not None else None
        if before is not None and self._rest.settings.host:
            before.fetch()
        axis, form = self._rest.axis, self._forms[index]
        if axis.size > 1:
            flat = comm.gather_scalars(flat.view(torch.uint8), axis, "saved inputs").view(-1).view(form.dtype)
        return flat.as_strided(form.shape, form.strides).requires_grad_(form.requires_grad)

    def _put(self, place: torch.Tensor, tensor: torch.Tensor) -> None:
        form = _form(tensor)
        with torch.no_grad():
            if tensor.stride() != form.strides:
                tensor = torch.empty_strided(form.shape, form.strides, dtype=form.dtype, device=tensor.device).copy_(
                    tensor
                )
            flat = tensor.as_strided((tensor.numel(),), (1,))
            start = self._rest.axis.rank * place.numel()
            own = flat[start : start + place.numel()]
            if not self._rest.settings.host:
                place[: own.numel()].copy_(own)
                return
            if own.is_cuda:
                own = own.clone()  # the call, or who comes after it, may change its input in place before it has left
            with self._rest.lane.after_current():
                place[: own.numel()].copy_(own, non_blocking=True)
            self._rest.lane.record_stream(own)


class Rest:
    """Puts the inputs of calls away as `settings` say; `axis` are the ranks that each keep a slice of them."""

    def __init__(self, settings: RestSettings, axis: Axis = ALONE, device: torch.device | None = None) -> None:
        """`device`: of the tensors that will come; default: the current CUDA device, else the CPU."""
        if device is None:
            device = (
                torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
            )
        self.settings = settings
        self.axis = axis if settings.partition else ALONE
        if settings.partition and self.axis.size == 1:
            log_once(
                logging.WARNING,
                "activation_checkpointing.partition_activations has no effect: there is no group of more than one rank "
                "to cut inputs over; zero.checkpointing.configure(mpu), called before zero.initialize, names one",
            )
        self.lane = CopyStream(device)
        self.slots = Slots(device, settings.host, settings.count if settings.contiguous else None, self.lane)
        self.times = Times(device) if settings.profile else None
        self._device = device
        self._last: weakref.ref[Parcel] | None = None
        # Of tensors that are alive elsewhere, such as one that many blocks read: version, and where they are put.
        self._known: Any = WeakTensorKeyDictionary()

    def put(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor | Ticket]:
        """What is to be kept in place of the inputs of one call.

        Put away is what backward alone would keep: tensors that a graph has made. Others, such as masks and tables,
        are shared by calls and kept by their owners.
        """
        settings = self.settings
        if not (settings.host or settings.contiguous or self.axis.size > 1):
            return list(tensors)
        items: list[torch.Tensor | Ticket] = [self._ticket(tensor) or tensor for tensor in tensors]
        fresh = [index for index, item in enumerate(items) if isinstance(item, torch.Tensor) and made_by_graph(item)]
        fresh = [index for index in fresh if tensors[index].device == self._device]
        if fresh:
            parcel = Parcel(self, [tensors[index] for index in fresh], self._last)
            self._last = weakref.ref(parcel)
            for place, index in enumerate(fresh):
                items[index] = Ticket(parcel, place)
                self._known[tensors[index]] = (tensors[index]._version, self._last, place)
        return items

    @contextlib.contextmanager
    def around(self, again: bool) -> Iterator[None]:
        """Around a forward, or around a recomputation (`again`): waits and clocks."""
        timed = self.times.measure(again) if self.times is not None else contextlib.nullcontext()
        self._synchronize()
        try:
            with timed:
                yield
        finally:
            self._synchronize()

    def nbytes_of(self, tensor: torch.Tensor) -> int:
        """Bytes on the device that a saved input costs."""
        if not made_by_graph(tensor) or self.settings.host:
            return 0
        return -(-tensor.numel() // self.axis.size) * tensor.itemsize

    def _ticket(self, tensor: torch.Tensor) -> Ticket | None:
        version, parcel, place = self._known.get(tensor, (None, None, 0))
        alive = parcel() if parcel is not None else None
        return Ticket(alive, place) if alive is not None and version == tensor._version else None

    def _synchronize(self) -> None:
        if self.settings.synchronize and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def restored(item: Any) -> Any:
    """What `Rest.put` has put in place of a tensor, as a tensor."""
    return item.parcel.take(item.index) if isinstance(item, Ticket) else item


def made_by_graph(tensor: torch.Tensor) -> bool:
    """Whether nobody but a graph keeps the tensor, as far as can be seen."""
    plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided
    return plain and tensor.numel() > 0 and tensor.requires_grad and not tensor.is_leaf


def _form(tensor: torch.Tensor) -> Form:
    strides = torch.empty_like(tensor, device="meta").stride()  # its own where it is dense
    return Form(tensor.shape, strides, tensor.dtype, tensor.requires_grad)
