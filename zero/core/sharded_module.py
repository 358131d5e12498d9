"""From a module to units: reads the model's structure, lets `plan` decide, and puts the parts together."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import is_

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from zero.config import Config
from zero.config.zero_section import ZeroOptimization
from zero.core import comm
from zero.core.agree import alike
from zero.core.comm import Axis
from zero.core.conversion import check_parameters, guard, unguard
from zero.core.finite import FirstNotFinite
from zero.core.gathering import exactly, in_8_bits
from zero.core.hooks import FrozenUnits, attach, uncalled_leaves
from zero.core.init.deferred_param import DeferredParam
from zero.core.leaf import is_apart, z3_leaf_module
from zero.core.mesh import Meshes
from zero.core.mixed_precision import DTYPES, MixedPrecisionPolicy
from zero.core.offload import Offload, is_enabled, placed, unplaced
from zero.core.owner import axes_of, cut_of, owner_of
from zero.core.prefetcher import ParamPrefetcher, in_backward
from zero.core.quantized_params import footprint, format_of, prepare
from zero.core.ratio import choose_ratio
from zero.core.reducer import Reducer
from zero.core.streaming import is_streamed
from zero.core.torch_private import take_off
from zero.core.unit import Unit
from zero.core.unit_table import UnitTable, agree_on_units
from zero.core.waits import wait_hooks
from zero.core.world import World
from zero.log import log_once, logger
from zero.memory.available import Freed, give_back
from zero.memory.state_placement import StatePlacement
from zero.memory.streams import Streams
from zero.plan.formats import wire_alignment
from zero.plan.grid import AXES
from zero.plan.memory import StateBytes
from zero.plan.order import Limits, stay_whole
from zero.plan.sharding import Sharding
from zero.plan.units import ModuleNode, ParamSpec, UnitPlan, plan_units

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class ShardedModule:
    """A module whose parameters live in units, and the two parts that move them.

    world: all ranks; meshes: of its units, and the grid of all ranks; table: the trained units of all ranks.
    """

    def __init__(
        self,
        module: nn.Module,
        units: Sequence[Unit],
        sharding: Sharding,
        world: World,
        meshes: Meshes,
        table: UnitTable,
        device: torch.device,
        numerics: MixedPrecisionPolicy,
        limits: Limits,
        offload: Offload | None,
    ) -> None:
        self.module = module
        self.offload = offload
        self.numerics = numerics
        self.units = tuple(units)
        self.trained = tuple(unit for unit in units if unit.gradients is not None)
        for unit in self.trained if numerics.tree else ():
            unit.gradients.sum_as_tree()
        self.sharding = sharding
        self.world, self.meshes, self.table, self.device = world, meshes, table, device
        self.prefetcher = ParamPrefetcher(self.units, limits)
        self.reducer = Reducer(self.units, sharding, self.prefetcher, FirstNotFinite(self.trained, world))
        if any(unit.resharded for unit in units):
            self.reducer.on_flush.append(uncalled_leaves(module, {unit.plan.anchor for unit in units}))
        self._hooks: dict[nn.Module, list[Callable[[], list[RemovableHandle]]]] = {}  # what attaches them
        self._handles: dict[nn.Module, list[RemovableHandle]] = {}
        reads = _reads(module, self.units, self.prefetcher) if any(unit.resharded for unit in units) else {}
        for child, (read, frozen) in reads.items():
            make = functools.partial(attach, child, read, frozen, self.prefetcher, self.reducer.begin)
            self._hooks.setdefault(child, []).append(make)
        for child, make in wait_hooks(module, self.trained).items():
            self._hooks.setdefault(child, []).append(make)
        self.hook(self._hooks)
        guard(module.modules())
        tables = [table for child in module.modules() for table in (child._parameters, child._modules)]
        self._tables = [(table, list(table.values())) for table in tables]

    @property
    def handles(self) -> list[RemovableHandle]:
        """The handles of all our hooks on modules."""
        return [handle for handles in self._handles.values() for handle in handles]

    @property
    def hooked(self) -> list[nn.Module]:
        """The modules with hooks of ours."""
        return list(self._handles)

    def unhook(self, modules: Iterable[nn.Module]) -> None:
        """Take the hooks off modules that are called only from inside of one that keeps its hooks."""
        for module in modules:
            take_off(module, self._handles.pop(module, ()))

    def hook(self, modules: Iterable[nn.Module]) -> None:
        """Put back what `unhook` took off."""
        for module in modules:
            for make in self._hooks.get(module, ()):
                self._handles.setdefault(module, []).extend(make())

    @contextlib.contextmanager
    def held(self, units: Sequence[Unit] | None = None) -> Iterator[None]:
        """Inside, units (default: all) are whole: gathered once, for many forwards and backwards; collective.

        They are on their way at first: a module that reads one waits for it.
        """
        kept = [unit for unit in (self.units if units is None else units) if unit.resharded]
        for unit in kept:
            unit.gather()
            unit.holds += 1
        try:
            yield
        finally:
            for unit in kept:
                unit.holds -= 1
                unit.release()

    def accumulate_over(self, micro_batches: int) -> None:
        """From now on so many micro-batches add up in one step; to be said while there are no gradients."""
        self.numerics = self.numerics._replace(accumulation=micro_batches)
        for unit in self.trained:
            unit.gradients.collect_in(self.numerics.gradient_dtypes(unit.plan.dtype, self.sharding))

    def abandon(self) -> None:
        """Make the next step possible after an exception; the gradients of the running window are dropped."""
        self.reducer.abandon()
        self.prefetcher.abandon()

    def recover(self) -> bool:
        """Clean up behind a backward that raised outside the engine's sight; whether there was one."""
        if not self.reducer.open or in_backward():
            return False
        logger.warning("a backward pass ended with an exception; the gradients of this step are dropped")
        self.abandon()
        return True

    def check_parameters(self) -> None:
        """Raise RuntimeError where parameters were moved, converted or replaced: an update would not reach them.

        What was added beside them may have an optimizer of its own, so that is a warning.
        """
        for unit in self.units:
            check_parameters(unit)
        if all(len(table) == len(at) and all(map(is_, table.values(), at)) for table, at in self._tables):
            return  # no module has other parameters or children than it had
        there = dict(self.module.named_parameters())
        new = [name for name, param in there.items() if owner_of(param) is None and param.grad is not None]
        if new:
            text = (
                f"parameter '{new[0]}' came into the model after initialize(), and no step of this engine uses its "
                "gradient; destroy() the engine, change the model and call initialize() then, or freeze what is new"
            )
            ours = {id(param) for unit in self.units for param in unit.params}
            if not ours <= {id(param) for param in there.values()}:
                raise RuntimeError(text)
            log_once(logging.WARNING, text)

    def check_order(self) -> None:
        """Raise RuntimeError on all ranks when they communicated in different orders since the last call; collective.

        Does nothing unless the world notes the order.
        """
        watchdog = self.world.watchdog
        if watchdog.order is not None:
            order, watchdog.order = watchdog.order, []
            what = f"the ranks' orders of collectives differ in step {watchdog.status.steps}, at position {{index}}"
            # Ranks along pp hold other units.
            alike(order, self.world, what, "none any more", self.meshes.grid.lists(*AXES[1:]))
            watchdog.order.clear()  # the comparison itself

    def nbytes(self) -> StateBytes:
        """Bytes of parameters and gradients alive on this rank; masters in 16-bit runs count as optimizer state.

        What was sent off the device is not among them; `offload.host` counts that.
        """
        parameters = gradients = 0
        masters = 0 if self.offload is None else self.offload.slots_nbytes
        for unit in self.units:
            parameters += unit.buffer.full.untyped_storage().nbytes()
            values, master = unit.shard.nbytes()
            parameters += values + unit.gathering.nbytes + sum(spec.extra_nbytes for spec in unit.plan.params)
            if unit.gradients is not None:
                gradients += unit.gradients.nbytes
                masters += master
        return StateBytes(parameters, gradients, masters)

    def leave(self) -> None:
        """The engine is gone; begins no message, waits for no update. What cannot be given back now `reclaim` gives."""
        self.world.watchdog.close()
        for unit in self.units:
            if not unit.resharded and unit.shard.pending is None:
                with contextlib.suppress(RuntimeError):  # the other ranks are gone
                    unit.wait_sent()  # of a step that all ranks have taken
        if all(unit.readable and not unit.resharded for unit in self.units):
            self.dissolve()
            return
        for unit in self.units:
            unit.left_by = self

    def dissolve(self, broken: bool = False) -> None:
        """Undo the wrapping: hooks off, every parameter whole and on its own; collective, unless it is `broken`."""
        self.unhook(self.hooked)
        unguard(self.module)
        self.reducer.detach()
        for unit in self.units:
            unit.dissolve(broken)
        if self.offload is not None:
            self.offload.close()


def reclaim(module: nn.Module) -> None:
    """Give parameters of engines that were dropped without `destroy()` whole storage of their own; collective."""
    units = [owner.unit for owner in map(owner_of, module.parameters()) if owner is not None]
    left = [unit.left_by for unit in units if isinstance(unit, Unit)]
    for sharded in list({id(each): each for each in left}.values()):
        if sharded is not None:
            sharded.abandon()  # what is gathered on some ranks only is not, afterwards
            sharded.dissolve()


def wrap(
    module: nn.Module,
    groups: Sequence[Sequence[nn.Parameter]],
    sharding: Sharding,
    world: World,
    meshes: Meshes,
    device: torch.device,
    numerics: MixedPrecisionPolicy,
    limits: Limits,
    settings: Config,
    fused: bool,
) -> ShardedModule:
    """Put the parameters of `module` into units on `device` and hook them up.

    `groups` are the optimizer's parameter groups; `limits` say how long parameters stay. Every rank takes rank 0's
    parameters and buffers; what was built under `zero.Init` is taken over from its shards. `fused`: as in
    `refuse_streaming`. Raises ValueError for a parameter that cannot be managed.
    """
    for name, param in module.named_parameters():
        owner = owner_of(param)
        if owner is not None and not isinstance(owner.unit, DeferredParam):
            raise ValueError(f"parameter '{name}' belongs to another engine; call its destroy() first")
    prepare(module, device)
    plans = plan_module(module, groups, world.size, settings, numerics.formats.alignment)
    table = agree_on_units(plans, world)
    world.watchdog.units = table.units
    shared = [meshes.of(plan.axes) for plan in plans]
    by_name = dict(module.named_parameters())
    persistent = stay_whole([sum(spec.numel for spec in plan.params) for plan in plans], limits)
    offload, streams = None, Streams.create(device)
    section = settings.zero_optimization
    if is_enabled(section):
        shards = [mesh.shard for mesh in shared]
        scheme = unplaced(sharding, shards, world, device, numerics)
        ratio = choose_ratio(section, plans, scheme, world, device)
        streamed = is_streamed(section, plans, scheme, ratio, world, device, fused)
        scheme, ranks = placed(section, plans, scheme, ratio, streamed), [shard.rank for shard in shards]
        offload = Offload(section, settings.aio, plans, scheme, ranks, world, device, streams)
    units, freed = [], Freed()
    try:
        for index, plan in enumerate(plans):
            resting = None if offload is None else offload.placement(index)
            placement = resting or StatePlacement(device, device, streams, events=world.watchdog.events)
            params = [by_name[spec.name] for spec in plan.params]
            which = index, table.numbers[index]
            units.append(unit := Unit(plan, params, *which, shared[index], sharding.params, placement))
            _adopt(unit, device, sharding, numerics, section, index in persistent)
            freed.add(0 if device.type == "cuda" else unit.buffer.full.numel() * unit.buffer.full.itemsize)
        _adopt_buffers(module, device, meshes.same_part, None if numerics.buffers is None else DTYPES[numerics.buffers])
        give_back()
        sharded = ShardedModule(module, units, sharding, world, meshes, table, device, numerics, limits, offload)
    except BaseException:
        _unwrap(module, units)
        if offload is not None:
            offload.close()
        raise
    world.watchdog.tie(sharded)
    if world.writes:
        logger.debug("units: %s", [(unit.plan.name, unit.plan.layout.numel) for unit in units])
    return sharded


def _adopt(
    unit: Unit,
    device: torch.device,
    sharding: Sharding,
    numerics: MixedPrecisionPolicy,
    section: ZeroOptimization,
    persistent: bool,
) -> None:
    dtype = unit.plan.dtype
    gradient_dtypes = numerics.gradient_dtypes(dtype, sharding)
    unit.persistent = unit.resharded and persistent
    quantized = section.zero_quantized_weights and unit.plan.requires_grad and not unit.persistent
    gathered = in_8_bits if quantized else exactly
    unit.adopt(DTYPES[dtype], device, gradient_dtypes, numerics.formats.remainder(dtype), gathered)
    if section.zero_quantized_gradients and unit.gradients is not None:
        unit.gradients.quantize()
    unit.release()  # what a model holds whole at any moment is one unit, and those that stay so


def _unwrap(model: nn.Module, made: Sequence[Unit]) -> None:
    """Give the parameters of the units that were made, of which one could not be, storage of their own again.

    Together with the other ranks where they come here, too; else what only they hold of resharded parameters is NaN.
    """
    owners = [owner for owner in map(owner_of, model.parameters()) if owner is not None]
    held = {id(owner.unit) for owner in owners}
    for unit in (unit for unit in made if id(unit) in held):
        try:
            unit.dissolve(unit.mesh.data.watchdog.broken)
        except RuntimeError:  # another rank has given up, or does not come here
            unit.dissolve(alone=True)


def plan_module(
    module: nn.Module, groups: Sequence[Sequence[nn.Parameter]], world_size: int, settings: Config, alignment: int
) -> tuple[UnitPlan, ...]:
    """The units of a module, which may be on the meta device. Arguments and errors as of `wrap` and `plan_units`."""
    named = {param: name for name, param in module.named_parameters()}
    specs = _specs(named, groups, settings.compute_dtype)
    alignment = wire_alignment(alignment, settings.zero_optimization)
    return plan_units(_tree(module, named), specs, world_size, settings.zero.units, alignment)


def _specs(
    named: dict[nn.Parameter, str], groups: Sequence[Sequence[nn.Parameter]], compute_dtype: str
) -> list[ParamSpec]:
    group_of: dict[nn.Parameter, int] = {}
    for index, group in enumerate(groups):
        for param in group:
            if param in group_of:
                raise ValueError(f"parameter '{named.get(param, '?')}' occurs twice in the optimizer's groups")
            if param not in named:
                raise ValueError(
                    f"optimizer group {index} holds a parameter of shape {tuple(param.shape)} "
                    "that is not a parameter of the model"
                )
            group_of[param] = index
    specs = []
    for param, name in named.items():
        numel, dtype, more = footprint(param)
        dtype = _dtype_name(param, dtype, name, compute_dtype)
        # What the optimizer does not update needs no gradient shard, but may need a gradient for others.
        trained = param in group_of and param.requires_grad
        axes, cut = axes_of(param), cut_of(param)
        ndim = param.ndim if cut is None else len(cut.shape)
        specs.append(ParamSpec(name, numel, dtype, trained, group_of.get(param, -1), ndim, more, axes, cut))
    return specs


def _dtype_name(param: nn.Parameter, dtype: torch.dtype, name: str, compute_dtype: str) -> str:
    if param.layout is not torch.strided:
        raise ValueError(f"parameter '{name}' is {param.layout}; wanted a dense one")
    packed = format_of(param) is not None  # whatever dtype it is in, the bits stay
    if compute_dtype != "fp32" and dtype in (torch.float32, torch.bfloat16, torch.float16) and not packed:
        return compute_dtype
    if dtype not in _NAMES or (param.requires_grad and dtype == torch.float64):
        raise ValueError(
            f"parameter '{name}' is {dtype}; wanted float32, bfloat16 or float16 "
            "(frozen ones also float64, int8, uint8)"
        )
    return _NAMES[dtype]


def _tree(module: nn.Module, named: dict[nn.Parameter, str], path: str = "") -> ModuleNode:
    own = tuple(named[param] for param in module._parameters.values() if param is not None)
    children = tuple(_tree(child, named, f"{path}.{name}" if path else name) for name, child in module.named_children())
    repeats = isinstance(module, (nn.ModuleList, nn.Sequential)) or getattr(module, "children_repeat", False)
    kind = type(module).__name__
    for below, name in getattr(module, "stands_for", ()):  # so that patterns find what other ranks have
        if below:
            children += (ModuleNode(f"{path}.{below}".removeprefix("."), name),)
        else:
            kind = name
    return ModuleNode(path, kind, own, children, repeats, z3_leaf_module(module), is_apart(module))


def _reads(
    module: nn.Module, units: Sequence[Unit], prefetcher: ParamPrefetcher
) -> dict[nn.Module, tuple[list[Unit], FrozenUnits | None]]:
    """What each module that has parameters reads: the units anchored at it, and those of parameters it owns.

    And which of them are frozen and anchored at it, where there are such.
    """
    found: dict[nn.Module, list[Unit]] = {module: []}  # the root always: it tells where a forward ends
    frozen: dict[nn.Module, list[Unit]] = {}
    for unit in units:
        anchor = module.get_submodule(unit.plan.anchor)
        found.setdefault(anchor, []).append(unit)
        if unit.gradients is None:
            frozen.setdefault(anchor, []).append(unit)
    for child in module.modules():
        if next(child.parameters(), None) is not None:
            found.setdefault(child, [])  # none of its own where all are below it
        for param in child._parameters.values():
            if param is not None and param._zero_owner.unit not in found[child]:
                found[child].append(param._zero_owner.unit)
    reads = {}
    for child, needed in found.items():
        inside = {unit.index: unit for below in child.modules() for unit in found.get(below, ())}
        trained = [unit for unit in inside.values() if unit.gradients is not None]
        follow = FrozenUnits(frozen[child], trained, prefetcher) if child in frozen else None
        reads[child] = needed, follow
    return reads


def _adopt_buffers(module: nn.Module, device: torch.device, peers: Axis, dtype: torch.dtype | None) -> None:
    for child in module.modules():
        for name, buffer in child._buffers.items():
            if buffer is not None:
                child._buffers[name] = buffer = buffer.to(device, dtype if buffer.is_floating_point() else None)
                if buffer.numel():
                    comm.broadcast(buffer, 0, peers, "buffers")
