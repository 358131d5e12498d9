"""The modules of DeepSpeed that are names alone: where each of them lives, which is looked up when it is first used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Names(NamedTuple):
    """Of one module; see `finder` for homes and refused. modules: those below it."""

    homes: Mapping[str, str] = {}
    refused: tuple[str, ...] = ()
    modules: str = ""


def names_from(home: str, names: str) -> dict[str, str]:
    """Names and the module that has them."""
    return dict.fromkeys(names.split(), home)


_HELPERS, _FUSED = "deepspeed._helpers", "deepspeed._optimizers"
_OPTIMIZERS, _CUT = "deepspeed.runtime.base_optimizer", "deepspeed.runtime.zero.partition_parameters"
_ZERO = "register_external_parameter unregister_external_parameter TiledLinear"
_ULYSSES = "UlyssesSPAttentionHF UlyssesSPDataLoaderAdapter"
_SHARING = "_get_sequence_parallel_group _get_sequence_parallel_rank _get_sequence_parallel_world_size"
_AXES, _WHAT = ("data", "model", "tensor_model"), ("group", "rank", "world_size", "src_rank")
_GROUPS = {f"get_{axis}_parallel_{what}": _HELPERS for axis in _AXES for what in _WHAT}
_GROUPS |= {f"_{name}": f"{_HELPERS}:{name}" for name in _GROUPS if "tensor" not in name and "src" not in name}
_SECTIONS = {"": "ZeroOptimization", "OffloadOptimizer": "OffloadOptimizer", "OffloadParam": "OffloadParam"}
_LAYERS = names_from("zero.engine.pipeline_module", "PipelineModule LayerSpec TiedLayerSpec")
_TOPOLOGIES = "ProcessTopology PipeDataParallelTopology PipeModelDataParallelTopology PipelineParallelGrid"
_SCHEDULES = "LRRangeTest OneCycle WarmupLR WarmupDecayLR WarmupCosineLR"
_UTILS = "see_memory_usage set_random_seed move_to_device clip_grad_norm_ is_model_parallel_parameter"
_RECOMPUTING = "checkpoint configure get_cuda_rng_tracker is_configured model_parallel_cuda_manual_seed "
_RECOMPUTING += "non_reentrant_checkpoint reset"

MODULES = {
    "checkpoint": Names(modules="utils"),
    "checkpoint.utils": Names(names_from(_HELPERS, "clone_tensors_for_torch_save"), ("get_model_ckpt_name_for_rank",)),
    "compression": Names(modules="helper"),
    "compression.helper": Names(names_from(_HELPERS, "recursive_getattr recursive_setattr")),
    "git_version_info": Names(names_from(_HELPERS, "torch_info version")),
    "launcher": Names(modules="runner"),
    "launcher.runner": Names(names_from(_HELPERS, "DEEPSPEED_ENVIRONMENT_NAME PDSH_MAX_FAN_OUT")),
    "module_inject": Names(modules="layers tp_shard"),
    "module_inject.layers": Names(
        names_from(_HELPERS, "is_autotp_training_mode set_autotp_mode"), ("LinearAllreduce", "LinearLayer")
    ),
    "module_inject.tp_shard": Names(names_from(_HELPERS, "get_shard_size_list")),
    "moe": Names(modules="layer utils"),
    "moe.layer": Names(names_from("zero.compat.moe", "MoE")),
    "moe.utils": Names(
        names_from(_HELPERS, "is_moe_param split_params_into_different_moe_groups_for_optimizer")
        | names_from("zero.compat.moe", "has_moe_layers")
    ),
    "ops": Names({"__compatible_ops__": "deepspeed.ops.op_builder"}, (), "adam adagrad aio lamb lion op_builder"),
    "ops.adam": Names(names_from(_FUSED, "DeepSpeedCPUAdam FusedAdam")),
    "ops.adagrad": Names(names_from(_FUSED, "DeepSpeedCPUAdagrad")),
    "ops.aio": Names({"AsyncIOBuilder": "deepspeed.ops.op_builder"}),
    "ops.lamb": Names(names_from(_FUSED, "FusedLamb")),
    "ops.lion": Names(names_from(_FUSED, "DeepSpeedCPULion FusedLion")),
    "pipe": Names(_LAYERS, ("DualPipeVModule",)),
    "profiling": Names(modules="flops_profiler"),
    "runtime": Names(
        modules="activation_checkpointing base_optimizer bf16_optimizer checkpoint_engine config engine fp16 "
        "lr_schedules pipe sequence_parallel utils zero"
    ),
    "runtime.activation_checkpointing": Names(modules="checkpointing"),
    "runtime.activation_checkpointing.checkpointing": Names(names_from("zero.checkpointing", _RECOMPUTING)),
    "runtime.base_optimizer": Names({"ZeROOptimizer": f"{_OPTIMIZERS}:DeepSpeedOptimizer"}),
    "runtime.bf16_optimizer": Names(names_from(_OPTIMIZERS, "BF16_Optimizer")),
    "runtime.checkpoint_engine": Names(modules="torch_checkpoint_engine"),
    "runtime.checkpoint_engine.torch_checkpoint_engine": Names(refused=("TorchCheckpointEngine",)),
    "runtime.config": Names({"DeepSpeedConfigError": "zero.config:ConfigError"}),
    "runtime.fp16": Names(modules="fused_optimizer unfused_optimizer"),
    "runtime.fp16.fused_optimizer": Names(names_from(_OPTIMIZERS, "FP16_Optimizer")),
    "runtime.fp16.unfused_optimizer": Names({"FP16_UnfusedOptimizer": f"{_OPTIMIZERS}:FP16_Optimizer"}),
    "runtime.lr_schedules": Names(names_from("zero.optim.lr", _SCHEDULES)),
    "runtime.pipe": Names(_LAYERS, ("DualPipeVModule",), "engine module topology"),
    "runtime.pipe.engine": Names(names_from("deepspeed.runtime.engine", "PipelineEngine")),
    "runtime.pipe.module": Names(_LAYERS),
    "runtime.pipe.topology": Names(names_from("zero.parallel.pipeline.topology", f"{_TOPOLOGIES} _prime_factors")),
    "runtime.sequence_parallel": Names(modules="ulysses_sp"),
    "runtime.sequence_parallel.ulysses_sp": Names(names_from("zero.compat.ulysses", _ULYSSES)),
    "runtime.utils": Names(names_from(_HELPERS, _UTILS)),
    "runtime.zero": Names(
        names_from(_CUT, "Init GatheredParameters ZeroParamStatus") | names_from("zero", _ZERO),
        (),
        "config offload_config partition_parameters stage3 stage_1_and_2 utils",
    ),
    "runtime.zero.config": Names(
        {f"DeepSpeedZero{name}Config": f"zero.config.zero_section:{home}" for name, home in _SECTIONS.items()}
    ),
    "runtime.zero.stage3": Names(names_from(_OPTIMIZERS, "DeepSpeedZeroOptimizer_Stage3")),
    "runtime.zero.stage_1_and_2": Names(names_from(_OPTIMIZERS, "DeepSpeedZeroOptimizer")),
    "runtime.zero.utils": Names(names_from(_HELPERS, "ZeRORuntimeException")),
    "sequence": Names(modules="layer"),
    "sequence.layer": Names(refused=("DistributedAttention", "_SeqAllToAll")),
    "utils": Names(
        names_from(_HELPERS, "logger log_dist") | {"RepeatingLoader": "zero", "is_initialized": "deepspeed.comm"},
        modules="groups logging timer torch zero_to_fp32",
    ),
    "utils.groups": Names(names_from(_HELPERS, _SHARING) | _GROUPS),
    "utils.logging": Names(names_from(_HELPERS, "logger log_dist")),
    "utils.timer": Names(names_from("zero.engine.script_timers", "SynchronizedWallClockTimer ThroughputTimer")),
    "utils.torch": Names(names_from(_HELPERS, "required_torch_version")),
}
"""By their paths below `deepspeed`; whatever is not here and in no file of its own is not in zero."""
