"""Rules about several keys of a checked file; each error has the numbers and a fix."""

from collections.abc import Collection, Iterator

from zero.config.file import File
from zero.config.grid_sizes import KEYS, given_sizes
from zero.config.pipeline import SPLIT, STYLES
from zero.plan.grid import Grid

MAX_SCALE_POWER = 64  # of the loss scale: see LARGEST in zero/optim/scaler.py
_HPZ = "zero_optimization.zero_hpz_partition_size"


def precision(file: File) -> Iterator[str]:
    """Rules about dtypes, and computations on gradients in them."""
    if file.fp16.enabled and file.bf16.enabled:
        yield "fp16.enabled and bf16.enabled: both are true; set one of them to false"
    for section in ("fp16", "bf16"):
        if getattr(file, section).enabled and file.autocast_dtype not in (None, "fp32", section):
            yield (
                f"torch_autocast.dtype: got '{file.autocast_dtype}', wanted '{section}', which {section}.enabled "
                "makes the parameters"
            )
    if file.autocast_dtype == "fp32":
        yield "torch_autocast.dtype: got 'fp32', wanted one of 'bf16', 'fp16'"
    if file.gradient_predivide_factor == 0:
        yield "gradient_predivide_factor: got 0, wanted a number above 0"
    if file.zero.reduce == "tree" and (file.data_types.grad_accum_dtype or "fp32") != "fp32":
        yield (
            f"data_types.grad_accum_dtype: got '{file.data_types.grad_accum_dtype}', wanted 'fp32' "
            "with zero.reduce 'tree', whose sums are fp32"
        )
    yield from _param_dtype(file)
    yield from _dynamic_scale(file)


def _param_dtype(file: File) -> Iterator[str]:
    wanted, dtype = file.data_types.param_dtype, file.compute_dtype
    if wanted in (None, dtype) or (file.fp16.enabled and file.bf16.enabled):
        return
    cause = f"{dtype}.enabled makes them {dtype}"
    if dtype == "fp32":
        cause = "without fp16.enabled or bf16.enabled they are fp32"
    fix = f"set it to '{dtype}'" + (f", or switch on {wanted}.enabled instead" if wanted != "fp32" else "")
    yield f"data_types.param_dtype: got '{wanted}', but {cause}; {fix}"


def _dynamic_scale(file: File) -> Iterator[str]:
    fp16 = file.fp16
    if not file.scales_loss or fp16.loss_scale > 0:
        return
    for name in ("loss_scale_window", "hysteresis", "min_loss_scale"):
        if (value := getattr(fp16, name)) < 1:
            yield f"fp16.{name}: got {value}, wanted an integer of at least 1 for a dynamic loss scale"
    power = fp16.initial_scale_power
    if power > MAX_SCALE_POWER:
        yield f"fp16.initial_scale_power: got {power}, wanted an integer from 0 to {MAX_SCALE_POWER}"
    elif fp16.min_loss_scale > 2**power:
        yield (
            f"fp16.min_loss_scale: got {fp16.min_loss_scale}, wanted at most 2 ** fp16.initial_scale_power = "
            f"{2**power}, where the scale starts"
        )


def storage(file: File) -> Iterator[str]:
    """Rules about checkpoints, files and recomputation."""
    saving = file.zero.checkpoint
    if saving.keep is not None and (saving.keep_optimizer or 0) > saving.keep:
        yield (
            f"zero.checkpoint.keep_optimizer: got {saving.keep_optimizer}, wanted at most zero.checkpoint.keep, which "
            f"is {saving.keep}"
        )
    for name in ("offload_optimizer", "offload_param"):
        section = getattr(file.zero_optimization, name)
        if section.device == "nvme" and not section.nvme_path:
            yield f"zero_optimization.{name}.nvme_path: is missing; device 'nvme' needs a folder on a fast local drive"
    recompute = file.zero.recompute
    if recompute.ops and recompute.policy != "full":
        yield f"zero.recompute.ops: got {recompute.ops} with policy '{recompute.policy}'; keep one of the two"
    if recompute.policy == "auto" and recompute.budget is None:
        yield "zero.recompute.budget: is missing; policy 'auto' fits activations into it, such as '12 GiB'"
    if recompute.policy != "auto" and recompute.budget is not None:
        yield f"zero.recompute.budget: got {recompute.budget}; only policy 'auto' has one, leave it out"
    if recompute.policy == "full" and recompute.products > 1:
        yield f"zero.recompute.products: got {recompute.products}; policy 'full' keeps no products, leave it out"
    alarm = file.zero.alarm
    if alarm.model_fields_set and alarm.loss is alarm.norm is None:
        yield "zero.alarm: has neither loss nor norm; give how many standard deviations stand out, such as 'loss': 6"
    if (alarm.action == "checkpoint") != (alarm.folder is not None):
        what = "is missing; action 'checkpoint' saves into it" if alarm.folder is None else "is for action 'checkpoint'"
        yield f"zero.alarm.folder: {what}"
    steps = file.zero.profile.steps
    if steps is None and file.zero.profile.model_fields_set:
        yield "zero.profile.steps: is missing; give the first and the last step of the trace, such as [10, 12]"
    elif steps is not None and steps[1] < steps[0]:
        yield f"zero.profile.steps: got {list(steps)}, wanted the first step and then the last, such as [10, 12]"


def means(file: File) -> Iterator[str]:
    """Rules about a mean over tokens: a loss is multiplied by their number before its gradient travels and adds up."""
    dtypes = {
        "communication_data_type": file.communication_data_type,
        "data_types.grad_accum_dtype": file.data_types.grad_accum_dtype,
    }
    for key, dtype in dtypes.items() if file.zero.mean == "tokens" else ():
        if dtype == "fp16":
            yield f"{key}: got 'fp16' with zero.mean 'tokens', whose sums leave its range; use 'bf16' or 'fp32'"


def local_sgd(file: File, grid: Grid) -> Iterator[str]:
    """Rules about replicas that train by themselves for some steps: what needs all ranks at each step is refused."""
    zero, section, ranks = file.zero, file.zero_optimization, grid.size("dp_shard")
    fix = f"set zero.shard_size to a divisor of {ranks} below it, or the stage to 0"
    refused = {
        f"zero_optimization.stage {section.stage} (set 0 or 1)": section.stage > 1,
        f"stage 1 over all {ranks} ranks as one replica ({fix})": section.stage == 1 < ranks == grid.world,
        f"a grid of {grid.factors}": max(map(grid.size, ("pp", "cp", "tp", "ep"))) > 1,
        "zero_optimization.offload_optimizer": section.offload_optimizer.device != "none",
        "zero_optimization.zero_quantized_gradients": section.zero_quantized_gradients,
        "optimizer.params.beta2": file.optimizer is not None and file.optimizer.params.get("beta2") is not None,
        "zero.reduce 'tree'": zero.reduce == "tree",
        "zero.mean 'tokens'": zero.mean == "tokens",
        "managed_gradient_accumulation false": not file.managed_gradient_accumulation,
        **{f"zero.{key}": getattr(zero, key) for key in ("shard", "check_replicas", "unit_norms")},
        "zero.alarm": zero.alarm.model_fields_set,
    }
    if file.local_sgd.sync_every > 1 and (keys := ", ".join(key for key, given in refused.items() if given)):
        yield f"local_sgd.sync_every: got {file.local_sgd.sync_every}, and each step of all ranks with {keys}; keep one"


def forms(file: File, grid: Grid, refused: Collection[str]) -> Iterator[str]:
    """Rules about ranks that have parts of the model only, along axes of which some may be `refused` here."""
    if named := [key for key in given_sizes(file) if KEYS[key] in refused]:
        yield f"{', '.join(named)}: is not planned for yet; leave it out here, only training takes it"
    if file.zero_optimization.zero_hpz_partition_size > 1 and (size := grid.size("pp", "tp")) > 1:
        yield f"{_HPZ}: got more than 1 with pp x tp {size}; keep one of the two"
    if file.tensor_parallel.reduce == "tree" and file.zero.reduce != "tree":
        yield (
            f"tensor_parallel.reduce: got 'tree' with zero.reduce '{file.zero.reduce}', whose norms, and on other data "
            "ranks gradients, have other bits; set zero.reduce to 'tree', too"
        )
    if file.zero.reduce == "tree" and file.expert_parallel.enabled and (size := grid.size("ep")) > 1:
        yield f"zero.reduce: got 'tree' with ep {size}, and gradients of experts have another order of sums; use 'auto'"
    if file.tensor_parallel.broadcast_batch and grid.size("pp") > 1:
        yield "tensor_parallel.broadcast_batch: is not there for stages of a pipeline, which read batches themselves"


def fused(file: File) -> Iterator[str]:
    """Rules about weights in which several are fused: one dim says how many, or their sizes; the other is -1."""
    for at, spec in enumerate(file.tensor_parallel.partition_config.layer_specs):
        kind, shape, dim = spec.partition_type, spec.shape, int(spec.partition_type != "column")
        where = f"tensor_parallel.partition_config.layer_specs[{at}]"
        if shape is not None and spec.partition_dim not in (None, dim):
            yield f"{where}.partition_dim: got {spec.partition_dim}, wanted {dim}, the dim of a {kind}"
        elif shape is not None and (len(shape) != 2 or shape[1 - dim] != -1 or shape[dim] in (0, [])):
            wanted = "[-1, 3] or [-1, [64, 16, 16]]" if dim else "[3, -1] or [[64, 16, 16], -1]"
            yield f"{where}.shape: got {shape}, wanted two entries as in {wanted} for a {kind}"


def pipelines(file: File, grid: Grid, steps: int | None) -> Iterator[str]:
    """Rules about layers that are divided among ranks; `steps`: micro-batches of a step, where that is known."""
    section = file.pipeline
    if section.micro_batches is not None and section.split_size is not None:
        yield "pipeline: got micro_batches and split_size, each of which says how many there are; keep one of the two"
    if section.micro_batches is not None and steps and steps % section.micro_batches:
        yield (
            f"pipeline.micro_batches: got {section.micro_batches}, which does not divide gradient_accumulation_steps "
            f"{steps}; leave one of the two out"
        )
    if section.stages_per_rank not in (None, wanted := STYLES[section.schedule].per_rank) and wanted:
        yield f"pipeline.stages_per_rank: got {section.stages_per_rank}, and {section.schedule} has {wanted}"
    if "stages" in section.model_fields_set and grid.size("pp") > 1:
        if not file.managed_gradient_accumulation:
            yield "managed_gradient_accumulation: got false with pipeline.stages; a schedule knows its micro-batches"
        if file.zero.recompute.modules and file.zero.recompute.policy == "auto":
            yield (
                "zero.recompute.policy: got 'auto' with pipeline.stages, of which it does not count the micro-batches "
                "that are alive; say 'full' or 'selective'"
            )
        if file.flops_profiler.enabled and section.schedule in SPLIT:
            yield f"flops_profiler.enabled: torch counts no backward in two parts, as {section.schedule} has; take 1f1b"


def sharding(file: File, world_size: int) -> Iterator[str]:
    """Rules about the stage, offload, and groups of ranks smaller than the world."""
    zero = file.zero_optimization
    if zero.offload_optimizer.device != "none" and zero.stage == 0:
        yield (
            f"zero_optimization.offload_optimizer.device: got '{zero.offload_optimizer.device}' with "
            "zero_optimization.stage 0, where every rank keeps and updates all state; set the stage to 1, 2 or 3"
        )
    if zero.offload_optimizer.device == "none" and zero.offload_optimizer.zero.update == "gpu":
        yield (
            "zero_optimization.offload_optimizer.zero.update: got 'gpu' with offload_optimizer.device 'none', where "
            "state is on the device and updated there; leave it out, or set the device to 'cpu' or 'nvme'"
        )
    if zero.offload_param.device != "none" and zero.stage < 3:
        yield (
            f"zero_optimization.offload_param.device: got '{zero.offload_param.device}' with zero_optimization.stage "
            f"{zero.stage}, which keeps whole parameters on the device; set the stage to 3, or leave offload_param out"
        )
    sizes, hpz = file.shard_sizes, zero.zero_hpz_partition_size
    if len(set(sizes.values())) > 1:
        yield f"{' and '.join(sizes)}: got {' and '.join(map(str, sizes.values()))} for one size; keep one of them"
    for key, size in sizes.items():
        if zero.stage == 0:
            yield (
                f"{key}: got {size} with zero_optimization.stage 0, where every rank keeps all state; set the stage to "
                "1, 2 or 3, or leave it out"
            )
        yield from indivisible(key, size, world_size)
        if size % file.sequence_parallel_size:
            yield f"{key}: got {size}, wanted a multiple of sequence_parallel_size {file.sequence_parallel_size}"
    if hpz > 1 and zero.stage < 3:
        yield (
            f"{_HPZ}: got {hpz} with zero_optimization.stage {zero.stage}, which keeps whole parameters on every "
            "rank; set the stage to 3, or leave it out"
        )
    for key, size in sizes.items() if hpz > 1 else ():
        yield f"{_HPZ}: got {hpz} with {key} {size}; it is for state that is cut over all ranks, keep one of the two"
    yield from indivisible(_HPZ, hpz, world_size)


def quantized(file: File) -> Iterator[str]:
    """Rules about messages in 8 bits."""
    zero, key = file.zero_optimization, "zero_optimization.zero_quantized_"
    weights, gradients = key + "weights", key + "gradients"
    if zero.zero_quantized_weights and zero.stage < 3:
        yield (
            f"{weights}: got true with zero_optimization.stage {zero.stage}, where parameters are not gathered for "
            "their use; set the stage to 3, or leave it out"
        )
    if not zero.zero_quantized_gradients:
        return
    if zero.stage == 0:
        yield (
            f"{gradients}: got true with zero_optimization.stage 0, where every rank needs the whole sum; set the "
            "stage to 1, 2 or 3, or leave it out"
        )
    if file.zero.reduce == "tree":
        yield f"{gradients}: got true with zero.reduce 'tree', whose sum no world size changes; keep one of the two"
    if file.communication_data_type is not None:
        yield (
            f"{gradients}: got true with communication_data_type '{file.communication_data_type}', another form of "
            "what travels; keep one of the two"
        )


def indivisible(key: str, size: int, world_size: int) -> Iterator[str]:
    """Why `size` ranks cannot be equal parts of the world."""
    if world_size % size:
        divisors = [str(count) for count in range(1, world_size + 1) if world_size % count == 0]
        yield f"{key}: got {size}, wanted a divisor of world size {world_size}: {', '.join(divisors)}"
