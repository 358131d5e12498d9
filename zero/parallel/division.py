"""A model whose parameters are divided among ranks, each of which has its slice of the first one's values."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, NamedTuple, NoReturn

import torch
from torch import nn

from zero.core import comm
from zero.core.comm import Axis
from zero.core.init.deferred_param import DeferredParam, ShardStorage
from zero.core.mesh import Meshes
from zero.core.owner import axes_of, owner_of, set_cut, share_along
from zero.core.torch_private import shape_of_gradient
from zero.parallel import moves
from zero.plan.cut import Cut
from zero.plan.grid import DENSE, UnitAxes


class Place(NamedTuple):
    """A rank's slice of a parameter (`cut`, None for all), and the axes of the ranks that share it.

    dim: that is cut, along which each of the ranks has these `ranges`, starts and sizes; said: by the plan of a user or
    a model, that its gradient is a part of a sum.
    """

    param: nn.Parameter
    cut: Cut | None
    axes: UnitAxes
    dim: int = 0
    ranges: tuple[list[tuple[int, int]], ...] = ()
    said: bool = False


class Division:
    """What was done to a model whose parameters the ranks along an axis divide, until `restore`.

    RECORD: the attribute of the model by which it is found; WHAT: is divided; forwards: that were replaced.
    """

    RECORD: ClassVar[str]
    WHAT: ClassVar[str]

    def __init__(self, model: nn.Module, places: Mapping[str, Place], axis: Axis) -> None:
        """Raises RuntimeError, with nothing changed, where a graph knows parameters whole."""
        cut = {name: place for name, place in places.items() if place.cut is not None}
        if axis.size > 1:
            _refuse_graphs({name: place.param for name, place in cut.items()})
        self.axis, self.forwards = axis, list[Any]()
        self._model, self._places = model, places
        self._placed: list[tuple[nn.Parameter, Place, UnitAxes]] = []
        self._changed: list[tuple[nn.Module, str, Any]] = []  # attributes, and what they said
        model.__dict__[self.RECORD] = self
        shapes = {name: place.cut.shape for name, place in cut.items()}
        self._handle = model.register_state_dict_post_hook(functools.partial(_whole_only, shapes, axis.size))

    def _cut(self, params: Iterable[tuple[str, nn.Parameter]], meshes: Meshes) -> None:
        """All ranks take the values of the first one, and of those that have a place their slices; collective."""
        for name, param in params:
            deferred = _deferred_in(param)
            if deferred is None:
                comm.broadcast(param.detach(), 0, self.axis, name)
            at = self._places.get(name)
            if at is None:
                continue  # where it is deferred it has the values of rank 0, whoever holds them
            self._placed.append((param, at, axes_of(param)))
            storage = None
            if deferred is not None and at.cut is not None:
                storage = ShardStorage(deferred.shard.values.device, deferred.shard.values.is_pinned())
                deferred.open()
                deferred.make_plain()
            place(param, at, self.axis.rank)
            if storage is not None:
                DeferredParam(param, name, 0, meshes.of, 0).close(storage)

    @torch.no_grad()
    def restore(self, alone: bool = False) -> None:
        """Make the model whole again; collective, but where other ranks are gone, `alone`: then their parts are NaN."""
        self._model.__dict__.pop(self.RECORD, None)
        self._handle.remove()
        for param, at, axes in self._placed:
            if at.cut is not None:
                param.data = moves.assembled(param.detach(), None if alone else self.axis, at.dim, at.ranges)
                param._zero_cut = None
            share_along(axes, [param])
        for forward in reversed(self.forwards):
            forward.undo()
        for module, name, value in reversed(self._changed):
            setattr(module, name, value)
        self._placed, self.forwards, self._changed = [], [], []

    def widen(self, memo: Mapping[int, Any]) -> None:
        """Give a copy of the model, whose parameters are whole, the attributes of before; memo: of `copy.deepcopy`."""
        memo[id(self._model)].__dict__.pop(self.RECORD, None)
        for module, name, value in reversed(self._changed):
            setattr(memo[id(module)], name, value)

    def __reduce__(self) -> NoReturn:
        """Refuse copies, and the model in a file: they would have parts that nobody puts together."""
        raise RuntimeError(
            f"a copy of {type(self._model).__name__}, whose {self.WHAT} are divided among {self.axis.size} ranks, "
            "would have this rank's parts of them; take engine.module_state_dict() and load it into a model made anew"
        )


def place(param: nn.Parameter, at: Place, rank: int) -> None:
    """Leave of a parameter the part that a rank has, and have an engine that is made later know it."""
    own, axes = axes_of(param), at.axes  # it may have some already, as of stages that share it
    if axes.shard == DENSE.shard:
        same = tuple(set(own.same) - {"tp"})
        axes = own._replace(parts=(*own.parts, *axes.parts), sums=(*own.sums, *axes.sums), same=same)
    if at.cut is None:
        share_along(axes, [param])
        return
    values = param.detach()
    param.data = torch.cat([values.narrow(at.dim, start, size) for start, size in at.ranges[rank]], at.dim)
    set_cut(param, at.cut, axes)


def _deferred_in(param: nn.Parameter) -> DeferredParam | None:
    """What has the values of a parameter that is born sharded; None for another one."""
    owner = owner_of(param)
    return owner.unit if owner is not None and isinstance(owner.unit, DeferredParam) else None


def _whole_only(
    shapes: Mapping[str, tuple[int, ...]], ranks: int, module: nn.Module, values: dict[str, Any], prefix: str, _: Any
) -> None:
    """Raise RuntimeError where values of a state dict would be parts; parameters themselves know that they are."""
    for name, shape in shapes.items():
        value = values.get(f"{prefix}{name}")
        if value is not None and not isinstance(value, nn.Parameter) and tuple(value.shape) != tuple(shape):
            raise RuntimeError(
                f"state_dict(): this rank has {tuple(value.shape)} of '{name}' {tuple(shape)}, which is cut over "
                f"{ranks} ranks; call engine.module_state_dict() or engine.save_16bit_model() on all of them"
            )


def _refuse_graphs(params: Mapping[str, nn.Parameter]) -> None:
    """Raise RuntimeError where a graph of an earlier forward is kept: it expects gradients of whole parameters."""
    for name, param in params.items():
        if param.requires_grad and owner_of(param) is None:
            values, param.data = param.data, param.data.new_empty(0)
            kept, param.data = shape_of_gradient(param) != (0,), values
            if kept:
                raise RuntimeError(
                    f"initialize(): a graph of an earlier forward knows parameter '{name}' whole, of a loss that is "
                    "kept say; drop it (loss = loss.detach()) before the model is cut"
                )
