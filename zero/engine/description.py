"""What an engine says of itself: `engine.describe()`, a line at the start, and the facts of a run for its folder."""

from __future__ import annotations

import logging
import os
import platform
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy
import torch

from zero.core.mesh import Mesh
from zero.core.quantized_params import format_of
from zero.core.sharded_module import ShardedModule
from zero.core.unit import Unit
from zero.engine.reality import planned
from zero.kernels import cuda
from zero.kernels.native import isa
from zero.log import counted, rank_zero
from zero.memory.available import cores
from zero.monitor.step_record import finite
from zero.optim.muon_groups import rules_line
from zero.parallel.pipeline.build import Pipelined
from zero.plan.cut import Cut
from zero.plan.formats import ITEMSIZE
from zero.plan.layout import Span
from zero.plan.memory import MIB
from zero.plan.placement import Placement, Where, is_updated


class Parameter(NamedTuple):
    """owners: by rank, which elements of the flattened parameter it has; the ranks are those along one shard axis.

    cut: which part of a larger parameter it is, None where it is none; the shape is that of the part.
    quantized: "nf4", "fp4" or "int8" for a weight of bitsandbytes, whose shape is that of its packed values.
    """

    name: str
    shape: tuple[int, ...]
    owners: Mapping[int, Span]
    quantized: str | None = None
    cut: Cut | None = None


class DescribedUnit(NamedTuple):
    """What is gathered, reduced and updated together; numel: without padding.

    group: index in the optimizer, -1 for none. cut: parameters are whole only while they are used; else the owners have
    just the optimizer's state for themselves. state: which parameters are in memory now, a word of `zero.core.state`.
    params, optimizer: where the shard and the optimizer's state rest, "device", "host" or "file"; "none": no state.
    """

    name: str
    dtype: str
    numel: int
    group: int
    cut: bool
    state: str
    params: str
    optimizer: str
    parameters: tuple[Parameter, ...]


@dataclass(frozen=True)
class Description:
    """All units, in order of registration; printed, a table.

    pipeline: the stages of this rank, the schedule, how many micro-batches are alive at once and how large the bubble
    is, in words; schedule: what the ranks along pp do in one schedule, a line for each. Empty without stages.
    """

    units: tuple[DescribedUnit, ...]
    pipeline: str = ""
    schedule: str = ""

    def __str__(self) -> str:
        """A line for each unit, and one for each of its parameters with the elements that each rank has."""
        lines = [self.pipeline] if self.pipeline else []
        return "\n".join([*lines, *(line for unit in self.units for line in _lines(unit))])


def describe(sharded: ShardedModule, stages: Pipelined | None = None) -> Description:
    """Of all units of the model, and its `stages`; nothing is gathered, and no rank asked."""
    here = [Placement(Where.DEVICE, Where.DEVICE)] * len(sharded.units)
    places = here if sharded.offload is None else sharded.offload.placements
    units = tuple(map(_unit, sharded.units, places))
    if stages is None:
        return Description(units)
    schedule, place = stages.schedule, stages.places[stages.here[0]]
    own, several = ", ".join(map(str, stages.here)), "s" * (len(stages.here) > 1)
    text = (
        f"stage{several} {own} of {len(stages.places)}; {schedule.style} of {schedule.micro_batches} micro-batches, at "
        f"most {schedule.alive(place)} alive here; bubble {100 * schedule.bubble():.1f} %"
    )
    return Description(units, text, schedule.text())


def _unit(unit: Unit, place: Placement) -> DescribedUnit:
    plan, axis = unit.plan, unit.mesh.shard
    windows = [(rank, plan.layout.shard(index, axis.size)) for index, rank in enumerate(axis.ranks)]
    parameters = []
    for spec, param in zip(plan.params, unit.params, strict=True):
        pieces = ((rank, plan.layout.fragment(spec.name, window)) for rank, window in windows)
        owners = {rank: Span(piece.start, piece.numel) for rank, piece in pieces if piece.numel}
        parameters.append(Parameter(spec.name, tuple(param.shape), owners, format_of(param), spec.cut))
    params, optimizer = place.params.name.lower(), place.optimizer.name.lower() if is_updated(plan) else "none"
    numel = sum(spec.numel for spec in plan.params)
    return DescribedUnit(
        plan.name, plan.dtype, numel, plan.group, unit.resharded, unit.state.value, params, optimizer, tuple(parameters)
    )


def _lines(unit: DescribedUnit) -> Iterator[str]:
    trained = f"group {unit.group}, optimizer state: {unit.optimizer}" if unit.optimizer != "none" else "not updated"
    whole = "cut" if unit.cut else "whole"
    yield f"{unit.name}: {unit.numel:,} x {unit.dtype}, {whole}, {unit.state}, parameters: {unit.params}; {trained}"
    width = max(len(parameter.name) for parameter in unit.parameters)
    for name, shape, owners, quantized, cut in unit.parameters:
        spans = ", ".join(f"rank {rank} [{span.start:,}:{span.stop:,}]" for rank, span in owners.items())
        form = f"{'x'.join(map(str, shape)) or 'scalar'}{f' {quantized}' if quantized else ''}"
        form += f" of {'x'.join(map(str, cut.shape))}" if cut is not None else ""
        yield f"    {name:<{width}}  {form:<12}  {spans}"


def run_facts(engine: Any) -> dict[str, Any]:
    """The value of run.json: configuration, ranks, versions, units; zero/monitor/run_folder.py has the layout."""
    config, device = engine._config, engine.device
    threads, ranks = torch.get_num_threads(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return {
        "time": time.time(),
        "configuration": finite(config.model_dump(mode="json", exclude={"raw": True, "comet": {"api_key"}})),
        "world": engine.world_size,
        "stage": config.zero_optimization.stage,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu",
        # How many threads of this host's ranks, or of this rank bound to some cores, there are for each core.
        "crowding": max(threads / cores(), threads * ranks / (os.cpu_count() or 1)) if device.type == "cpu" else 0.0,
        "versions": {
            "zero": sys.modules["zero"].__version__,
            "torch": str(torch.__version__),
            "numpy": numpy.__version__,
            "python": platform.python_version(),
        },
        "units": [
            {"name": unit.name, "numel": unit.numel, "bytes": unit.numel * ITEMSIZE[unit.dtype], "dtype": unit.dtype}
            for unit in describe(engine._sharded).units
        ],
        "plan": _plan(engine) if engine.optimizer is not None else {},
    }


def log_start(engine: Any) -> None:
    """Log on rank 0 what was made of the model."""
    config, sharded, optimizer, device = engine._config, engine._sharded, engine.optimizer, engine.device
    dtype, formats = config.compute_dtype, sharded.numerics.formats
    compiled = isa() if device.type == "cpu" else "CUDA" if cuda.kernels(device) else "torch"
    kept = f", masters as {formats.master}" if dtype != "fp32" else ""
    kept += f", moments in {formats.moments}" if formats.moments != "fp32" else ""
    rest = f"{engine._recorder.state_nbytes().total / MIB:.1f} MiB of model state per rank at rest"
    if optimizer is not None and not optimizer.states.sized:
        rest += ", and on top what the optimizer makes in its first step"
    grid, ranks = sharded.meshes.grid, counted(sharded.world.size, "rank")
    of_rank = " of this rank" if max(map(grid.size, ("pp", "tp", "ep"))) > 1 else ""  # others have other parts
    ranks += f" ({grid.factors})" if of_rank else ""
    ranks += "".join(dict.fromkeys(_shared(unit.mesh) for unit in sharded.units))
    ranks += f" (local SGD: a mean every {config.local_sgd.sync_every} steps)" * sharded.meshes.local
    rank_zero(
        logging.INFO,
        f"stage {config.zero_optimization.stage} on {ranks}, {device.type}: "
        f"{_numbers(sharded.units)}, {counted(len(sharded.units), 'unit')}{of_rank}, "
        f"{rest}, {compiled} kernels{kept}",
    )
    if optimizer is not None:
        if optimizer.host_threads:
            text = "the host updates with %s on each rank"
            rank_zero(logging.INFO, text, counted(optimizer.host_threads, "thread"))
        names = {param: name for name, param in sharded.module.named_parameters()}
        if rules := rules_line(optimizer.param_groups, names):
            rank_zero(logging.INFO, "%s", rules)
    if config.dump_state:
        rank_zero(logging.INFO, "configuration: %s", config.model_dump_json(indent=2))


def _shared(mesh: Mesh) -> str:
    """How ranks share units beyond the usual, in words."""
    if mesh.shard.size > 1 and mesh.replica.size > 1:
        return f" ({mesh.replica.size} replicas of {mesh.shard.size} shards)"
    return f" (parameters gathered among {mesh.secondary.size})" if mesh.secondary is not None else ""


def _numbers(units: Sequence[Unit]) -> str:
    """How many parameters there are, and of each dtype or packed format how many."""
    kinds: Counter[str] = Counter()
    for unit in units:
        dtype = unit.plan.dtype
        for spec, param in zip(unit.plan.params, unit.params, strict=True):
            form = format_of(param)
            kinds[form or dtype] += spec.numel * (2 * ITEMSIZE[dtype] if form in ("nf4", "fp4") else 1)
    each = [f"{numel:,} in {kind}" for kind, numel in kinds.items()]
    text = f"{sum(kinds.values()):,} parameters"
    return f"{text} in {next(iter(kinds))}" if len(kinds) == 1 else f"{text} ({', '.join(each) or 'none'})"


def _plan(engine: Any) -> dict[str, int]:
    """Bytes that are planned to be there at the end of a step, by the kinds that reports of steps have."""
    row = planned(engine._config, engine._sharded)
    host = {} if engine.host_nbytes() is None else {f"host {kind}": each for kind, each in row.host._asdict().items()}
    return {"parameters": row.device.parameters, "optimizer": row.device.masters + row.device.moments} | host
