"""One parameter of a model that is being built: whole while its module works on it, cut among the ranks after."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from zero.core import comm
from zero.core.comm import local_device
from zero.core.initial_values import share_equal, share_quant_state
from zero.core.mesh import Mesh
from zero.core.owner import Owner, axes_of, cut_of, placed_as
from zero.core.param_buffer import ParamBuffer, State
from zero.core.quantized_params import Int8, format_of
from zero.core.released import Placeholder, Released, absent
from zero.core.torch_private import parameter_of_class, tensors_of_storage
from zero.core.unit import ShardedParams
from zero.memory.state_placement import StatePlacement
from zero.plan.grid import UnitAxes
from zero.plan.layout import make_layout
from zero.plan.units import ParamSpec, UnitPlan

# References to a parameter's storage when only the parameter has it: its tensor, and our question.
_OWN_REFERENCES = 2


class ShardStorage(NamedTuple):
    """Where shards are kept: a device, and whether main memory is page-locked so that a GPU copies from it faster."""

    device: torch.device
    pinned: bool = False

    def put(self, shard: torch.Tensor) -> torch.Tensor:
        """The shard, there."""
        shard = shard.to(self.device)
        return shard.pin_memory() if self.pinned and not shard.is_cuda and torch.cuda.is_available() else shard


class Closed(Released):
    """Mixed into the class of a closed parameter of a model under construction."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """As every released parameter's; `nn.Parameter(other)` gives a parameter of `other`'s own class."""
        found = super().__torch_function__(func, types, args, kwargs)
        # It makes one of anything but a plain parameter, which `other` was not until now, by detach(), and wants the
        # same class back. Other code that detaches wants a tensor.
        plain = not isinstance(found, Placeholder)
        if plain and func is torch.Tensor.detach and sys._getframe(1).f_code is nn.Parameter.__new__.__code__:
            return parameter_of_class(type(args[0]), found)
        return found

    def __deepcopy__(self, memo: Any) -> Any:
        """A parameter that is cut in the same way; inside a block, where this one is opened, a whole one."""
        unit = self._zero_owner.unit
        return copy.deepcopy(self, memo) if unit.on_read(unit) else unit.copy()


class LooseBuffer(ParamBuffer):
    """The values of one parameter under construction.

    Unlike that of other buffers, their memory is freed and not resized, so a view of them can still be read. While the
    parameter is open there is no buffer at all: the values are those of the parameter itself.
    """

    mixin = Closed

    @property
    def kind(self) -> type:
        """The class that the parameter has while it is whole."""
        return self._classes[0]

    def close(self) -> None:
        """The parameter's values are complete; the next release frees them."""
        param = self.params[0]
        self._absent = [absent(param.shape, param.dtype, param.device)]
        self._classes = [type(param)]
        self._int8 = Int8.among(self.params)

    def open(self) -> None:
        """Leave the values to the parameter, which must be full."""
        self.full, self.views = None, []

    def show_as(self, dtype: torch.dtype, device: torch.device) -> None:
        """A closed parameter is to come up as this dtype, on this device."""
        self._absent = [absent(self._absent[0].shape, dtype, device)]
        self.params[0].__class__ = self.kind  # a released one would not take new data
        self._hide()

    def allocate(self) -> None:
        """See `ParamBuffer.allocate`."""
        (before,) = self._absent
        self.full = torch.empty(self.plan.layout.numel, dtype=before.dtype, device=before.device)
        self.views = [self.full.narrow(0, 0, before.numel()).view(before.shape)]

    def references(self) -> tuple[int, ...]:
        """Of what is being built no graph is kept."""
        return ()

    def reattach(self, index: int) -> str | None:
        """See `ParamBuffer.reattach`; while the parameter is open, `param.data` may be anything."""
        return super().reattach(index) if self.views else None

    def _free(self, keep_if_referenced: bool) -> None:
        self.full, self.views = None, []


class DeferredParam(ShardedParams):
    """One parameter of a model under construction: sharded on its own, without gradient or optimizer state.

    FULL without a shard ("open"): the values are those of the parameter itself, as in plain torch, and may differ
    from rank to rank. Code may replace `param.data` then, also by another dtype or shape.
    SHARDED: this rank holds its shard of rank 0's values.
    FULL with a shard: gathered for a reader, the same on all ranks.

    origin: the module that registered the parameter first, by number.
    """

    buffer: LooseBuffer

    def __init__(
        self, param: nn.Parameter, name: str, index: int, mesh_of: Callable[[UnitAxes], Mesh], origin: int
    ) -> None:
        """`mesh_of`: gives the mesh of those axes."""
        self._mesh_of = mesh_of
        self._on(mesh_of(axes_of(param)), param, name, index)
        self.origin = origin
        self.rename(name)

    def _on(self, mesh: Mesh, param: nn.Parameter, name: str, index: int) -> None:
        plan = _plan(param, name, mesh)
        buffer = LooseBuffer(plan, [param], mesh.shard.size > 1, mesh.data.global_rank)
        super().__init__(plan, buffer, index, mesh, StatePlacement(local_device(), local_device()))

    @property
    def opened(self) -> bool:
        """Whether the values are those of the parameter itself."""
        return self.shard.values is None

    @property
    def aliased(self) -> bool:
        """Whether anything but the parameter refers to the memory of its values, so that it may still be written."""
        param = self.params[0]
        own = _OWN_REFERENCES + (getattr(param, "CB", None) is not None)  # an int8 parameter has its values twice
        return tensors_of_storage(param.untyped_storage()) > own

    def rename(self, name: str) -> None:
        """Call the parameter `name` in messages from now on."""
        self.params[0]._zero_owner = Owner(name, self, 0)

    def close(self, storage: ShardStorage) -> None:
        """Keep this rank's shard of rank 0's values in `storage`, and free the whole; a collective."""
        param, name, on_read = self.params[0], self.plan.params[0].name, self.on_read
        if (mesh := self._mesh_of(axes_of(param))) is not self.mesh:  # said since it was registered
            self._on(mesh, param, name, self.index)
            self.on_read = on_read
        self.plan = self.buffer.plan = _plan(param, name, mesh)
        if mesh.data.rank == 0:
            share_equal([param], self.plan, mesh.peers)
        self.shard.window = self.plan.layout.shard(self.mesh.shard.rank, self.mesh.shard.size)
        self.shard.values = storage.put(comm.deal(param.detach(), self.shard.window.numel, self.mesh.shard))
        share_quant_state([param], self.mesh.data, self.plan.name)
        self.buffer.close()
        self.release()

    def open(self) -> None:
        """Give the parameter its values to work on; a collective."""
        self.gather()
        self.wait()
        self.shard.values = None
        self.buffer.open()

    def release(self, keep_if_referenced: bool = True) -> None:
        """As of all sharded parameters; what is open has nothing to come back from."""
        if not self.opened:
            super().release(keep_if_referenced)

    def finish(self, dtype: torch.dtype | None, device: torch.device, storage: ShardStorage) -> None:
        """The model is built: round to `dtype` what are floating-point values, and have them come up on `device`."""
        if self.state is not State.SHARDED:
            return
        before = self.params[0].dtype
        convert = dtype is not None and before.is_floating_point and format_of(self.params[0]) is None
        dtype = dtype if convert else before
        self.shard.values = storage.put(self.shard.values.to(dtype))
        self.buffer.show_as(dtype, device)

    def convert(self, dtype: torch.dtype) -> None:
        """The model is cast: round this rank's shard, where it lies."""
        values = self.shard.values
        self.finish(dtype, self.params[0].device, ShardStorage(values.device, values.is_pinned()))

    def copy(self) -> nn.Parameter:
        """Another parameter with the same values, of which this rank keeps the same shard; nothing is sent."""
        (param,) = self.params
        made = parameter_of_class(self.buffer.kind, absent(param.shape, param.dtype, param.device))
        placed_as(param, made.requires_grad_(param.requires_grad))
        other = DeferredParam(made, self.plan.params[0].name, self.index, self._mesh_of, self.origin)
        other.on_read, other.shard.values = self.on_read, self.shard.values.clone()
        other.buffer.close()
        other.release()
        return made

    def overwrite(self, index: int, source: int, before: torch.Tensor | None = None) -> None:
        """As of all sharded parameters; while open, the whole values only."""
        if not self.opened:
            super().overwrite(index, source, before)
            return
        values = self.params[0].detach()
        sent = values.contiguous()
        comm.broadcast(sent, source, self.mesh.data)
        if sent is not values:
            values.copy_(sent)

    def snapshot(self, index: int) -> torch.Tensor | None:
        """As of all sharded parameters; while open there are no other values than the parameter's."""
        return None if self.opened else super().snapshot(index)

    def move_to(self, target: torch.Tensor) -> bool:
        """Copy the values to `target`, of the parameter's shape, and leave the parameter without any.

        Returns whether the values were the same on all ranks. Where parameters are resharded, a collective.
        """
        equal = not self.opened
        self.gather()
        self.wait()
        param = self.params[0]
        target.copy_(param.detach())
        self.make_plain()
        param.data = absent(param.shape, param.dtype, param.device)
        if format_of(param) == "int8":
            param.CB = None
        return equal

    def make_plain(self) -> None:
        """Make the parameter, which must be full, a plain one with memory of its own."""
        for param in self.params:
            del param._zero_owner
        self.buffer.params.clear()
        self.buffer.open()
        self.shard.values = self.on_read = None

    def _keep_writes(self) -> None:
        if self.buffer.views:  # what was open until now has been taken as a whole
            super()._keep_writes()


def manageable(param: torch.Tensor) -> bool:
    """Whether a parameter can be cut: a dense one with values, in a dtype that units know. Others stay as they are."""
    return (
        not is_lazy(param)
        and not param.is_meta
        and param.layout is torch.strided
        and (param.is_floating_point() or param.dtype in (torch.int8, torch.uint8))
    )


def _plan(param: nn.Parameter, name: str, mesh: Mesh) -> UnitPlan:
    where = {"axes": axes_of(param), "cut": cut_of(param)}
    spec = ParamSpec(name, param.numel(), str(param.dtype).removeprefix("torch."), False, -1, param.ndim, **where)
    return UnitPlan(name, "", (spec,), make_layout({name: param.numel()}, mesh.data.size))
