"""Cuts a model as a plan says: slices of the first rank's values, forwards that move what goes through, and back."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import nn

from zero.config import Config
from zero.config.tensor_parallel import TensorParallel
from zero.core import comm
from zero.core.comm import Axis, local_device
from zero.core.init.deferred_param import DeferredParam, ShardStorage
from zero.core.mesh import Meshes
from zero.core.owner import axes_of, cut_of, owner_of, set_cut, share_along
from zero.core.torch_private import shape_of_gradient
from zero.parallel.pipeline.split import Elsewhere
from zero.parallel.tensor import moves
from zero.parallel.tensor.first_step import FirstForward, FirstStep, broadcast_batch, compare_batch
from zero.parallel.tensor.forward import (
    CutForward,
    Regions,
    Replaced,
    Scope,
    Section,
    TokenDropout,
    Trunk,
    has_dropout,
)
from zero.parallel.tensor.layers import Layer, set_widths
from zero.parallel.tensor.plan import Place, TensorPlan, is_inside, tensor_plan
from zero.parallel.tensor.styles import OF_MODEL
from zero.parallel.tensor.tree import NoDraws, TreeForward, check_blocks
from zero.plan.grid import DENSE, UnitAxes

RECORD = "_zero_cut_model"  # of a model that is cut


class CutModel:
    """A model that is cut over the ranks along an axis, until `restore`."""

    def __init__(
        self,
        model: nn.Module,
        plan: TensorPlan,
        meshes: Meshes,
        section: TensorParallel,
        stage_of: Mapping[str, int],
    ) -> None:
        """Collective over the axis: all ranks take the values of its first one. stage_of: of modules of a pipeline."""
        self.plan, self.axis, self.stage_of = plan, meshes.along("tp"), stage_of
        self._model, self._broadcasts = model, section.broadcast_batch
        self._compared = self.axis.size == 1
        self.blocks = section.blocks if section.reduce == "tree" else 0
        self._placed: list[tuple[nn.Parameter, Place, UnitAxes]] = []
        self._first: FirstStep | None = None
        self._forwards: list[Replaced] = []
        self._changed: list[tuple[nn.Module, str, Any]] = []
        self.whole = False  # whether all of it is as planned: else parameters are in parts, and no layer knows
        if self.axis.size > 1:  # before anything is changed
            refuse_graphs({name: place.param for name, place in plan.places.items() if place.cut is not None})
        model.__dict__[RECORD] = self
        shapes = {name: place.cut.shape for name, place in plan.places.items() if place.cut is not None}
        self._handle = model.register_state_dict_post_hook(functools.partial(whole_only, shapes, self.axis.size))
        if self.axis.size > 1:
            self._cut(meshes)
        self._forwards, scopes = replaced(model, plan, self.axis, self.blocks, stage_of)
        self.sections = [each for each in self._forwards if isinstance(each, Section)]
        self._changed = set_counts(model, plan)
        if self.axis.size > 1 and not plan.source.startswith(OF_MODEL):
            self._compare_first(scopes)
        if self.axis.size > 1:
            self._first = FirstStep(model, plan, self.axis)
        self.whole = True

    def attach(self, meshes: Meshes, section: TensorParallel) -> None:
        """The model has an engine, perhaps another one than before, whose ranks are the same."""
        self.axis, self._broadcasts = meshes.along("tp"), section.broadcast_batch
        for forward in self._forwards:
            forward.axis = self.axis
        if self._first is not None:
            self._first.axis = self.axis

    def begin(self, inputs: Any, kwargs: Any) -> tuple[Any, Any]:
        """The batch of a forward, which ranks along the axis share; the first is compared, or all are sent."""
        if self._broadcasts:
            return broadcast_batch((inputs, kwargs), self.axis)
        if not self._compared:
            compare_batch((inputs, kwargs), self.axis)
            self._compared = True
        return inputs, kwargs

    def misfit(self, error: BaseException) -> str | None:
        """The text for an exception of a forward before the first step; None for one that says enough itself."""
        if self._first is None or not isinstance(error, (RuntimeError, IndexError)) or "tensor_parallel" in str(error):
            return None
        what = f"a forward of {type(self._model).__name__}, cut as {self.plan.source} says, failed: {error}"
        then = "If the plan does not fit the code of the model, say another by tensor_parallel.partition_config"
        return f"tensor_parallel: {what}. {then}"

    def __reduce__(self) -> NoReturn:
        """Refuse copies, and the model in a file: they would have parts of layers that nobody puts together."""
        raise RuntimeError(
            f"a copy of {type(self._model).__name__}, whose layers are cut over {self.axis.size} ranks, would have "
            "this rank's parts of them; take engine.module_state_dict() and load it into a model made anew"
        )

    def see(self, loss: torch.Tensor) -> None:
        """A loss that the engine is given; the first is compared before the first step."""
        if self._first is not None and self._first.loss is None:
            self._first.loss = loss.detach().clone()

    def before_step(self) -> None:
        """Gradients are there: the first are compared; what was seen of sections by then holds from now on."""
        if self._first is not None:
            first, self._first = self._first, None
            first.compare()
            for section in self.sections:
                section.scatters = section.learned

    def _cut(self, meshes: Meshes) -> None:
        for name, param in list(self._model.named_parameters()):
            at = self.plan.places.get(name)
            if cut_of(param) is not None:
                continue  # along another axis
            if deferred_in(param) is None:
                comm.broadcast(param.detach(), 0, self.axis, name)
            if at is None:
                continue  # where it is deferred it has the values of rank 0, whoever holds them
            self._placed.append((param, at, axes_of(param)))
            cut_param(param, name, at, self.axis.rank, meshes)

    def _compare_first(self, scopes: Mapping[str, Scope]) -> None:
        """Have blocks that are cut by names of layers be compared at their first forward."""
        for name, scope in scopes.items():
            blocks = [block for block in self.plan.blocks if block.scope == name]
            layers = [layer for block in blocks for layer in block.layers]
            if not layers or any(layer.param for layer in layers):
                continue  # what reads a parameter of its own has a part of it
            cut = {(module, each) for layer in layers for module, each, _ in layer.widths}
            cut |= {(module, each) for module, each, block in self.plan.counted if block in blocks}
            whole = [each for each in self._changed if each[:2] in cut]
            scope.first = FirstForward(name, [layer.name for layer in layers], whole, self.plan.source).compare

    @torch.no_grad()
    def restore(self, alone: bool = False) -> None:
        """Make the model whole again; collective, but where other ranks are gone, `alone`: then their parts are NaN."""
        axis = None if alone else self.axis
        self._model.__dict__.pop(RECORD, None)
        self._handle.remove()
        if self._first is not None:
            self._first.close()
        for param, place, axes in self._placed:
            make_whole(param, place, axes, axis)
        self._placed = []
        for forward in reversed(self._forwards):
            forward.undo()
        for module, name, value in reversed(self._changed):
            setattr(module, name, value)
        self._forwards, self._changed = [], []

    def widen(self, memo: Mapping[int, Any]) -> None:
        """Give a copy of the model, whose parameters are whole, the attributes of before; memo: of `copy.deepcopy`."""
        memo[id(self._model)].__dict__.pop(RECORD, None)
        for module, name, value in reversed(self._changed):
            setattr(memo[id(module)], name, value)


def whole_only(
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


def replaced(
    model: nn.Module, plan: TensorPlan, axis: Axis, blocks: int, stage_of: Mapping[str, int]
) -> tuple[list[Replaced], dict[str, Scope]]:
    """Replace the forwards of what a plan cuts; returns the replacements, and the blocks among them by name.

    blocks: of each product, 0 for none; stage_of: of modules of a pipeline, by name.
    """
    here = _here(model)
    regions = (NoDraws if blocks else Regions)(axis, local_device())

    def dropping(scope: str) -> Regions | None:
        return regions if has_dropout(list(here[scope].modules())) else None

    def forward(layer: Layer, *where: Any) -> CutForward:
        return TreeForward(layer, axis, where[0], blocks) if blocks else CutForward(layer, axis, *where)

    found: list[Replaced] = []
    sections: dict[str, Section] = {}
    # What goes to another stage is whole, wherever that lies.
    for _, stage in itertools.groupby((name for name in plan.trunk if name in here), stage_of.get):
        names = [*stage]
        trunk = Trunk(here[names[0]], here[names[-1]], axis)
        found += trunk.ends
        for name in (name for name in here if any(is_inside(name, block) for block in names)):
            if name in plan.sections:
                sections[name] = Section(here[name], axis, dropping(name), trunk)
            elif isinstance(here[name], nn.Dropout) and not any(is_inside(name, each) for each in plan.sections):
                found.append(TokenDropout(here[name], axis, regions, trunk))
    found += sections.values()
    scopes: dict[str, Scope] = dict(sections)
    for block in (block for block in plan.blocks if block.scope in here):
        around = next((each for name, each in sections.items() if is_inside(block.scope, name)), None)
        if block.scope not in scopes:
            scopes[block.scope] = Scope(here[block.scope], axis, dropping(block.scope), around)
            found.append(scopes[block.scope])
        inside = (layer for layer in block.layers if layer.name in here and not layer.param)
        found += [forward(layer, scopes[block.scope], around) for layer in inside]
    alone = (layer for layer in plan.alone if layer.name in here and not layer.param)
    found += [forward(layer, None, None) for layer in alone if layer.style.takes or layer.style.gives]
    return found, scopes


def set_counts(model: nn.Module, plan: TensorPlan) -> list[tuple[nn.Module, str, Any]]:
    """Have attributes that say widths, or count heads, say those of this rank; and what they were."""
    here, changed = _here(model), list[tuple[nn.Module, str, Any]]()
    for layer in plan.layers:
        if layer.name in here and layer.divided and not layer.param:
            set_widths(layer, changed)
    for module, name, block in plan.counted:
        value = getattr(module, name, None)
        if not isinstance(value, int) or value <= 0:
            continue
        shares = sorted((layer.share for layer in block.layers), key=lambda each: -each.groups)
        if name == "num_key_value_groups":  # each rank has one head of keys, and these of queries
            mine = shares[0].count
        else:  # of heads, those of queries or, if these are fewer, of keys
            mine = next((each.of(value)[1] for each in shares if value % each.groups == 0), value)
        changed.append((module, name, value))
        setattr(module, name, mine)
    return changed


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


def deferred_in(param: nn.Parameter) -> DeferredParam | None:
    """What has the values of a parameter that is born sharded; None for another one."""
    owner = owner_of(param)
    return owner.unit if owner is not None and isinstance(owner.unit, DeferredParam) else None


def cut_param(param: nn.Parameter, name: str, at: Place, rank: int, meshes: Meshes) -> None:
    """As `place`; a parameter that is born sharded stays so."""
    deferred, storage = deferred_in(param), None
    if deferred is not None and at.cut is not None:
        storage = ShardStorage(deferred.shard.values.device, deferred.shard.values.is_pinned())
        deferred.open()
        deferred.make_plain()
    place(param, at, rank)
    if storage is not None:
        DeferredParam(param, name, 0, meshes.of, 0).close(storage)


def make_whole(param: nn.Parameter, at: Place, axes: UnitAxes, axis: Axis | None) -> None:
    """Undo `place`, whose axes were others before; without other ranks (None) their parts are NaN."""
    if at.cut is not None:
        param.data = moves.assembled(param.detach(), axis, at.dim, at.ranges)
        param._zero_cut = None
    share_along(axes, [param])


def _here(model: nn.Module) -> dict[str, nn.Module]:
    return {name: each for name, each in model.named_modules() if not isinstance(each, Elsewhere)}


def planned(model: nn.Module, settings: Config, rank: int, apart: Sequence[str] = ()) -> TensorPlan | CutModel | None:
    """The plan by which to cut the model; None where it is not, or by hand; the record where by another engine.

    apart: modules that are divided otherwise. One rank has the blocks of a tree, too. Raises ValueError for what
    cannot be cut.
    """
    ranks = settings.grid.ranks("tp", rank)
    if len(ranks) == 1 and settings.tensor_parallel.reduce != "tree":
        return None
    if (before := model.__dict__.get(RECORD)) is not None:
        blocks = settings.tensor_parallel.blocks * (settings.tensor_parallel.reduce == "tree")
        same = (before.plan.rank, before.plan.ranks, before.blocks) == (ranks.index(rank), len(ranks), blocks)
        if not (same and before.whole):
            raise ValueError(
                f"initialize(): this model was cut over {before.plan.ranks} ranks, for an engine that was dropped or "
                "could not be made, and this JSON says otherwise, or not all of it was cut; make the model anew, and "
                "call destroy() of an engine before another one is made"
            )
        return before
    if any(cut_of(param) is not None for param in model.parameters()):
        return None
    plan = tensor_plan(model, settings.tensor_parallel, ranks.index(rank), len(ranks), apart)
    if settings.tensor_parallel.reduce == "tree":
        check_blocks(model, plan, settings.tensor_parallel)
    return plan


def refuse_graphs(params: dict[str, nn.Parameter]) -> None:
    """Raise RuntimeError where a graph of an earlier forward is kept: it expects gradients of whole parameters."""
    for name, param in params.items():
        if param.requires_grad and owner_of(param) is None:
            values, param.data = param.data, param.data.new_empty(0)
            kept, param.data = shape_of_gradient(param) != (0,), values
            if kept:
                raise RuntimeError(
                    f"initialize(): a graph of an earlier forward knows parameter '{name}' whole, of a loss that is "
                    "kept say; drop it (loss = loss.detach()) before layers are cut"
                )
