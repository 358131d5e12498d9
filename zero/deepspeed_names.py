"""What to use in place of names of DeepSpeed that are not here: the one table, for zero, its engine and the adapter."""

from __future__ import annotations

from collections.abc import Mapping

_EXPERTS = "experts are not divided among ranks yet: every rank trains every expert of a model of Transformers"
_LAYERS = "the section tensor_parallel of the JSON, by which initialize() cuts layers"
_STAGES = "pipeline.stages in the JSON, or loss_fn of initialize(); else engine(...), engine.backward and engine.step"
_LOADS = "every checkpoint loads at any world size and stage by itself"
_OWN_FILES = "checkpoints of zero have no such file; client state comes from engine.load_checkpoint"
_NOT_BUILT = "the feature that it steers is not in zero; leave it out"
_DECIDES = "the JSON decides: what there is a key for needs no module of its own"
_CALLS_ENGINE = "the methods of the engine, which has no part with this name"
_TRAINS = "zero trains; engine.generate writes texts with what it trains, and serving is for others"
_SCHEDULES = "`pipeline.schedule` of the JSON, and zero.plan.pipeline.Schedule, which has what each rank does"
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
    "deepspeed.OnDevice": "zero.Init, or torch.device as a context",
    "deepspeed.DeepSpeedHybridEngine": "engine.generate",
    "deepspeed.runtime.zero.MiCS_Init": "`mics_shard_size` of the JSON; deepspeed.zero.Init does for it",
    "deepspeed.runtime.zero.unwrap_model_for_generation": "engine.gathered_for_generation()",
    "deepspeed.runtime.zero.TiledLinearReturnBias": "deepspeed.zero.TiledLinear",
    "deepspeed.ops.aio.AsyncIOHandle": "`offload_param` and `offload_optimizer` with device nvme",
    "deepspeed.launcher.runner.main": "the command `zero run`",
    "deepspeed.checkpoint.DeepSpeedCheckpoint": _LOADS,
    "deepspeed.autotuning": "the command `zero tune`",
    "deepspeed.compile": "engine.compile()",
    "deepspeed.compression.compress": "PEFT and torchao; quantized and pruned layers are not in zero",
    "deepspeed.elasticity": "start with the ranks that there are: " + _LOADS,
    "deepspeed.env_report": "the commands `zero report` and `zero doctor`",
    "deepspeed.inference": _TRAINS,
    "deepspeed.InferenceEngine": _TRAINS,
    "deepspeed.model_implementations": _TRAINS,
    "deepspeed.io": "engine.save_checkpoint, which writes beside the loop",
    "deepspeed.linear": "PEFT: LoRA over packed weights trains as it is",
    **{
        f"deepspeed.module_inject{name}": _LAYERS
        for name in (".auto_tp", ".autotp_config", ".layers.LinearAllreduce", ".layers.LinearLayer", ".replace_module")
    },
    "deepspeed.moe.layer.MoE": _EXPERTS,
    "deepspeed.moe.sharded_moe": _EXPERTS,
    "deepspeed.monitor": "engine.monitor, and tensorboard, wandb, csv_monitor and comet of the JSON",
    "deepspeed.nebula": "engine.save_checkpoint, which writes beside the loop",
    "deepspeed.datastates": "engine.save_checkpoint, which writes beside the loop",
    "deepspeed.nvme": "nothing: `fio` measures a drive",
    **dict.fromkeys(("deepspeed.pipe.DualPipeVModule", "deepspeed.runtime.pipe.DualPipeVModule"), _SCHEDULES),
    "deepspeed.sequence.layer.DistributedAttention": "zero.attention, and `sequence_parallel_size` of the JSON",
    "deepspeed.add_tuning_arguments": "the section `scheduler` of the JSON",
    "deepspeed.profiling.flops_profiler.FlopsProfiler": "get_model_profile there, or `flops_profiler` of the JSON",
    "deepspeed.accelerator.abstract_accelerator": "deepspeed.accelerator.TorchAccelerator",
    "deepspeed.accelerator.real_accelerator": "deepspeed.accelerator.get_accelerator",
    "deepspeed.accelerator.set_accelerator": "CUDA_VISIBLE_DEVICES; the device is the GPU of this rank, or the CPU",
    "deepspeed.checkpoint.constants": _OWN_FILES,
    "deepspeed.checkpoint.ds_to_universal": _LOADS,
    "deepspeed.checkpoint.universal_checkpoint": _LOADS,
    "deepspeed.checkpoint.deepspeed_checkpoint": _LOADS,
    "deepspeed.comm.comm": "deepspeed.comm, where all of it is",
    "deepspeed.comm.reduce_op": "deepspeed.comm.ReduceOp",
    "deepspeed.comm.torch": "deepspeed.comm",
    "deepspeed.comm.get_all_ranks_from_group": "torch.distributed.get_process_group_ranks",
    "deepspeed.launcher.launch": "the command `zero run`",
    "deepspeed.ops.adam.cpu_adam": "deepspeed.ops.adam",
    "deepspeed.ops.adam.fused_adam": "deepspeed.ops.adam",
    "deepspeed.ops.adagrad.cpu_adagrad": "deepspeed.ops.adagrad",
    "deepspeed.ops.lamb.fused_lamb": "deepspeed.ops.lamb",
    "deepspeed.ops.lion.cpu_lion": "deepspeed.ops.lion",
    "deepspeed.ops.lion.fused_lion": "deepspeed.ops.lion",
    "deepspeed.ops.transformer": _TRAINS,
    **{
        f"deepspeed.{name}": _NOT_BUILT
        for name in (
            *("compression.basic_layer", "ops.deepspeed4science", "ops.fp_quantizer", "ops.gds", "ops.quantizer"),
            *("ops.random_ltd", "ops.sparse_attention", "runtime.comm", "runtime.compression", "runtime.data_pipeline"),
            *("runtime.eigenvalue", "runtime.fp16.onebit", "runtime.progressive_layer_drop", "runtime.quantize"),
            *("runtime.sparse_tensor", "runtime.weight_quantizer", "runtime.zenflow"),
        )
    },
    "deepspeed.moe.experts": _EXPERTS,
    "deepspeed.profiling.flops_profiler.profiler": "deepspeed.profiling.flops_profiler.get_model_profile",
    "deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine.TorchCheckpointEngine": "engine.save_checkpoint",
    "deepspeed.runtime.fp16.loss_scaler": "engine.optimizer.loss_scaler",
    "deepspeed.runtime.precision_config": "deepspeed.DeepSpeedConfig, which has the sections fp16 and bf16",
    "deepspeed.runtime.state_dict_factory": "zero.load_weights",
    "deepspeed.runtime.torch_autocast": "`torch_autocast` of the JSON",
    "deepspeed.runtime.zero.linear": "torch.nn.Linear, which keeps no gathered weight here",
    "deepspeed.runtime.config_utils": "zero.config",
    "deepspeed.runtime.compiler": "engine.compile() and engine.is_compiled",
    "deepspeed.runtime.dataloader": "deepspeed.utils.RepeatingLoader, and engine.deepspeed_io",
    "deepspeed.runtime.hybrid_engine": "engine.generate",
    **dict.fromkeys(("engine._INSTRUCTION_MAP", "deepspeed.runtime.pipe.schedule"), _SCHEDULES),
    "deepspeed.runtime.rollout": "engine.generate and engine.stream_weights",
    "deepspeed.runtime.sequence_parallel.ulysses_sp.TiledMLP": "zero.tile_mlp",
    "deepspeed.runtime.sequence_parallel.ulysses_sp.TiledFusedLogitsLoss": "zero.tile_loss",
    "deepspeed.runtime.swap_tensor": _DECIDES,
    "deepspeed.runtime.superoffload": _DECIDES,
    "deepspeed.runtime.tensor_parallel": _LAYERS,
    "deepspeed.runtime.domino": _LAYERS,
    "deepspeed.runtime.zero.mics": "`mics_shard_size` of the JSON; deepspeed.zero.Init does for it",
    "deepspeed.runtime.zero.parameter_offload": _CALLS_ENGINE,
    "deepspeed.runtime.zero.tiling": "deepspeed.zero.TiledLinear",
    "deepspeed.utils.tensor_fragment": "deepspeed.utils, where the functions safe_get_... and safe_set_... are",
    "deepspeed.utils.z3_leaf_module": "deepspeed.utils, where these functions are",
    "deepspeed.utils.nvtx": "torch.profiler",
    "deepspeed.utils.init_on_device": "zero.Init, or torch.device as a context",
    "deepspeed.utils.OnDevice": "zero.Init, or torch.device as a context",
    "deepspeed.utils.comms_logging": "`comms_logger` of the JSON, and engine.log_comms_summary()",
    "deepspeed.utils.instrument_w_nvtx": "torch.profiler",
    "deepspeed.checkpoint.utils.get_model_ckpt_name_for_rank": _OWN_FILES,
    "deepspeed.utils.zero_to_fp32.get_model_state_file": _OWN_FILES,
    "deepspeed.utils.zero_to_fp32.get_optim_files": _OWN_FILES,
    "engine.train_batch": _STAGES,
    "engine.eval_batch": _STAGES,
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
