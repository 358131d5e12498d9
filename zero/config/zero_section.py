"""The section `zero_optimization`: what is sharded, where it is stored and how it is communicated."""

import sys
from typing import Annotated

from pydantic import Field

from zero.config.unavailable import ALWAYS_ON, NOT_AVAILABLE, NOTHING_TO_SET, Idle, Unavailable, false
from zero.config.values import (
    Bool,
    Count,
    Fraction,
    FractionOrAuto,
    Positive,
    Section,
    Texts,
    absent,
    choice,
    integer,
)

_UNITS = Idle("the units decide what is reduced and gathered together")
_OWN_PART = Idle("every rank reads its own part of a checkpoint, of any world size")
_ONE_GATHER = Unavailable("another way to gather is not available in this release; leave it out")
_UNUSED_ALLOWED = Unavailable("parameters without a gradient are always allowed here; leave it out", on=false)
_ZEROPP = Unavailable("is not available; zero_quantized_weights and zero_quantized_gradients are, without it")

Device = choice("none", "cpu", "nvme")
_MOE = (
    "transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock",
    "transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock",
    "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock",
)


class OffloadParam(Section):
    """Where the parameter shards of stage 3 are stored."""

    device: Device = "none"
    """The place of the parameter shards between uses: none (the device that computes), cpu or nvme."""
    nvme_path: str | None = None
    """A folder on the drive, for device nvme."""
    buffer_count: Positive = 5
    """The number of units whose shards are in memory at once, for device nvme."""
    buffer_size: Annotated[Positive, NOTHING_TO_SET] = 100_000_000
    max_in_cpu: Count = 1_000_000_000
    """The number of elements of each rank's shards that stay in main memory although the device is nvme."""
    pin_memory: Bool = True
    """Page-locked main memory, which copies faster to the GPU."""


class StateUpdate(Section):
    """How state that is stored off the device is updated."""

    update: choice("host", "gpu", "auto") = "host"
    """host: the CPU computes the step. gpu: state streams through two buffers on the GPU, unit by unit, and the GPU
    computes; the numbers are the same. auto: the faster way, by bytes and by rates measured at the start, if the GPU
    has room for it."""


class OffloadOptimizer(Section):
    """Where the optimizer state and the fp32 masters are stored, and which device computes the step."""

    device: Device = "none"
    """The place of the optimizer state: none (the device that computes), cpu or nvme."""
    nvme_path: str | None = None
    """A folder on the drive, for device nvme."""
    buffer_count: Positive = 4
    """The number of units whose state is in memory at once, for device nvme; 1 works, without overlap."""
    pin_memory: Bool = True
    """Page-locked main memory, which copies faster to the GPU."""
    pipeline_read: Bool = True
    """Read the next unit's state from the drive while this one is updated. DeepSpeed's default, false, makes the drive
    and the update take turns."""
    pipeline_write: Bool = True
    """Write the last unit's state to the drive while this one is updated; DeepSpeed's default is false."""
    fast_init: Annotated[Bool, NOTHING_TO_SET] = False
    ratio: FractionOrAuto = 1.0
    """The part of the parameters whose state leaves the device; the rest stays there. "auto" chooses by free memory."""
    super_offload: Annotated[Bool, NOT_AVAILABLE] = False
    cpuadam_cores_perc: Annotated[Fraction, NOTHING_TO_SET] = 0.8
    zero: StateUpdate = absent(StateUpdate)


class LeafModule(Section):
    """Modules that are gathered at once with all modules inside them."""

    classes: Texts = Field(default_factory=lambda: list(_MOE))
    """Class names, short or with the package in front."""
    names: Texts = Field(default_factory=list)
    """Paths of modules in the model."""
    name_suffixes: Texts = Field(default_factory=list)
    """Endings of such paths."""


class ZeroOptimization(Section):
    """What is sharded over the ranks, and DeepSpeed's settings for its communication."""

    stage: integer(0, 3) = 0
    """0 replicates everything; 1 shards the optimizer state, 2 also the gradients, 3 also the parameters."""
    offload_param: OffloadParam = absent(OffloadParam)
    offload_optimizer: OffloadOptimizer = absent(OffloadOptimizer)
    stage3_gather_16bit_weights_on_model_save: Bool = False
    """Gather whole weights when a 16-bit model is saved from stage 3."""

    contiguous_gradients: Annotated[Bool, _UNITS] = True
    reduce_scatter: Annotated[Bool, _UNITS] = True
    reduce_bucket_size: Annotated[Count, _UNITS] = 500_000_000
    use_multi_rank_bucket_allreduce: Annotated[Bool, _UNITS] = True
    allgather_partitions: Annotated[Bool, _UNITS] = True
    allgather_bucket_size: Annotated[Count, _UNITS] = 500_000_000
    overlap_comm: Annotated[Bool | None, _UNITS] = None
    sub_group_size: Annotated[Count, _UNITS] = 1_000_000_000
    round_robin_gradients: Annotated[Bool, _UNITS] = False
    load_from_fp32_weights: Bool = True
    """Load the masters of a checkpoint, not its 16-bit weights."""
    elastic_checkpoint: Annotated[Bool, _OWN_PART] = False
    ignore_unused_parameters: Annotated[Bool, _UNUSED_ALLOWED] = True
    legacy_stage1: Annotated[Bool, Unavailable("is gone from DeepSpeed too; leave it out")] = False

    stage3_prefetch_bucket_size: Count = 50_000_000
    """Elements that are prefetched; 0 prefetches nothing."""
    stage3_param_persistence_threshold: Count = 0
    """Units of at most this many elements stay gathered between uses. DeepSpeed's default is 100,000, as it gathers
    parameters one by one; here small ones are gathered with their block."""
    stage3_model_persistence_threshold: Count = sys.maxsize
    """The limit of elements that stay gathered in total."""
    stage3_max_live_parameters: Count = 1_000_000_000
    """The limit of gathered elements at a time: nothing is prefetched beyond it."""
    stage3_max_reuse_distance: Count = 0
    """Keep a unit gathered if it is used again within this many elements. DeepSpeed's default is 1e9, so it never
    releases models below half of that between forward and backward; here it is 0, as stage 3 is chosen for memory."""
    stage3_module_granularity_threshold: Annotated[Count, _UNITS] = 0
    stage3_use_all_reduce_for_fetch_params: Annotated[Bool, _ONE_GATHER] = False
    stage3_allgather_sequential: Annotated[Bool, _ONE_GATHER] = False
    memory_efficient_linear: Annotated[Bool, NOTHING_TO_SET] = True
    override_module_apply: Annotated[Bool, NOTHING_TO_SET] = True
    pipeline_loading_checkpoint: Annotated[Bool, _OWN_PART] = False
    log_trace_cache_warnings: Annotated[Bool, NOTHING_TO_SET] = False
    enable_sanity_checks: Annotated[Bool, ALWAYS_ON] = False
    leaf_module: LeafModule = absent(LeafModule)

    zero_hpz_partition_size: Positive = 1
    """ZeRO++'s hpZ: ranks that together hold a second copy of the parameters at stage 3, as many as one machine has;
    the backward pass gathers from it. 1 keeps none."""
    zero_quantized_weights: Bool = False
    """ZeRO++'s qwZ, at stage 3: parameters are sent in 8 bits, encoded from the exact values once per step; all ranks
    compute with the same numbers, and masters, checkpoints and saved weights stay exact."""
    zero_quantized_nontrainable_weights: Annotated[Bool, _ZEROPP] = False
    zero_quantized_gradients: Bool = False
    """ZeRO++'s qgZ, at stages 1 to 3: gradients are sent in 8 bits and summed in fp32 in the order of ranks; each
    rank keeps its rounding error for the next gradient, 1.03 bytes per parameter of the model."""
    zeropp_loco_param: Annotated[dict | None, _ZEROPP] = None
    mics_shard_size: integer(-1) = -1
    """MiCS: DeepSpeed's name of zero.shard_size; -1 and 0 mean all ranks."""
    mics_hierarchical_params_gather: Annotated[Bool, Idle("the backend decides how a gather crosses machines")] = False
    cpu_offload_use_pin_memory: Annotated[Bool, Idle("it is old; the section of the offload has pin_memory")] = False
    save_muon_momentum_buffer_in_memory: Annotated[Bool, NOT_AVAILABLE] = False
    zenflow: Annotated[dict | None, Unavailable("ZenFlow is not available; leave it out")] = None


ZeroOptimization.ALIASES = {
    "stage3_gather_fp16_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save",
    **{name.removeprefix("stage3_"): name for name in ZeroOptimization.model_fields if name.startswith("stage3_")},
}
