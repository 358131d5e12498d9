"""From a model and a JSON to an engine, its optimizer, a loader and a scheduler."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import Dataset

from zero.config import Config, load
from zero.config.grid_sizes import Told
from zero.config.optimizers import MuonParams
from zero.config.read import read
from zero.config.sections import TIMEOUT
from zero.core.agree import agree, alike, digest_of
from zero.core.comm import local_device
from zero.core.leaf import mark_leaf_modules
from zero.core.mesh import Meshes
from zero.core.mixed_precision import UNKNOWN, MixedPrecisionPolicy
from zero.core.offload import is_enabled
from zero.core.owner import axes_of, complete_cut, cut_of, keep_cuts
from zero.core.refusals import in_channels_last, refusals
from zero.core.sharded_module import ShardedModule, reclaim, wrap
from zero.core.streaming import refuse_streaming
from zero.core.world import MARGIN, MAX_TIMEOUT, World, make_world
from zero.data import Loader
from zero.data.loader import make_loader
from zero.data.seeds import digest_of_split, warn_of_splits
from zero.engine import arguments
from zero.engine.alarm import unwritable
from zero.engine.assignment import Given, assigned_run
from zero.engine.data_ranks import DataRanks, data_ranks
from zero.engine.description import log_start, run_facts
from zero.engine.engine import Engine
from zero.engine.feed import first_batch, parts_of
from zero.engine.forward_only import follower, hand_over, sharer
from zero.engine.joining import init_distributed, refuse_alone
from zero.engine.pipeline_engine import PipelineEngine
from zero.engine.pipeline_module import PipelineModule
from zero.engine.precision import make_loss_scaler
from zero.engine.step import Forms
from zero.launch.contract import INITIALIZED
from zero.log import counted, rank_zero, set_level
from zero.monitor.run_folder import free_number
from zero.monitor.sinks import check_installed
from zero.optim.lr import schedule_problems
from zero.optim.make import make_shard_optimizer, optimizer_type_problems, shard_optimizer_of
from zero.optim.muon_groups import muon_groups
from zero.optim.optimizer import ZeroOptimizer
from zero.optim.shard_optimizer import ShardOptimizer
from zero.parallel.experts.cutting import CutExperts, divided
from zero.parallel.experts.find import Experts
from zero.parallel.experts.separate import told_experts
from zero.parallel.operators.cutting import CutOperators, strategies_in
from zero.parallel.operators.strategy import Strategy
from zero.parallel.pipeline.build import Pipelined, pipelined
from zero.parallel.shared import SharedSequences
from zero.parallel.tensor.cutting import CutModel, planned
from zero.parallel.tensor.plan import TensorPlan
from zero.parallel.tensor.told_sizes import told_sizes
from zero.plan.cut import Box, Cut, cover_error
from zero.plan.formats import Formats
from zero.plan.grid import DATA, UnitAxes
from zero.plan.order import Limits
from zero.plan.sharding import Sharding
from zero.recompute.modules import Recomputing
from zero.watchdog.hang_report import Phase

_DIFFER = "the ranks do not initialize the same engine"
_CHECKS = {"optimizer": optimizer_type_problems, "scheduler": schedule_problems}


# What is wanted of a model on more than one rank along an axis, and is not done for the user yet.
_FORMS = {
    "pp": "all ranks have the same parameters; pipeline.stages of the JSON divides them",
    "ep": "no parameter is an expert's; set expert_parallel in the JSON, or say it by zero.set_cut, along ep",
}


class _Planned(NamedTuple):
    """What of a model is to be divided, or was for another engine; nothing is changed yet."""

    tensors: TensorPlan | CutModel | None
    experts: list[Experts] | CutExperts | None
    operators: list[tuple[Any, Strategy]]


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable[..., torch.optim.Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Dataset | Sequence[Any] | None = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[..., Any] | None = None,
    config: str | PathLike | Mapping[str, Any] | None = None,
    mesh_param: Any = None,
    config_params: str | PathLike | Mapping[str, Any] | None = None,
    device_mesh: Any = None,
    loss_fn: Callable[..., Any] | None = None,
) -> tuple[Engine, ZeroOptimizer | Any, Loader | Any, Any]:
    """Make an engine of `model`; returns (engine, optimizer, training loader, lr scheduler), None for what is not made.

    Collective: every rank calls it with the same arguments, and all take rank 0's parameters. The model is
    changed in place: its parameters move to this rank's device and into the precision that the JSON says.

    model_parameters: tensors or parameter groups for the optimizer; default: all that require a gradient.
    optimizer: instead of the JSON's, one of `torch.optim` that works element by element, or a callable that
    makes it from the parameters (from the groups, if `model_parameters` are groups); a `zero.FusedOptimizer` names one
    that our kernels run. Its parameter groups stay in charge; it is made anew for each unit, so state of earlier steps
    is not taken over. One that torch does not have needs `zero_allow_untested_optimizer`. lr_scheduler: an object bound
    to that optimizer, or a callable of the optimizer that is returned.
    training_data: a dataset, of which each rank's loader is made. loss_fn: of (output, target), for `train_batch`.
    mesh_param, device_mesh: the data-parallel ranks: torch's DeviceMesh of one dimension, or of two, replicas and
    then shards (HSDP); or the sizes, (replicas, shards) or `{"dp_replicate": 2, "dp_shard": 4}`, over all ranks.
    mpu: Megatron's object, whose data-parallel group is taken; instead of a mesh.
    dist_init_required: False where the caller has made the process group, or has none because it trains alone.
    Raises ValueError (`ConfigError` for the JSON) for whatever does not fit.
    """
    arguments.check_places(args, model, optimizer, model_parameters, (config, config_params) != (None, None))
    source = arguments.resolve_config(args, config, config_params)
    _join(source, dist_init_required, distributed_port)
    keep_cuts(model)
    said = model._sizes if isinstance(model, PipelineModule) else told_sizes(model, read(source).values, mpu)
    said = {**said, **told_experts(model)}
    cut = any(cut_of(param) is not None for param in model.parameters())
    data = data_ranks(mesh_param, device_mesh, mpu, cut, said)
    stand_ins = [name for name, one in (("optimizer", optimizer), ("scheduler", lr_scheduler)) if one is not None]
    run, ranks = assigned_run(), {"world_size": data.size, "told": Told(data.sizes, data.source)}
    settings = run.load(functools.partial(load, **ranks), source, model, stand_ins=stand_ins, checks=_CHECKS)
    check_installed(settings)
    if settings.log_level is not None:
        set_level(settings.log_level)
    # Before the model is touched: what is refused must leave it as it was, for the call that puts it right.
    loader = None
    if training_data is not None:  # in the order of the dataset for a PipelineModule, as DeepSpeed takes it
        how = {"route": "eval" if isinstance(model, PipelineModule) else "train", "collate_fn": collate_fn}
        loader = make_loader(settings, local_device(), data.place(settings.grid), training_data, **how)
    given = Given(model, optimizer, model_parameters, lr_scheduler, settings)
    engine = run.engine(functools.partial(_make, data, training_data, collate_fn, loss_fn), given)
    engine.training_dataloader = engine._follow(loader)
    return engine, engine.optimizer, loader, engine.lr_scheduler


def _make(
    data: DataRanks,
    training_data: Dataset | Sequence[Any] | None,
    collate_fn: Callable[..., Any] | None,
    loss_fn: Callable[..., Any] | None,
    given: Given,
) -> Engine:
    model, settings = given.model, given.settings
    experts = divided(model, settings, data.rank)
    apart = [each.name for each in (experts if isinstance(experts, list) else getattr(experts, "found", ()))]
    tensors = planned(model, settings, data.rank, apart)
    parts = _Planned(tensors, experts, strategies_in(model, settings))
    groups, client = _grouped(model, given.optimizer, given.model_parameters, settings, data.rank)
    with _divided(model, settings, data.rank, loss_fn, first_batch(settings, training_data, collate_fn)) as stages:
        zero_optimizer = _make_optimizer(groups, client, settings, stages)
        scheduler = arguments.make_scheduler(given.lr_scheduler, zero_optimizer, settings)
        engine = _make_engine(model, zero_optimizer, settings, data, training_data, stages, parts)
    engine.lr_scheduler = scheduler
    return engine


def _join(source: str | PathLike | Mapping[str, Any], required: bool | None, port: int) -> None:
    if INITIALIZED in os.environ:  # started by `zero run`, which looks for this sign that we were called
        with contextlib.suppress(OSError):
            Path(os.environ[INITIALIZED]).touch()
    if required is False:
        refuse_alone(port)
        return
    # The group is made before the file can be checked, for which the world size must be known. Its time-out is longer
    # than that of the watchdog, which has a report and so comes first.
    section = read(source).values.get("zero")
    seconds = section.get("timeout") if isinstance(section, Mapping) else None
    known = isinstance(seconds, int | float) and 0 < seconds < MAX_TIMEOUT
    timeout = timedelta(seconds=(seconds if known else TIMEOUT) + MARGIN)
    init_distributed(distributed_port=port, timeout=timeout)


def _make_engine(
    model: nn.Module,
    zero_optimizer: ZeroOptimizer | None,
    settings: Config,
    data: DataRanks,
    training_data: Dataset | Sequence[Any] | None,
    stages: Pipelined | None,
    parts: _Planned,
) -> Engine:
    stage, managed, device = settings.zero_optimization.stage, settings.managed_gradient_accumulation, local_device()
    sharding = Sharding.of_stage(stage, settings.reduces_each, managed)
    shard_optimizer = zero_optimizer.shard_optimizer if zero_optimizer else None
    groups = zero_optimizer.param_groups if zero_optimizer else []
    recomputing = Recomputing(settings.zero.recompute, settings.activation_checkpointing, device)
    zero = settings.zero
    shard_size, cp = data.sharded_over(settings), settings.sequence_parallel_size
    same = {"shard_size": shard_size, "zero_hpz_partition_size": settings.secondary_shard_size}
    world = make_world(zero.timeout, zero.check_order, data.group, same)
    sharded = sharing = None
    try:
        how = settings.secondary_shard_size, zero.reduce, zero.timeout, settings.summed_together < settings.summed
        meshes = Meshes(world, settings.grid, sharding, *how)
        with world.watchdog.call(Phase.INITIALIZE):
            _refuse(model, groups, settings, sharding, world)
            # What fails from here on leaves it cut, whole layers being on no rank; the next call goes on with that.
            forms = _cut(model, parts, meshes, settings, stages)
            _agree(model, groups, world, meshes)
            if (other := sharer(model, settings)) is not None and zero_optimizer is None:
                world.watchdog.close()
                return follower(other)
            if other is not None and other.optimizer is None:
                hand_over(other)
            sharded = _wrap(model, groups, sharding, world, meshes, device, settings, shard_optimizer, recomputing)
            if zero_optimizer is not None:
                sharded.reducer.divisor = settings.predivide
                sharded.reducer.weights.needed = settings.zero.mean == "tokens"
                zero_optimizer.bind(sharded, settings.gradient_factor, settings.counted)
            found = agree([free_number(zero.report, world.global_rank), digest_of_split(training_data)], world)
            number = found[0][0]
            warn_of_splits([digest for _, digest in found])
            if cp > 1:
                how = zero.context, not data.cuts_sequences, data.training_only, settings.grid.size("pp") == 1
                sharing = SharedSequences(model, meshes.along("cp"), *how)
            over = meshes.along(*DATA)
            made_by = Engine if stages is None else PipelineEngine
            last = over, forms._replace(sharing=sharing), stages
            engine = made_by(sharded, zero_optimizer, settings, device, recomputing, initialize, *last)
    except BaseException:
        recomputing.undo()
        if sharing is not None:
            sharing.close()
        if sharded is not None:
            sharded.dissolve(world.watchdog.broken)
        world.watchdog.close()
        raise
    log_start(engine)
    engine.monitor.open(settings, lambda: run_facts(engine), number)
    return engine


def _cut(model: nn.Module, parts: _Planned, meshes: Meshes, settings: Config, stages: Pipelined | None) -> Forms:
    """Cut the model as planned, or go on with how it is cut; collective."""
    plan, experts, operators = parts
    if isinstance(experts, list):
        experts = CutExperts(model, experts, meshes)
    elif experts is not None:
        experts.attach(meshes)
    if isinstance(plan, TensorPlan):
        stage_of = {} if stages is None else stages.divided.stage_of
        plan = CutModel(model, plan, meshes, settings.tensor_parallel, stage_of)
    if plan is not None:
        plan.attach(meshes, settings.tensor_parallel)
    cut = CutOperators(model, operators, meshes, settings.zero.full_batch) if operators else None
    return Forms(None, plan, experts, cut)


def _refuse(model: nn.Module, groups: arguments.Groups, settings: Config, sharding: Sharding, world: World) -> None:
    """Raise ValueError on all ranks where no engine can be made, or of different settings; collective."""
    leaf = settings.zero_optimization.leaf_module
    mark_leaf_modules(model, leaf.classes, leaf.names, leaf.name_suffixes, "classes" in leaf.model_fields_set)
    refused = refusals(model, bool(groups), sharding.params or is_enabled(settings.zero_optimization))
    refused += unwritable(settings.zero.alarm)
    alike(refused or arguments.described_config(settings), world, _DIFFER)
    if refused:
        raise ValueError(f"initialize(): {refused[0]}" + f" (and {len(refused) - 1} more)" * (len(refused) > 1))


def _agree(model: nn.Module, groups: arguments.Groups, world: World, meshes: Meshes) -> None:
    """Raise ValueError on all ranks where they have not the parameters of one engine; collective.

    All ranks make the meshes of all, though they may hold different units.
    """
    lines = arguments.described_parameters(model, groups)
    said = agree([[*lines], digest_of([name for name, _ in model.named_parameters()])], world)
    used = dict.fromkeys(UnitAxes(*map(tuple, each)) for found, _ in said for each in found)
    if groups and not used:
        raise ValueError("initialize(): no rank has a parameter, so there is nothing to optimize")
    for axes in used:
        alike(lines.get(axes, ()), world, _DIFFER, groups=meshes.alike(axes))
        meshes.of(axes)
    named = {name for axes in used for names in axes for name in names}
    named |= {"pp"} if len({names for _, names in said}) > 1 else set()
    named |= {"ep"} if "efsdp" in named else set()  # which separate experts are sharded along
    _check_cuts(model, used, meshes, world)
    for axis, form in _FORMS.items():
        if (size := meshes.grid.size(axis)) > 1 and axis not in named:
            raise ValueError(f"initialize(): {axis} is {size}, and {form}; do that, or leave {axis} out")


def _check_cuts(model: nn.Module, used: Iterable[UnitAxes], meshes: Meshes, world: World) -> None:
    """Raise ValueError on all ranks where parts of a parameter do not make it up; else complete its cut; collective.

    used: all axes that units of any rank have.
    """
    cuts: dict[UnitAxes, dict[str, Cut]] = {}
    params = dict(model.named_parameters())
    for name, param in params.items():
        if (cut := cut_of(param)) is not None:
            cuts.setdefault(axes_of(param), {})[name] = cut
    problems: list[str] = []
    parts: dict[str, list[list[Box]]] = {name: [] for named in cuts.values() for name in named}
    for axes in used:
        named = cuts.get(axes, {})
        for each in agree({name: cut.boxes for name, cut in named.items()}, meshes.of(axes).peers):
            for name in named:
                parts[name].append([Box(*map(tuple, box)) for box in each.get(name, ())])
        problems += [
            f"initialize(): the ranks' parts of parameter '{name}' {cut.shape} do not make it up: {problem}"
            for name, cut in named.items()
            if (problem := cover_error(cut.shape, [*itertools.chain(*parts[name])]))
        ]
    agree(ValueError(problems[0]) if problems else None, world)
    for name, those in parts.items():
        complete_cut(params[name], those)


def _wrap(
    model: nn.Module,
    groups: arguments.Groups,
    sharding: Sharding,
    world: World,
    meshes: Meshes,
    device: torch.device,
    settings: Config,
    shard_optimizer: ShardOptimizer | None,
    recomputing: Recomputing,
) -> ShardedModule:
    numerics = MixedPrecisionPolicy(
        settings.compute_dtype,
        settings.gradient_accumulation_steps if settings.managed_gradient_accumulation else UNKNOWN,
        Formats() if shard_optimizer is None else shard_optimizer.states.formats,
        accumulate=settings.data_types.grad_accum_dtype or "fp32",
        communicate=settings.communication_data_type,
        buffers=settings.data_types.buffer_dtype,
        tree=settings.zero.reduce == "tree",
        quantized=settings.zero_optimization.zero_quantized_gradients,
    )
    params = [group["params"] for group in groups]
    limits = Limits.of_section(settings.zero_optimization)
    if names := in_channels_last(model):
        text = "%s in channels_last, the first '%s': made contiguous; inputs may stay"
        rank_zero(logging.WARNING, text, counted(len(names), "parameter"), names[0])
    reclaim(model)
    recomputing.apply(model)
    fused = shard_optimizer is not None and shard_optimizer.factor_on_device
    return wrap(model, params, sharding, world, meshes, device, numerics, limits, settings, fused)


@contextlib.contextmanager
def _divided(
    model: nn.Module, settings: Config, rank: int, loss_fn: Callable[..., Any] | None, sample: Any
) -> Iterator[Pipelined | None]:
    """Gives the stages of this rank, where the JSON divides the model or a function computes the loss of it.

    An exception inside leaves the model whole.
    """
    section, layered = settings.pipeline, isinstance(model, PipelineModule)
    if layered:
        model.activation_checkpoint_interval = (
            section.activation_checkpoint_interval or model.activation_checkpoint_interval
        )
        loss_fn = model.loss_fn if loss_fn is None else loss_fn
    elif section.activation_checkpoint_interval:
        raise ValueError("pipeline.activation_checkpoint_interval: is for a PipelineModule; set zero.recompute instead")
    elif loss_fn is None and "stages" not in section.model_fields_set:
        yield None
        return
    call = None
    if sample is not None:
        args, kwargs, _ = parts_of(sample, layered or isinstance(model, nn.Sequential), loss_fn is not None)
        call = functools.partial(model, *args, **kwargs)
    found = pipelined(model, settings, settings.grid.ranks("pp", rank).index(rank), loss_fn, call)
    try:
        yield found
    except BaseException:
        found.divided.restore()
        raise
    found.divided.settle()


def _grouped(
    model: nn.Module, client: Any, model_parameters: Iterable[Any] | None, settings: Config, rank: int
) -> tuple[arguments.Groups, torch.optim.Optimizer | None]:
    """The parameter groups, and the script's optimizer of them; of the whole model, if we are to divide it.

    So groups, and which rule a group has, do not depend on how the model is divided.
    """
    if client is None and settings.optimizer is None:
        return [], None
    line, we_divide = settings.grid.ranks("pp", rank), "stages" in settings.pipeline.model_fields_set
    in_parts = isinstance(model, PipelineModule) and model.num_stages is not None
    is_part = len(line) > 1 and (in_parts or not we_divide)
    groups = arguments.parameter_groups(model, model_parameters, is_part)
    if client is not None:
        client = arguments.client_optimizer(client, groups)
        # The same dicts: a scheduler made for the client's optimizer stays in charge.
        return [group for group in client.param_groups if group["params"] or is_part], client
    if settings.optimizer.type.lower() == "muon":
        muon = MuonParams.model_validate(dict(settings.optimizer.params))
        groups = muon_groups(model, groups, muon, is_part, not is_part or rank == line[-1])
    return groups, None


def _make_optimizer(
    groups: arguments.Groups, client: torch.optim.Optimizer | None, settings: Config, divided: Pipelined | None
) -> ZeroOptimizer | None:
    if client is None and settings.optimizer is None:
        return None
    for group in groups:
        group["params"] = [param for param in group["params"] if divided is None or param not in divided.elsewhere]
    if client is None:
        section = settings.optimizer
        how = section.type, dict(section.params), settings.compute_dtype, groups
        shard_optimizer: ShardOptimizer = make_shard_optimizer(*how)
    else:
        shard_optimizer = shard_optimizer_of(client, settings.zero_allow_untested_optimizer, settings.compute_dtype)
        client._opt_called = True  # its step() never runs, ours does; a scheduler bound to it would warn of that
    if settings.zero_optimization.offload_optimizer.device == "nvme" and not shard_optimizer.states.foreseen:
        raise ValueError(
            "zero_optimization.offload_optimizer.device: got 'nvme' with an optimizer class of torch or of the script, "
            "whose state is not known before its first step; name Adam, AdamW, Lion, SGD or Adagrad in the section "
            "'optimizer' (without torch_adam, maximize and the like), give a zero.FusedOptimizer, or use device 'cpu'"
        )
    refuse_streaming(settings.zero_optimization.offload_optimizer, local_device(), shard_optimizer.factor_on_device)
    check = settings.bf16.check_grad_overflow if settings.bf16.enabled else True
    scaler = make_loss_scaler(settings)
    return ZeroOptimizer(groups, shard_optimizer, settings.gradient_clipping, check, scaler, client)
