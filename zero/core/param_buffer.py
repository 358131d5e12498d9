"""The full parameters of one unit: a flat buffer, the module's parameters as views of it, and the state of both.

Storage is flat, parameters are not: the module keeps its own `nn.Parameter` objects. Freeing resizes the buffer's
storage to 0 and allocating resizes it back, so that views which autograd saved in between are valid again when backward
reaches them. While it is freed the parameters look released (zero/core/released.py).
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from zero.core.quantized_params import Int8
from zero.core.released import Released, absent, released_class
from zero.core.torch_private import (
    set_versions,
    storage_references,
    tensor_references,
    without_torch_function,
)
from zero.plan.units import UnitPlan


class State(enum.Enum):
    """The states of a unit's parameters: what of them is in memory.

    SHARDED:   the own shard; the parameters look released.
    REQUESTED: the same. A gather was asked for while an update of the shard runs, and begins when that has ended:
               other ranks may have begun theirs, and wait for this one.
    GATHERING: the shard, and a full buffer that is being filled.
    FULL:      the shard and a valid full buffer. Parameters may be read.
    CONCEALED: the same, but the parameters look released, so that a read is noticed.
    STALE:     where parameters are not resharded: a full buffer that the optimizer has outdated, but for the own shard.
    AWAY:      nothing. The values are kept elsewhere, and the storages have size 0.
    """

    SHARDED = "sharded"
    REQUESTED = "requested"
    GATHERING = "gathering"
    FULL = "full"
    CONCEALED = "concealed"
    STALE = "stale"
    AWAY = "away"


# (state, verb): the next state
TRANSITIONS: Mapping[tuple[State, str], State] = {
    (State.SHARDED, "request"): State.REQUESTED,
    (State.SHARDED, "gather"): State.GATHERING,
    (State.SHARDED, "offload"): State.AWAY,
    (State.REQUESTED, "gather"): State.GATHERING,
    (State.GATHERING, "wait"): State.FULL,
    (State.SHARDED, "complete"): State.FULL,
    (State.REQUESTED, "complete"): State.FULL,
    (State.GATHERING, "complete"): State.FULL,
    (State.STALE, "complete"): State.FULL,
    (State.FULL, "conceal"): State.CONCEALED,
    (State.FULL, "release"): State.SHARDED,
    (State.FULL, "invalidate"): State.STALE,
    (State.FULL, "offload"): State.AWAY,
    (State.CONCEALED, "reveal"): State.FULL,
    (State.STALE, "gather"): State.GATHERING,
    (State.AWAY, "reload"): State.SHARDED,
    (State.AWAY, "show"): State.FULL,
}


class ParamBuffer:
    """Sole owner of the storage of the full parameters, of their classes and version counters, and of `state`.

    name:  the unit and the rank, for messages;
    full:  flat [layout.numel] in the unit's dtype; its storage has size 0 while the parameters are released;
    views: one of `full` for each parameter, of its shape;
    resharded: parameters exist in full only while they are used;
    lock:  held by whichever thread changes `state` or the storage. That is the thread of the training loop (or
           autograd's, while the loop waits for a backward), a thread that reads parameters beside it, or the one that
           updates the unit and then sends it. Nothing that a thread waits for under the lock needs the lock;
    versions: of each parameter when its value was last taken;
    kept_for_graph: a graph that was built while the parameters were read still finds the values in their place.
    """

    mixin = Released  # of the classes of released parameters

    def __init__(self, plan: UnitPlan, params: Sequence[nn.Parameter], resharded: bool, rank: int) -> None:
        self.plan = plan
        self.name = f"unit '{plan.name}' (rank {rank})"
        self.params = list(params)
        self.resharded = resharded
        self.state = State.FULL
        self.full: torch.Tensor | None = None
        self.views: list[torch.Tensor] = []
        self.lock = threading.RLock()
        self.kept_for_graph = False
        self._absent: list[torch.Tensor] = []
        self._int8: list[Int8] = []
        self._references = 0  # to the full buffer's memory, before it was filled
        self._classes = [type(param) for param in params]
        self.required_grad = [param.requires_grad for param in params]  # at the start
        self.versions = [param._version for param in params]

    def adopt(self, full: torch.Tensor) -> None:
        """Have the parameters be views of `full` [layout.numel], which holds their values."""
        self.full, self.views = full, self._views_of(full)
        self._classes = [type(param) for param in self.params]  # those of `zero.Init` were released until now
        self._references = storage_references(full)
        self._absent = [absent(param.shape, full.dtype, full.device) for param in self.params]
        self._int8 = Int8.among(self.params)
        for param, view in zip(self.params, self.views, strict=True):
            param.data = view
            param.grad = None
        for each in self._int8:
            each.point(self.views)
        self.note_versions()

    def move(self, verb: str) -> None:
        """Go where `TRANSITIONS` says; RuntimeError for a verb that is not legal now. The caller holds `lock`."""
        after = TRANSITIONS.get((self.state, verb))
        if after is None:
            raise RuntimeError(f"{self.name} cannot {verb} while it is {self.state.value}")
        self.state = after

    @property
    def looks_released(self) -> bool:
        """Whether the parameters refuse to be read."""
        return isinstance(self.params[0], Released)

    def allocate(self) -> None:
        """Take memory for the full parameters."""
        self.note_references()
        self.full.untyped_storage().resize_(self.full.numel() * self.full.itemsize)

    def free(self, keep_if_referenced: bool) -> None:
        """Have the parameters look released, and free their memory; see `Unit.release`."""
        try:
            self._hide()
            self._free(keep_if_referenced)
        except BaseException:
            self.show()  # the memory is as it was
            raise
        self.move("release")

    def show(self) -> None:
        """Make the parameters views of the buffer again, with the versions that saved tensors expect."""
        for param, view, kind in zip(self.params, self.views, self._classes, strict=True):
            param.__class__ = kind
            param.data = view
        for each in self._int8:
            each.point(self.views)
        set_versions(self.params, self.versions)

    def offload(self) -> None:
        """Have the parameters look released because their storage is about to be taken."""
        self.move("offload")
        if not self.resharded:
            self._hide()

    def reload(self) -> None:
        """The storages hold the values of `offload` again."""
        with self.lock:
            self.move("reload" if self.resharded else "show")
            if not self.resharded:
                self.show()

    def note_references(self) -> None:
        """From now on whoever else holds the memory has `lent` true; all that the engine itself keeps is there."""
        self._references = storage_references(self.full)

    @property
    def lent(self) -> bool:
        """Whether somebody has a view of the memory, such as an old `state_dict()`: reads of it are not noticed."""
        return storage_references(self.full) > self._references

    def look_released(self) -> None:
        """Have the parameters refuse to be read; their memory stays."""
        for param, kind in zip(self.params, self._classes, strict=True):
            param.__class__ = released_class(kind, self.mixin)

    def look_full(self) -> None:
        """Undo `look_released`."""
        if self.looks_released:
            for param, kind in zip(self.params, self._classes, strict=True):
                param.__class__ = kind

    def forget_graph(self) -> None:
        """No graph may read the values that a reader has left any more; one that does raises."""
        if self.kept_for_graph and self.state in (State.SHARDED, State.REQUESTED, State.GATHERING):
            with without_torch_function():
                self._blank()
        self.kept_for_graph = False

    def references(self) -> tuple[int, ...]:
        """Counts of references; one grows when a graph takes a parameter, or when a view of one is taken."""
        return storage_references(self.full), *map(tensor_references, self.params)

    def note_versions(self, indices: Iterable[int] | None = None) -> None:
        """The present values of these parameters (None: of all) were taken."""
        for index in range(len(self.params)) if indices is None else indices:
            self.versions[index] = self.params[index]._version

    def written(self) -> set[int]:
        """The parameters that were written in place since their values were last taken."""
        return {index for index, param in enumerate(self.params) if param._version != self.versions[index]}

    def outdate(self, indices: Sequence[int] | None = None) -> None:
        """The values of these parameters (None: of all) change: a graph built before raises, as in plain torch."""
        indices = range(len(self.params)) if indices is None else indices
        if self.state in (State.SHARDED, State.REQUESTED):
            for index in indices:
                self.versions[index] += 1  # set when they are shown
        else:
            torch.autograd.graph.increment_version([self.params[index] for index in indices])
            self.note_versions(indices)

    def reattach(self, index: int) -> str | None:
        """Make parameter `index` our view again if `param.data` was replaced.

        Its values are taken. If it has another shape or dtype, the replacement is undone, and what is wrong returned.
        """
        param, view = self.params[index], self.views[index]
        if _same_place(param, view):
            return None
        values, fits = param.detach(), param.shape == view.shape and param.dtype == view.dtype
        param.data = view
        if fits:
            view.copy_(values)
            torch.autograd.graph.increment_version(param)
            return None
        return f"{values.dtype} {tuple(values.shape)} where {view.dtype} {tuple(view.shape)} was"

    def reattach_all(self) -> set[int]:
        """`reattach` all parameters; returns those that were replaced. RuntimeError names one that does not fit."""
        replaced = set()
        for index, (param, view) in enumerate(zip(self.params, self.views, strict=True)):
            if _same_place(param, view):
                continue
            version = param._version
            if wrong := self.reattach(index):
                raise RuntimeError(
                    f"the data of parameter '{self.plan.params[index].name}' of {self.name} was replaced by a tensor "
                    f"of another shape or dtype ({wrong}); the replacement is undone"
                )
            replaced.add(index)
            if self.resharded:  # a graph that was built since has read these very values
                set_versions((param,), (version,))
        return replaced

    def dissolve(self) -> None:
        """Give every parameter memory of its own, with its current value."""
        for param in self.params:
            param.data = param.data.clone()
            vars(param).pop("_zero_owner", None)  # not there after torch.utils.swap_tensors
        for each in self._int8:
            each.point([param.data for param in self.params])

    def _free(self, keep_if_referenced: bool) -> None:
        full, views = self.full, self.views
        referenced = keep_if_referenced and storage_references(full) > self._references
        if self.kept_for_graph or referenced or not resizable(full.untyped_storage()):
            with torch.inference_mode(False):  # an inference tensor could not be written outside of that mode
                full = torch.empty_like(full)
                views = self._views_of(full)
        full.untyped_storage().resize_(0)
        self.full, self.views = full, views

    def _hide(self) -> None:
        self.note_versions()
        if not self.kept_for_graph:
            self._blank()
        self.look_released()

    def _blank(self) -> None:
        torch.autograd.graph.increment_version(self.params)
        for param, nothing in zip(self.params, self._absent, strict=True):
            param.data = nothing
        for each in self._int8:
            each.point(None)

    def _views_of(self, full: torch.Tensor) -> list[torch.Tensor]:
        spans = self.plan.layout.spans.values()
        return [full.narrow(0, *span).view(param.shape) for param, span in zip(self.params, spans, strict=True)]


def resizable(storage: torch.UntypedStorage) -> bool:
    """Whether its memory may be given back and come again: torch refuses where `numpy()` was called, and crashes
    where `share_memory_()` or a queue has moved the storage into memory that processes share."""
    return storage.resizable() and (storage.device.type != "cpu" or not storage.is_shared())


def _same_place(param: torch.Tensor, view: torch.Tensor) -> bool:
    same = param.shape == view.shape and param.dtype == view.dtype and param.device == view.device
    return same and param.data_ptr() == view.data_ptr() and param.stride() == view.stride()


# Reading order, 2 of 9; next: zero/core/unit.py, gather, wait, release, and the order in which the parts of a unit act.
