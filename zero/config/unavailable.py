"""What the config knows and this release does not do.

A later release deletes rows here and changes nothing else.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple


class Unavailable(NamedTuple):
    """A key that is an error once it is switched on."""

    path: str  # dotted, in canonical names
    on: Callable[[Any], bool]  # sees the value that the file gives, None where it gives none
    message: str  # what is missing, and what to do instead


class Idle(NamedTuple):
    """Keys that are accepted and change nothing."""

    why: str
    paths: tuple[str, ...]


def true(value: Any) -> bool:
    """Switched on by `true`."""
    return value == 1  # which true is, and which JSON people write for it


def false(value: Any) -> bool:
    """Switched on by `false`, because the default is true."""
    return value == 0


def given(value: Any) -> bool:
    """Switched on by anything but an empty value."""
    return value not in (None, False, {}, [])


def above(limit: float) -> Callable[[Any], bool]:
    """Switched on by a number above `limit`."""
    return lambda value: isinstance(value, int | float) and value > limit


def enabled(value: Any) -> bool:
    """Switched on by an `enabled: true` anywhere inside."""
    if not isinstance(value, Mapping):
        return False
    return true(value.get("enabled")) or any(enabled(inner) for inner in value.values())


_ZERO = "zero_optimization"
_MONITOR = "is not available in this release; log the loss in the training loop"
_PLUS = "ZeRO++ is not available in this release; leave it out"
_MODEL = "is not available in this release; only data parallelism is"
_ONE_GATHER = "another way to gather is not available in this release; leave it out"

UNAVAILABLE: tuple[Unavailable, ...] = (
    Unavailable("fp16.fp16_master_weights_and_grads", true, "masters are exact fp32 here; leave it out"),
    Unavailable(
        "bf16.bf16_master_weights_and_grads", true, "masters are exact here; optimizer.params.zero.master says how"
    ),
    Unavailable("bf16.bf16_optimizer_states", true, "set optimizer.params.zero.moments to 'bf16' instead"),
    Unavailable("amp", enabled, "apex amp is not available; use bf16"),
    Unavailable("msamp", enabled, "MS-AMP is not available; use bf16"),
    Unavailable("sparse_gradients", true, "is not available in this release; gradients are dense"),
    Unavailable("graph_harvesting", true, "CUDA graphs are not available in this release; leave it out"),
    Unavailable("optimizer.legacy_fusion", true, "is not available; leave it out"),
    Unavailable(
        "optimizer.params.fp32_optimizer_states",
        false,
        "set optimizer.params.zero.moments to 'bf16' or '8bit' instead",
    ),
    Unavailable(f"{_ZERO}.offload_optimizer.super_offload", true, "is not available; leave it out"),
    Unavailable(
        f"{_ZERO}.ignore_unused_parameters",
        false,
        "parameters without a gradient are always allowed here; leave it out",
    ),
    Unavailable(f"{_ZERO}.legacy_stage1", true, "is gone from DeepSpeed too; leave it out"),
    Unavailable(f"{_ZERO}.stage3_use_all_reduce_for_fetch_params", true, _ONE_GATHER),
    Unavailable(f"{_ZERO}.stage3_allgather_sequential", true, _ONE_GATHER),
    Unavailable(f"{_ZERO}.zero_quantized_weights", true, _PLUS),
    Unavailable(f"{_ZERO}.zero_quantized_nontrainable_weights", true, _PLUS),
    Unavailable(f"{_ZERO}.zero_quantized_gradients", true, _PLUS),
    Unavailable(f"{_ZERO}.zeropp_loco_param", given, _PLUS),
    Unavailable(f"{_ZERO}.save_muon_momentum_buffer_in_memory", true, "is not available; leave it out"),
    Unavailable(f"{_ZERO}.zenflow", given, "ZenFlow is not available; leave it out"),
    Unavailable("aio.use_gds", true, "GPUDirect is not available; what is read goes through host memory"),
    Unavailable("checkpoint.load_universal", true, "DeepSpeed's universal checkpoints are not available; leave it out"),
    Unavailable("checkpoint.use_node_local_storage", true, "is not available in this release; use a shared folder"),
    Unavailable("checkpoint.parallel_write.pipeline_stage", true, "is not available; leave it out"),
    Unavailable("checkpoint.writer", given, "DeepSpeed's writers are not available; leave it out"),
    Unavailable("nebula", enabled, "is not available; leave it out"),
    Unavailable("datastates_ckpt", given, "is not available; leave it out"),
    Unavailable("tensorboard.enabled", true, _MONITOR),
    Unavailable("wandb.enabled", true, _MONITOR),
    Unavailable("csv_monitor.enabled", true, _MONITOR),
    Unavailable("comet", enabled, _MONITOR),
    Unavailable("comms_logger.enabled", true, "is not available in this release; use torch.profiler"),
    Unavailable("flops_profiler.enabled", true, "is not available in this release; use torch.profiler"),
    Unavailable("pipeline", given, _MODEL),
    Unavailable("tensor_parallel.autotp_size", above(1), _MODEL),
    Unavailable("tensor_parallel.tp.tp_size", above(1), _MODEL),
    Unavailable("sequence_parallel_size", above(1), _MODEL),
    Unavailable("expert_parallel", enabled, _MODEL),
    Unavailable("use_data_before_expert_parallelism", true, _MODEL),
    Unavailable("compile.deepcompile", true, "DeepCompile is not available; leave it out"),
    Unavailable("elasticity", enabled, "is not available in this release; set train_batch_size"),
    Unavailable("autotuning", enabled, "is not available; leave it out"),
    Unavailable("hybrid_engine", enabled, "is not available; leave it out"),
    Unavailable("progressive_layer_drop", enabled, "is not available; leave it out"),
    Unavailable("data_efficiency", enabled, "is not available; leave it out"),
    Unavailable("curriculum_learning", enabled, "is not available; leave it out"),
    Unavailable("compression_training", enabled, "is not available; leave it out"),
    Unavailable("quantize_training", enabled, "is not available; leave it out"),
    Unavailable("weight_quantization", given, "is not available; leave it out"),
    Unavailable("sparse_attention", given, "is not available; leave it out"),
)

IDLE: tuple[Idle, ...] = (
    Idle(
        "the units decide what is reduced and gathered together",
        tuple(
            f"{_ZERO}.{key}"
            for key in (
                "contiguous_gradients",
                "reduce_scatter",
                "reduce_bucket_size",
                "use_multi_rank_bucket_allreduce",
                "allgather_partitions",
                "allgather_bucket_size",
                "overlap_comm",
                "sub_group_size",
                "round_robin_gradients",
                "stage3_module_granularity_threshold",
            )
        ),
    ),
    Idle("the backend decides how a gather crosses machines", (f"{_ZERO}.mics_hierarchical_params_gather",)),
    Idle("not used yet", ("timers",)),
    Idle(
        "every rank reads its own part of a checkpoint, of any world size",
        (f"{_ZERO}.elastic_checkpoint", f"{_ZERO}.pipeline_loading_checkpoint"),
    ),
    Idle("a tag that differs between ranks is an error on all of them", ("checkpoint.tag_validation",)),
    Idle("blocks go to the drive together, while others are on their way", ("aio.single_submit", "aio.overlap_events")),
    Idle(
        "there is nothing to set here",
        (
            f"{_ZERO}.offload_optimizer.fast_init",
            f"{_ZERO}.offload_optimizer.cpuadam_cores_perc",
            f"{_ZERO}.offload_param.buffer_size",
            f"{_ZERO}.memory_efficient_linear",
            f"{_ZERO}.override_module_apply",
            f"{_ZERO}.log_trace_cache_warnings",
            f"{_ZERO}.enable_sanity_checks",
            "bf16.immediate_grad_update",
            "torch_autocast.lower_precision_safe_modules",
            "checkpoint.checkpoint_serialization",
            "zero_force_ds_cpu_optimizer",
            "seq_parallel_communication_data_type",
            "data_parallel_size",
            "disable_allgather",
            "vocabulary_size",
        ),
    ),
)


def moves_only(path: tuple[str, ...]) -> bool:
    """Whether a key says at most what moves when, so that its default gives the same numbers in the same places."""
    name = ".".join(map(str, path))
    return name.startswith(f"{_ZERO}.stage3_") or any(name in row.paths or path[0] in row.paths for row in IDLE)


def lookup(values: Mapping[str, Any], path: str) -> Any:
    """The value at a dotted path, or None where there is none."""
    here: Any = values
    for part in path.split("."):
        if not isinstance(here, Mapping) or part not in here:
            return None
        here = here[part]
    return here


def unavailable(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The path and the message of everything in `values` that is switched on and not available."""
    return [(row.path, row.message) for row in UNAVAILABLE if row.on(lookup(values, row.path))]


def idle(values: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
    """The keys of `values` that change nothing, with the reason, grouped by it."""
    found = [(row.why, [path for path in row.paths if lookup(values, path) is not None]) for row in IDLE]
    return [(why, paths) for why, paths in found if paths]
