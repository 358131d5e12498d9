"""What DeepSpeed's engine answers, under its names: keys of the configuration, counters, sizes."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from typing import Any

import torch

from zero.core.mixed_precision import DTYPES
from zero.engine.script_timers import SynchronizedWallClockTimer, ThroughputTimer
from zero.log import rank_zero


def _key(path: str, meaning: str = "") -> Callable[[Any], Any]:
    """A method that returns a key of the configuration, None where a section above it is not there."""

    def value(self: Any) -> Any:
        return functools.reduce(lambda here, name: getattr(here, name, None), path.split("."), self._config)

    value.__doc__ = f"{meaning or 'The key'} `{path}`."
    return value


def _counter(name: str) -> property:
    """A counter of the run, which scripts may set."""

    def value(self: Any) -> int:
        if name == "skipped_steps" and self.optimizer is not None:
            self.optimizer.conclude()  # of the last step, too
        return getattr(self._status, name)

    def set_value(self: Any, number: int) -> None:
        setattr(self._status, name, number)

    return property(value, set_value, doc=f"The counter `{name}`.")


class DeepSpeedGetters:
    """Of an engine that has `_config`, `_status`, `_metrics`, `optimizer`, `module` and `world_size`."""

    global_steps = _counter("global_steps")
    global_samples = _counter("global_samples")
    micro_steps = _counter("micro_steps")
    skipped_steps = _counter("skipped_steps")

    train_batch_size = _key("train_batch_size", "Samples per optimizer step over all ranks:")
    train_micro_batch_size_per_gpu = _key("train_micro_batch_size_per_gpu", "Samples per forward on one rank:")
    gradient_accumulation_steps = _key("gradient_accumulation_steps", "Micro-batches per optimizer step:")
    zero_optimization_stage = _key("zero_optimization.stage", "The ZeRO stage, 0 to 3:")
    zero_gather_16bit_weights_on_model_save = _key("zero_optimization.stage3_gather_16bit_weights_on_model_save")
    fp16_enabled = _key("fp16.enabled", "Whether parameters are fp16:")
    bfloat16_enabled = _key("bf16.enabled", "Whether parameters are bf16:")
    tensor_parallel_config = _key("tensor_parallel", "The section")
    torch_autocast_enabled = _key("torch_autocast.enabled", "Whether the forward runs under torch.autocast:")
    gradient_clipping = _key(
        "gradient_clipping", "The largest global gradient norm that is not clipped, 0 for no clipping:"
    )
    steps_per_print = _key("steps_per_print", "Optimizer steps between progress lines, inf for none:")

    bf16_master_weights_and_gradients = _key("bf16.bf16_master_weights_and_grads")
    fp16_auto_cast = _key("fp16.auto_cast")
    fp16_master_weights_and_gradients = _key("fp16.fp16_master_weights_and_grads")
    is_sanity_checks_enabled = _key("zero_optimization.enable_sanity_checks")
    load_universal_checkpoint = _key("checkpoint.load_universal")
    scheduler_name = _key("scheduler.type")
    zenflow_config = _key("zero_optimization.zenflow")
    zero_multi_rank_bucket_allreduce = _key("zero_optimization.use_multi_rank_bucket_allreduce")
    zero_partial_offload = _key("zero_optimization.offload_optimizer.ratio")

    basic_optimizer = property(lambda self: self.optimizer, doc="The optimizer itself: it wraps no other.")
    gas_boundary_ctr = property(lambda self: self.global_steps, doc="Accumulation boundaries so far.")
    dp_world_size = property(lambda self: self._metrics.axis.size, doc="Ranks that see different samples.")
    mp_world_size = property(lambda self: self._config.grid.size("mp"), doc="Ranks that have one replica of the model.")
    seq_dp_world_size = property(lambda self: self._config.summed, doc="Ranks over which gradients are averaged.")

    @property
    def config(self) -> dict[str, Any]:
        """The configuration as it was read."""
        return self._config.raw

    @property
    def communication_data_type(self) -> torch.dtype:
        """The dtype that gradients are sent in; fp32 where nothing is said."""
        return DTYPES[self._config.communication_data_type or "fp32"]

    @property
    def local_rank(self) -> int:
        """This process among its host's, as its launcher says."""
        return int(os.environ.get("LOCAL_RANK", "0"))

    @property
    def param_names(self) -> dict[torch.nn.Parameter, str]:
        """The name of each parameter of the module."""
        return {param: name for name, param in self.module.named_parameters()}

    @functools.cached_property
    def timers(self) -> SynchronizedWallClockTimer:
        """Timers of the script's own by name; `wall_clock_breakdown` of the JSON shows the engine's phases."""
        return SynchronizedWallClockTimer()

    @functools.cached_property
    def tput_timer(self) -> ThroughputTimer:
        """Told of epochs, and of steps to be timed; `steps_per_print` shows the engine's own samples per second."""
        return ThroughputTimer(self.train_batch_size())

    def print_forward_breakdown(self, fwd_time: float) -> None:
        """Log the milliseconds of a forward, as the script has timed them."""
        rank_zero(logging.INFO, "forward: %s ms", fwd_time)

    def was_step_applied(self) -> bool:
        """Whether the last `step()` changed parameters; on a GPU this waits for it."""
        if self.optimizer is not None:
            self.optimizer.conclude()
        return self._status.step_applied

    def get_global_grad_norm(self) -> float | None:
        """L2 norm of the last step's averaged gradient before clipping; None before the first step.

        On a GPU this waits for it.
        """
        return self.optimizer.grad_norm if self.optimizer else None

    def get_batch_info(self) -> tuple[int, int, int]:
        """(train_batch_size, train_micro_batch_size_per_gpu, gradient_accumulation_steps)."""
        return self.train_batch_size(), self.train_micro_batch_size_per_gpu(), self.gradient_accumulation_steps()

    def zero_optimization(self) -> bool:
        """Whether anything is cut at all."""
        return self._config.zero_optimization.stage > 0

    def zero_optimization_partition_gradients(self) -> bool:
        """Whether reduced gradients are cut (stages 2 and 3)."""
        return self._config.zero_optimization.stage >= 2

    def zero_optimization_partition_weights(self) -> bool:
        """Whether parameters are cut between uses (stage 3)."""
        return self._config.zero_optimization.stage >= 3

    def amp_enabled(self) -> bool:
        """Always False: there is no apex here."""
        return False

    def dynamic_loss_scale(self) -> bool:
        """Whether the configuration lets the loss scale adapt by itself (fp16 only)."""
        return self._config.scales_loss and self._config.fp16.loss_scale == 0

    def loss_scale(self) -> float:
        """The loss scale of the configuration: 0 when it is dynamic, 1 outside fp16. Now: `optimizer.loss_scale`."""
        return float(self._config.fp16.loss_scale) if self._config.scales_loss else 1.0

    def torch_autocast_dtype(self) -> torch.dtype | None:
        """The dtype of torch.autocast around the forward; None where it is off."""
        return DTYPES.get(self._config.autocast_dtype)

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """The dtypes that the model computes in and that gradients add up in."""
        return DTYPES[self._config.compute_dtype], DTYPES[self._config.data_types.grad_accum_dtype or "fp32"]

    def postscale_gradients(self) -> bool:
        """Whether gradients are divided after they were added up, not before."""
        return not self._config.prescale_gradients

    def initial_dynamic_scale(self) -> int:
        """Where a dynamic loss scale starts."""
        return 2**self._config.fp16.initial_scale_power

    def zero_offload_optimizer(self) -> Any:
        """The section `offload_optimizer`; None where state rests on the device."""
        section = self._config.zero_optimization.offload_optimizer
        return section if section.device != "none" else None

    def zero_offload_param(self) -> Any:
        """The section `offload_param`; None where parameters rest on the device."""
        section = self._config.zero_optimization.offload_param
        return section if section.device != "none" else None

    def zero_use_cpu_optimizer(self) -> bool:
        """Whether the CPU updates: state rests in main memory or in files."""
        return self.zero_offload_optimizer() is not None

    def zero_cpu_offload(self) -> bool:
        """Whether state rests in main memory."""
        return self._config.zero_optimization.offload_optimizer.device == "cpu"

    def zero_nvme_offload_optimizer(self) -> bool:
        """Whether state rests in files."""
        return self._config.zero_optimization.offload_optimizer.device == "nvme"

    def optimizer_name(self) -> str | None:
        """The optimizer's type in the configuration, or its class where torch or the script has one; or None."""
        kind = getattr(getattr(self.optimizer, "shard_optimizer", None), "kind", None)
        return kind.__name__ if kind is not None else _key("optimizer.type")(self)

    def get_lr(self) -> list[float]:
        """The learning rate of each parameter group."""
        return [group.get("lr") for group in self.optimizer.param_groups] if self.optimizer else []

    def get_mom(self) -> list[Any]:
        """The momentum, or Adam's betas, of each parameter group."""
        groups = self.optimizer.param_groups if self.optimizer else []
        key = "betas" if all("betas" in group for group in groups) else "momentum"
        return [group.get(key) for group in groups]

    def get_type(self) -> list[str]:
        """The optimizer's name, once per parameter group."""
        name = self._config.optimizer.type if self._config.optimizer else "client"
        return [name for _ in self.optimizer.param_groups] if self.optimizer else []

    def autotp_size(self) -> int:
        """Ranks that layers are cut over, 1 for none."""
        return self._config.grid.size("tp")

    def get_data_parallel_rank(self) -> int:
        """This process among those that see different samples."""
        return self._metrics.axis.rank

    def get_model_parallel_rank(self) -> int:
        """This process among those that have parts of one replica of the model."""
        return self._place("mp")

    def get_tensor_parallel_rank(self) -> int:
        """This process among those that layers are cut over."""
        return self._place("tp")

    def _place(self, axis: str) -> int:
        grid, rank = self._config.grid, self.global_rank  # of other ranks than all there are no parts
        return grid.ranks(axis, rank).index(rank) if grid.size(axis) > 1 else 0


# Getters that end as their key does: what stands before that in their names, and in the path of the key.
_ALIKE = {
    ("", ""): """
        dataloader_drop_last dump_state gradient_predivide_factor log_level managed_gradient_accumulation
        memory_breakdown wall_clock_breakdown zero_allow_untested_optimizer zero_force_ds_cpu_optimizer
    """,
    ("", "bf16."): "bf16_optimizer_states",
    ("", "checkpoint."): "use_node_local_storage",
    ("", "zero_optimization."): """
        zero_hpz_partition_size zero_quantized_gradients zero_quantized_nontrainable_weights zero_quantized_weights
    """,
    ("", "zero_optimization.offload_optimizer."): "cpuadam_cores_perc super_offload",
    ("flops_profiler_", "flops_profiler."): """
        detailed enabled module_depth output_file profile_step recompute_fwd_factor top_modules
    """,
    ("optimizer_", "optimizer."): "legacy_fusion params",
    ("scheduler_", "scheduler."): "params",
    ("zero_", "zero_optimization."): """
        allgather_bucket_size allgather_partitions contiguous_gradients elastic_checkpoint ignore_unused_parameters
        legacy_stage1 load_from_fp32_weights log_trace_cache_warnings overlap_comm reduce_bucket_size reduce_scatter
        round_robin_gradients save_muon_momentum_buffer_in_memory sub_group_size
    """,
    ("zero_", "zero_optimization.stage3_"): """
        allgather_sequential max_live_parameters max_reuse_distance model_persistence_threshold
        module_granularity_threshold param_persistence_threshold prefetch_bucket_size
    """,
}
for (_name, _path), _keys in _ALIKE.items():
    for _each in _keys.split():
        setattr(DeepSpeedGetters, _name + _each, _key(_path + _each))
