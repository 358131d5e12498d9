"""From a module to units: reads the model's structure, lets `plan` decide, and puts the parts together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import nn

from zero.core import comm
from zero.core.frozen import FrozenUnits
from zero.core.gathering import Gatherer, in_backward
from zero.core.hooks import Reads, attach
from zero.core.mesh import Mesh
from zero.core.reducing import Reducer
from zero.core.unit import Unit
from zero.log import logger
from zero.plan.formats import ITEMSIZE, Formats
from zero.plan.memory import StateBytes, gradient_itemsize
from zero.plan.sharding import Sharding
from zero.plan.units import ModuleNode, ParamSpec, UnitPlan, plan_units

DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
    "int8": torch.int8,
    "uint8": torch.uint8,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Numerics(NamedTuple):
    """What the parameters become: their dtype, how many micro-batches add up in one step, and the optimizer's state."""

    compute_dtype: str
    accumulation: int
    formats: Formats = Formats()


class Sharded:
    """A module whose parameters live in units, and the two parts that move them."""

    def __init__(self, module: nn.Module, units: Sequence[Unit], sharding: Sharding, mesh: Mesh) -> None:
        self.module = module
        self.units = tuple(units)
        self.trained = tuple(unit for unit in units if unit.gradients is not None)
        self.sharding = sharding
        self.mesh = mesh
        self.gatherer = Gatherer(self.units)
        self.reducer = Reducer(self.units, sharding, self.gatherer.done)
        self.reducer.on_flush(self.gatherer.end_of_backward)
        self._reads = _reads(module, self.units, self.gatherer) if any(unit.cut for unit in units) else {}
        self._handles = attach(self._reads, self.gatherer, self.reducer.begin)

    def unhook(self, modules: Iterable[nn.Module]) -> None:
        """Take the hooks off modules that are called only from inside of one that keeps its hooks."""
        for module in modules:
            for handle in self._handles.pop(module, ()):
                handle.remove()

    def hook(self, modules: Iterable[nn.Module]) -> None:
        """Put back what `unhook` took off."""
        reads = {module: self._reads[module] for module in modules if module in self._reads}
        self._handles |= attach(reads, self.gatherer, self.reducer.begin)

    def abandon(self) -> None:
        """Make the next step possible after an exception; the gradients of the running window are dropped."""
        self.reducer.abandon()
        self.gatherer.abandon()

    def recover(self) -> None:
        """Clean up behind a backward that raised outside the engine's sight."""
        if self.reducer.open and not in_backward():
            logger.warning("a backward pass ended with an exception; the gradients of this step are dropped")
            self.abandon()

    def drop_gradients(self) -> None:
        """Forget all gradients, local and reduced."""
        self.reducer.drop()

    def nbytes(self) -> StateBytes:
        """Bytes of parameters and gradients alive on this rank; masters in 16-bit runs count as optimizer state."""
        parameters = gradients = masters = 0
        for unit in self.units:
            parameters += unit.full.untyped_storage().nbytes()
            parameters += unit.shard.nbytes if unit.cut else 0
            if unit.gradients is not None:
                gradients += unit.gradients.nbytes
                masters += unit.master.nbytes
        return StateBytes(parameters, gradients, masters)

    def dissolve(self) -> None:
        """Undo the wrapping: hooks off, every parameter whole and on its own."""
        self.unhook(list(self._handles))
        self.reducer.detach()
        for unit in self.units:
            unit.dissolve()


def wrap(
    module: nn.Module,
    groups: Sequence[Sequence[nn.Parameter]],
    sharding: Sharding,
    mesh: Mesh,
    device: torch.device,
    numerics: Numerics,
    patterns: Sequence[str] = (),
) -> Sharded:
    """Put the parameters of `module` into units on `device` and hook them up.

    `groups` are the optimizer's parameter groups. Every rank takes rank 0's parameters and buffers. Raises
    ValueError for a parameter that cannot be managed.
    """
    named = {param: name for name, param in module.named_parameters()}
    for param, name in named.items():
        if getattr(param, "_zero_owner", None) is not None:
            raise ValueError(f"parameter '{name}' belongs to another engine; call its destroy() first")
    specs = _specs(named, groups, numerics.compute_dtype)
    plans = plan_units(_tree(module, named), specs, mesh.world_size, patterns, numerics.formats.alignment)
    by_name = {name: param for param, name in named.items()}
    units = []
    for index, plan in enumerate(plans):
        unit = Unit(plan, [by_name[spec.name] for spec in plan.params], index, mesh, sharding.params)
        dtype = gradient_dtype(plan, sharding, numerics.accumulation)
        unit.adopt(DTYPES[plan.dtype], device, dtype, numerics.formats.remainder(plan.dtype))
        units.append(unit)
    _adopt_buffers(module, device, mesh)
    sharded = Sharded(module, units, sharding, mesh)
    sharded.gatherer.release_all()  # after the hooks are on: registering one reads the parameter
    if mesh.rank == 0:
        logger.debug("units: %s", [(unit.plan.name, unit.plan.layout.numel) for unit in units])
    return sharded


def gradient_dtype(plan: UnitPlan, sharding: Sharding, accumulation: int) -> torch.dtype:
    """The dtype of the unit's local gradient buffer with so many micro-batches per step."""
    size = gradient_itemsize(plan.dtype, sharding, accumulation)
    return DTYPES[plan.dtype] if size == ITEMSIZE[plan.dtype] else torch.float32


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
        dtype = _dtype_name(param, name, compute_dtype)
        # What the optimizer does not update needs no gradient shard, but may need a gradient for others.
        trained = param in group_of and param.requires_grad
        specs.append(ParamSpec(name, param.numel(), dtype, trained, group_of.get(param, -1), param.ndim))
    return specs


def _dtype_name(param: nn.Parameter, name: str, compute_dtype: str) -> str:
    if param.layout is not torch.strided or param.is_meta:
        raise ValueError(f"parameter '{name}' is {param.layout} on {param.device}; wanted a dense one with values")
    if compute_dtype != "fp32" and param.dtype in (torch.float32, torch.bfloat16, torch.float16):
        return compute_dtype
    if param.dtype not in _NAMES or (param.requires_grad and param.dtype == torch.float64):
        raise ValueError(
            f"parameter '{name}' is {param.dtype}; wanted float32, bfloat16 or float16 "
            "(frozen ones also float64, int8, uint8)"
        )
    return _NAMES[param.dtype]


def _tree(module: nn.Module, named: dict[nn.Parameter, str], path: str = "") -> ModuleNode:
    own = tuple(named[param] for param in module._parameters.values() if param is not None)
    children = tuple(_tree(child, named, f"{path}.{name}" if path else name) for name, child in module.named_children())
    repeats = isinstance(module, (nn.ModuleList, nn.Sequential))
    return ModuleNode(path, type(module).__name__, own, children, repeats)


def _reads(module: nn.Module, units: Sequence[Unit], gatherer: Gatherer) -> dict[nn.Module, Reads]:
    """What each module reads: the units anchored at it, and those of parameters it owns."""
    found: dict[nn.Module, list[Unit]] = {module: []}  # the root always: it tells where a forward ends
    frozen: dict[nn.Module, list[Unit]] = {}
    for unit in units:
        anchor = module.get_submodule(unit.plan.anchor)
        found.setdefault(anchor, []).append(unit)
        if unit.gradients is None:
            frozen.setdefault(anchor, []).append(unit)
    for child in module.modules():
        for param in child._parameters.values():
            if param is not None and param._zero_owner.unit not in found.setdefault(child, []):
                found[child].append(param._zero_owner.unit)
    reads = {}
    for child, needed in found.items():
        if needed or child is module:
            inside = {unit.index: unit for below in child.modules() for unit in found.get(below, ())}
            trained = [unit for unit in inside.values() if unit.gradients is not None]
            follow = FrozenUnits(frozen[child], trained, gatherer) if child in frozen else None
            reads[child] = Reads(tuple(needed), follow)
    return reads


def _adopt_buffers(module: nn.Module, device: torch.device, mesh: Mesh) -> None:
    for child in module.modules():
        for name, buffer in child._buffers.items():
            if buffer is not None:
                child._buffers[name] = buffer = buffer.to(device)
                for axis in (mesh.shard, mesh.replica):
                    if buffer.numel():
                        comm.broadcast(buffer, 0, axis)
