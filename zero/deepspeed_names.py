"""What to use in place of names of DeepSpeed that are not here: the one table, for zero, its engine and the adapter."""

from __future__ import annotations

from collections.abc import Mapping

_ONE_KIND = "zero has data parallelism only"
_LOADS = "every checkpoint loads at any world size and stage by itself"
_OWN_FILES = "checkpoints of zero have no such file; client state comes from engine.load_checkpoint"
_TIMES = '"wall_clock_breakdown": true in the JSON'
_NOT_BUILT = "the feature that it steers is not in zero; leave it out"
_INSIDE = "zero keeps its state in another way: zero.utils.safe_get_full_fp32_param and its like read and write it"

INSTEAD: Mapping[str, str] = {
    "deepspeed.zero": "what is in deepspeed.zero there is in zero itself here: zero.Init, zero.GatheredParameters",
    "deepspeed.DeepSpeedEngine": "zero.Engine",
    "deepspeed.comm": "torch.distributed, and zero.init_distributed",
    "deepspeed.dist": "torch.distributed",
    "deepspeed.get_accelerator": "torch.accelerator",
    "deepspeed.ops": "zero.FusedOptimizer",
    "deepspeed.runtime": "zero.engine, zero.optim and zero.utils",
    "deepspeed.logger": "logging.getLogger('zero')",
    "deepspeed.log_dist": "logging, where torch.distributed.get_rank() is 0",
    "deepspeed.init_inference": "engine.generate, with the engine in eval",
    "deepspeed.tp_model_init": _ONE_KIND,
    "deepspeed.PipelineModule": _ONE_KIND,
    "deepspeed.PipelineEngine": _ONE_KIND,
    "deepspeed.OnDevice": "zero.Init, or torch.device as a context",
    "deepspeed.DeepSpeedHybridEngine": "engine.generate",
    "deepspeed.runtime.zero.MiCS_Init": "`mics_shard_size` of the JSON; deepspeed.zero.Init does for it",
    "deepspeed.runtime.zero.unwrap_model_for_generation": "engine.gathered_for_generation()",
    "deepspeed.runtime.zero.TiledLinearReturnBias": "deepspeed.zero.TiledLinear",
    "deepspeed.ops.aio.AsyncIOHandle": "`offload_param` and `offload_optimizer` with device nvme",
    "deepspeed.launcher.runner.main": "the command `zero run`",
    "deepspeed.checkpoint.DeepSpeedCheckpoint": _LOADS,
    "deepspeed.profiling": "`flops_profiler` of the JSON",
    "deepspeed.utils.groups": "torch.distributed.new_group; zero has data parallelism only",
    "deepspeed.utils.instrument_w_nvtx": "torch.profiler",
    "deepspeed.utils.zero_to_fp32.get_model_state_file": _OWN_FILES,
    "deepspeed.utils.zero_to_fp32.get_optim_files": _OWN_FILES,
    "engine.timers": _TIMES,
    "engine.tput_timer": _TIMES,
    "engine.loaded_checkpoint_dp_world_size": _LOADS,
    "engine.set_data_post_process_func": _NOT_BUILT,
    "engine.set_custom_curriculum_learning_schedule": _NOT_BUILT,
    "engine.get_pld_theta": _NOT_BUILT,
    "engine.register_compile_pass": "engine.compile() compiles each block as it is",
    "optimizer.optimizer": "there is no inner optimizer; this is the one that trains",
    "optimizer.bit16_groups": _INSIDE,
    "optimizer.fp16_groups": _INSIDE,
    "optimizer.dp_process_group": "torch.distributed.group.WORLD, or the group of the mesh that initialize() was given",
    "optimizer.parameter_offload": _INSIDE,
}


def instead(name: str) -> str:
    """The end of a sentence that says that `name`, such as "engine.monitor", is not there; empty for other names."""
    return f", which is DeepSpeed's; instead: {INSTEAD[name]}" if name in INSTEAD else ""
