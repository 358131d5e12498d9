"""Weights out of files into a module, one that is built under zero.Init, or an engine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from zero.checkpoint.differences import Ask, Match, TargetParameter
from zero.checkpoint.index import Index
from zero.checkpoint.reader import Reader
from zero.checkpoint.safe_file import dtype_name
from zero.checkpoint.verify import check_headers
from zero.checkpoint.weight_files import sort_out, weights_at
from zero.core.comm import Axis
from zero.core.init.deferred_param import DeferredParam
from zero.core.owner import cut_of, owner_of
from zero.core.param_buffer import State
from zero.core.values import full_shape
from zero.engine.checkpoint import load_units
from zero.engine.checkpoint.load_units import LoadPlan, fill_plain, find_alike, fit, together
from zero.engine.checkpoint.saved_state import saved_buffers
from zero.engine.engine import Engine
from zero.engine.pipeline_module import PipelineModule
from zero.engine.weights import Unmatched
from zero.log import rank_zero
from zero.memory.available import give_back
from zero.plan.layout import Fragment


def load_weights(
    target: nn.Module,
    path: str | Path | Iterable[str | Path],
    strict: bool = True,
    rename: Callable[[str], str | None] | None = None,
) -> Unmatched:
    """Take weights and buffers from `path`; returns the names that only the model and only the files have.

    target: an engine, whose exact values these are from then on (its optimizer keeps its state); a module; or a module
    built under `zero.Init`, of which each rank reads its own ranges, one parameter at a time. For all but a plain
    module a collective.
    path: a safetensors file, or one of torch.save (.bin, .pt, .pth, .ckpt) that holds tensors by name and nothing that
    could run code; several such files of one folder; a folder of Hugging Face, with one file or shards and their index;
    a checkpoint (its folder, or that of the run), from whose masters the weights are exact; or, for a PipelineModule,
    that folder of DeepSpeed's which has files layer_XX-model_states.pt.
    strict: False: what only one side has is left as it is, with a warning that names it.
    rename: gives the model's name for each of the files, or None for what is to be left out.

    Values are converted to the dtype of the parameter. A rank reads its own ranges, and where it converts
    them holds some 100 MiB besides. Raises ValueError, before anything is changed, with all differences of names,
    shapes and kinds of dtype, and for files that are none of these.
    """
    module = target.module if isinstance(target, Engine) else target
    if rename is None and isinstance(module, PipelineModule):
        rename = module.name_of
    place = Path(path) if isinstance(path, (str, Path)) else [Path(each) for each in path]

    def look(buffers: Collection[str], axis: Axis) -> tuple[Path, Index]:
        folder, index = weights_at(place)
        check_headers(folder, index, axis.rank, axis.size)
        return folder, sort_out(index, buffers, rename)

    if isinstance(target, Engine):
        match = target.take_weights(look, strict)
    elif isinstance(target, nn.Module):
        match = _into_module(target, look, strict)
    else:
        raise ValueError(
            f"load_weights(target=...): got {type(target).__name__}; wanted an engine or a torch.nn.Module"
        )
    give_back()
    return Unmatched(match.missing, match.unexpected)


@torch.no_grad()
def _into_module(module: nn.Module, look: Callable[[Collection[str], Axis], tuple[Path, Index]], strict: bool) -> Match:
    params = dict(module.named_parameters())
    deferred = [owner.unit for owner in map(owner_of, params.values()) if owner is not None]
    if any(not isinstance(unit, DeferredParam) for unit in deferred):
        raise ValueError("load_weights(target=...): this module belongs to an engine; give the engine")
    axis = deferred[0].mesh.world if deferred else Axis(None, 1, 0, False)
    ask, what = Ask(strict=strict, elsewhere=load_units.names_elsewhere(module, axis)), "load_weights"
    plan = find_alike(lambda: _fitted(module, params, *look(saved_buffers(module), axis), ask), axis, what)

    def read() -> None:
        with Reader(plan.place, plan.index) as reader:
            for name, other in plan.match.names.items():
                _fill(reader, other, params[name])
            load_units.load_buffers(reader, module, plan.match.buffers, {})

    try:
        together(read, axis, what)
    except ValueError as error:
        error.args = (f"{error}. The module is half loaded",)
        raise
    for line in plan.match.warnings:
        rank_zero(logging.WARNING, "loading %s: %s", plan.place, line)
    return plan.match


def _fitted(module: nn.Module, params: dict[str, nn.Parameter], place: Path, index: Index, ask: Ask) -> LoadPlan:
    """Raises ValueError where the module cannot take what is there."""
    names = load_units.names_of_parameters(module)
    wanted = []
    for name, param in params.items():
        owner = owner_of(param)
        if is_lazy(param) or param.is_meta:
            raise ValueError(
                f"load_weights: parameter '{name}' has no memory yet; build the module on a device, or under zero.Init"
            )
        if owner is not None and not owner.unit.opened and owner.unit.state is not State.SHARDED:
            raise ValueError(f"load_weights: parameter '{name}' is held by GatheredParameters; load outside of it")
        others = [other for other in names[id(param)] if other != name]
        shape = tuple(param.shape) if owner is None else full_shape(owner)
        wanted.append(TargetParameter((name, *others), shape, dtype_name(param.dtype)))
    parts = (part for name, param in params.items() for part in _parts(param, name))
    return fit(place, index, ask, wanted, module, parts, "module")


def _parts(param: nn.Parameter, name: str) -> list[Fragment]:
    """The part of a parameter that this rank holds."""
    owner = owner_of(param)
    if owner is None or owner.unit.opened:
        return [Fragment(name, 0, 0, param.numel())]
    return [part._replace(name=name) for part in owner.unit.plan.layout.fragments(owner.unit.shard.window)]


def _fill(reader: Reader, name: str, param: nn.Parameter) -> None:
    """One parameter, or this rank's ranges of one that is built under zero.Init."""
    owner = owner_of(param)
    if owner is None or owner.unit.opened:
        values = param.detach()
        place = values if values.is_contiguous() else torch.empty_like(values, memory_format=torch.contiguous_format)
        fill_plain(reader, name, place.view(-1), 0, cut=cut_of(param))
        reader.finish()
        if place is not values:
            values.copy_(place)
        torch.autograd.graph.increment_version((param,))
        return
    for part in _parts(param, name):
        place = owner.unit.shard.values.narrow(0, part.at, part.numel)
        fill_plain(reader, name, place, part.start, cut=cut_of(param))
    reader.finish()
    owner.unit.renew(0, owner.unit.shard.values)
