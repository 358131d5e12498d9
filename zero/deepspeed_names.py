"""What to use in place of names of DeepSpeed that are not here: the one table, for zero, its engine and the adapter."""

from __future__ import annotations

from collections.abc import Mapping

_LOADS = "every checkpoint loads at any world size and stage by itself"

# What to use, and in place of which names; those of `deepspeed` without that word.
_NAMES = {
    "what is in deepspeed.zero there is in zero itself here: zero.Init, zero.GatheredParameters": "zero",
    "zero.Engine": "DeepSpeedEngine",
    "torch.distributed, and zero.init_distributed": "comm",
    "torch.distributed": "dist",
    "torch.accelerator": "get_accelerator",
    "zero.FusedOptimizer": "ops",
    "zero.engine, zero.optim and zero.utils": "runtime",
    "logging.getLogger('zero')": "logger",
    "logging, where torch.distributed.get_rank() is 0": "log_dist",
    "engine.generate, with the engine in eval": "init_inference",
    "zero.Init, or torch.device as a context": "OnDevice utils.init_on_device utils.OnDevice",
    "engine.generate": "DeepSpeedHybridEngine runtime.hybrid_engine",
    "`mics_shard_size` of the JSON; deepspeed.zero.Init does for it": "runtime.zero.MiCS_Init runtime.zero.mics",
    "engine.gathered_for_generation()": "runtime.zero.unwrap_model_for_generation",
    "deepspeed.zero.TiledLinear": "runtime.zero.TiledLinearReturnBias runtime.zero.tiling",
    "`offload_param` and `offload_optimizer` with device nvme": "ops.aio.AsyncIOHandle",
    "the command `zero run`": "launcher.runner.main launcher.launch",
    _LOADS: """
        checkpoint.DeepSpeedCheckpoint checkpoint.ds_to_universal checkpoint.universal_checkpoint
        checkpoint.deepspeed_checkpoint engine.loaded_checkpoint_dp_world_size
    """,
    "the command `zero tune`": "autotuning",
    "engine.compile()": "compile",
    "PEFT and torchao; quantized and pruned layers are not in zero": "compression.compress",
    "start with the ranks that there are: " + _LOADS: "elasticity",
    "the commands `zero report` and `zero doctor`": "env_report",
    "zero trains; engine.generate writes texts with what it trains, and serving is for others": (
        "inference InferenceEngine model_implementations ops.transformer"
    ),
    "engine.save_checkpoint, which writes beside the loop": "io nebula datastates",
    "PEFT: LoRA over packed weights trains as it is": "linear",
    "the section tensor_parallel of the JSON, by which initialize() cuts layers": """
        module_inject.auto_tp module_inject.autotp_config module_inject.layers.LinearAllreduce
        module_inject.layers.LinearLayer module_inject.replace_module runtime.tensor_parallel runtime.domino
    """,
    "deepspeed.moe.layer.MoE, or expert_parallel of the JSON": "moe.sharded_moe moe.experts",
    "engine.monitor, and tensorboard, wandb, csv_monitor and comet of the JSON": "monitor",
    "nothing: `fio` measures a drive": "nvme",
    "`pipeline.schedule` of the JSON, and zero.plan.pipeline.Schedule, which has what each rank does": (
        "pipe.DualPipeVModule runtime.pipe.DualPipeVModule engine._INSTRUCTION_MAP runtime.pipe.schedule"
    ),
    "zero.attention, and `sequence_parallel_size` of the JSON": "sequence.layer.DistributedAttention",
    "the section `scheduler` of the JSON": "add_tuning_arguments",
    "get_model_profile there, or `flops_profiler` of the JSON": "profiling.flops_profiler.FlopsProfiler",
    "deepspeed.accelerator.TorchAccelerator": "accelerator.abstract_accelerator",
    "deepspeed.accelerator.get_accelerator": "accelerator.real_accelerator",
    "CUDA_VISIBLE_DEVICES; the device is the GPU of this rank, or the CPU": "accelerator.set_accelerator",
    "checkpoints of zero have no such file; client state comes from engine.load_checkpoint": """
        checkpoint.constants checkpoint.utils.get_model_ckpt_name_for_rank utils.zero_to_fp32.get_model_state_file
        utils.zero_to_fp32.get_optim_files
    """,
    "deepspeed.comm, where all of it is": "comm.comm",
    "deepspeed.comm.ReduceOp": "comm.reduce_op",
    "deepspeed.comm": "comm.torch",
    "torch.distributed.get_process_group_ranks": "comm.get_all_ranks_from_group",
    "deepspeed.ops.adam": "ops.adam.cpu_adam ops.adam.fused_adam",
    "deepspeed.ops.adagrad": "ops.adagrad.cpu_adagrad",
    "deepspeed.ops.lamb": "ops.lamb.fused_lamb",
    "deepspeed.ops.lion": "ops.lion.cpu_lion ops.lion.fused_lion",
    "the feature that it steers is not in zero; leave it out": """
        compression.basic_layer ops.deepspeed4science ops.fp_quantizer ops.gds ops.quantizer ops.random_ltd
        ops.sparse_attention runtime.comm runtime.compression runtime.data_pipeline runtime.eigenvalue
        runtime.fp16.onebit runtime.progressive_layer_drop runtime.quantize runtime.sparse_tensor
        runtime.weight_quantizer runtime.zenflow engine.set_data_post_process_func
        engine.set_custom_curriculum_learning_schedule engine.get_pld_theta
    """,
    "deepspeed.profiling.flops_profiler.get_model_profile": "profiling.flops_profiler.profiler",
    "engine.save_checkpoint": "runtime.checkpoint_engine.torch_checkpoint_engine.TorchCheckpointEngine",
    "engine.optimizer.loss_scaler": "runtime.fp16.loss_scaler",
    "deepspeed.DeepSpeedConfig, which has the sections fp16 and bf16": "runtime.precision_config",
    "zero.load_weights": "runtime.state_dict_factory",
    "`torch_autocast` of the JSON": "runtime.torch_autocast",
    "torch.nn.Linear, which keeps no gathered weight here": "runtime.zero.linear",
    "zero.config": "runtime.config_utils",
    "engine.compile() and engine.is_compiled": "runtime.compiler",
    "deepspeed.utils.RepeatingLoader, and engine.deepspeed_io": "runtime.dataloader",
    "engine.generate and engine.stream_weights": "runtime.rollout",
    "zero.tile_mlp": "runtime.sequence_parallel.ulysses_sp.TiledMLP",
    "zero.tile_loss": "runtime.sequence_parallel.ulysses_sp.TiledFusedLogitsLoss",
    "the JSON decides: what there is a key for needs no module of its own": "runtime.swap_tensor runtime.superoffload",
    "the methods of the engine, which has no part with this name": "runtime.zero.parameter_offload",
    "deepspeed.utils, where the functions safe_get_... and safe_set_... are": "utils.tensor_fragment",
    "deepspeed.utils, where these functions are": "utils.z3_leaf_module",
    "torch.profiler": "utils.nvtx utils.instrument_w_nvtx",
    "`comms_logger` of the JSON, and engine.log_comms_summary()": "utils.comms_logging",
    "pipeline.stages in the JSON, or loss_fn of initialize(); else engine(...), engine.backward and engine.step": (
        "engine.train_batch engine.eval_batch"
    ),
    "engine.compile() compiles each block as it is": "engine.register_compile_pass",
    "there is no inner optimizer; this is the one that trains": "optimizer.optimizer",
    "zero keeps its state in another way: zero.utils.safe_get_full_fp32_param and its like read and write it": (
        "optimizer.bit16_groups optimizer.fp16_groups optimizer.parameter_offload"
    ),
    "torch.distributed.group.WORLD, or the group of the mesh that initialize() was given": "optimizer.dp_process_group",
}
INSTEAD: Mapping[str, str] = {
    name if name.startswith(("engine.", "optimizer.")) else f"deepspeed.{name}": text
    for text, names in _NAMES.items()
    for name in names.split()
}


def instead(name: str) -> str:
    """The end of a sentence that says that `name`, such as "engine.monitor", is not there; empty for other names."""
    return f", which is DeepSpeed's; instead: {INSTEAD[name]}" if name in INSTEAD else ""
