"""A config file as a whole, the checked `Config` made from it, and every key of it: its path, and its other names."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, get_args

from pydantic import Field

from zero.config.expert_parallel import ExpertParallel
from zero.config.monitor_sections import Comet, CommsLogger, Csv, FlopsProfiler, TensorBoard, Wandb
from zero.config.pipeline import Pipeline
from zero.config.sections import (
    ActivationCheckpointing,
    Aio,
    Bf16,
    Checkpoint,
    DataTypes,
    Fp16,
    LocalSgd,
    Optimizer,
    Scheduler,
    TorchAutocast,
    Zero,
)
from zero.config.tensor_parallel import TensorParallel
from zero.config.unavailable import NOT_AVAILABLE, NOTHING_TO_SET, Idle, Unavailable, enabled
from zero.config.values import Bool, Dtype, NotNegative, Positive, Section, Settings, Steps, absent, choice
from zero.config.zero_section import ZeroOptimization

_ONLY_DATA = "is not there yet: ranks share out data and sequences only; leave it out"
_NO_GRAPHS = "engine.compile(compile_kwargs={'mode': 'reduce-overhead'}) makes CUDA graphs, where there are any"
_NOT_ENABLED = Unavailable(NOT_AVAILABLE.message, on=enabled)


class File(Section):
    """A config file: DeepSpeed's keys, and our own under `zero`."""

    ALIASES: ClassVar[Mapping[str, str]] = {"bfloat16": "bf16"}

    train_batch_size: Positive | None = None
    """Samples per optimizer step over all ranks."""
    train_micro_batch_size_per_gpu: Positive | None = None
    """Samples per forward pass of one rank."""
    gradient_accumulation_steps: Positive | None = None
    """Forward and backward passes per optimizer step."""
    optimizer: Optimizer | None = None
    scheduler: Scheduler | None = None
    gradient_clipping: NotNegative = 1.0
    """The largest norm of all gradients together; 0 switches clipping off."""
    fp16: Fp16 = absent(Fp16)
    bf16: Bf16 = absent(Bf16)
    zero_optimization: ZeroOptimization = absent(ZeroOptimization)
    zero: Zero = absent(Zero)
    local_sgd: LocalSgd = absent(LocalSgd)
    data_types: DataTypes = absent(DataTypes)
    torch_autocast: TorchAutocast = absent(TorchAutocast)

    steps_per_print: Steps = 10
    """Optimizer steps between two progress lines; inf prints none."""
    dataloader_drop_last: Bool = False
    """Drop the last batch of the training data if it is not full."""
    wall_clock_breakdown: Bool = False
    """Print the time of each phase of a step."""
    memory_breakdown: Bool = False
    """Print the memory of each phase of a step."""
    dump_state: Bool = False
    """Print the config when the engine starts."""
    log_level: choice("debug", "info", "warning", "error", "critical") | None = None
    """The level of the library's log."""
    zero_allow_untested_optimizer: Bool = False
    """Allow an optimizer of the script's own under ZeRO."""
    zero_force_ds_cpu_optimizer: Annotated[Bool, NOTHING_TO_SET] = True

    communication_data_type: Dtype | None = None
    """Gradients are rounded to this dtype before they are sent. They are summed in fp32 all the same, or in this dtype
    by NCCL: see zero.reduce."""
    seq_parallel_communication_data_type: Annotated[Dtype | None, NOTHING_TO_SET] = None
    prescale_gradients: Bool = False
    """Divide gradients before they are reduced, by gradient_predivide_factor or else by the number of ranks; the result
    is the same mean, but the numbers that are sent are smaller."""
    gradient_predivide_factor: NotNegative = 1.0
    """The divisor of gradients before they are reduced, with or without prescale_gradients; the rest of the mean
    is taken after the reduction."""
    gradient_allreduce_op: choice("mean", "sum") = "mean"
    """Whether gradients are averaged or summed over the ranks."""
    sparse_gradients: Annotated[Bool, Unavailable("is not available in this release; gradients are dense")] = False
    managed_gradient_accumulation: Bool = True
    """Count micro-batches up to the optimizer step. false: each `step()` ends one, ranks may have run different numbers
    of micro-batches, none included, and the mean is over all of them; no batch size is needed then."""
    disable_allgather: Annotated[Bool, NOTHING_TO_SET] = False
    vocabulary_size: Annotated[Positive | None, NOTHING_TO_SET] = None
    graph_harvesting: Annotated[Bool, Idle(_NO_GRAPHS)] = False
    use_data_before_expert_parallelism: Annotated[Bool, Unavailable(_ONLY_DATA)] = False
    sequence_parallel_size: Positive = 1
    """Ranks that a sequence is cut over; as many consecutive ranks have the same samples. See zero.context."""
    data_parallel_size: Positive | None = None
    """Ranks with samples of their own; it follows from the other sizes, with which it must agree."""

    activation_checkpointing: ActivationCheckpointing = absent(ActivationCheckpointing)
    """Recomputing activations in the backward pass."""
    aio: Aio = absent(Aio)
    checkpoint: Checkpoint = absent(Checkpoint)
    tensorboard: TensorBoard = absent(TensorBoard)
    wandb: Wandb = absent(Wandb)
    csv_monitor: Csv = absent(Csv)
    comet: Comet = absent(Comet)
    comms_logger: CommsLogger = absent(CommsLogger)
    flops_profiler: FlopsProfiler = absent(FlopsProfiler)
    timers: Annotated[Settings, Idle("not used yet")]

    amp: Annotated[Settings, Unavailable("apex amp is not available; use bf16", on=enabled)]
    msamp: Annotated[Settings, Unavailable("MS-AMP is not available; use bf16", on=enabled)]
    pipeline: Pipeline = absent(Pipeline)
    tensor_parallel: TensorParallel = absent(TensorParallel)
    expert_parallel: ExpertParallel = absent(ExpertParallel)
    compile: Annotated[Settings, Unavailable("DeepCompile is not available; leave it out", at="deepcompile")]
    elasticity: Annotated[Settings, Unavailable("is not available in this release; set train_batch_size", on=enabled)]
    autotuning: Annotated[Settings, Unavailable("is not read; use `zero tune script.py`", on=enabled)]
    hybrid_engine: Annotated[Settings, _NOT_ENABLED]
    progressive_layer_drop: Annotated[Settings, _NOT_ENABLED]
    data_efficiency: Annotated[Settings, _NOT_ENABLED]
    curriculum_learning: Annotated[Settings, _NOT_ENABLED]
    compression_training: Annotated[Settings, _NOT_ENABLED]
    quantize_training: Annotated[Settings, _NOT_ENABLED]
    weight_quantization: Annotated[Settings, NOT_AVAILABLE]
    sparse_attention: Annotated[Settings, NOT_AVAILABLE]
    nebula: Annotated[Settings, _NOT_ENABLED]
    datastates_ckpt: Annotated[Any, NOT_AVAILABLE] = None

    @property
    def compute_dtype(self) -> str:
        """The dtype that the model computes in: fp32, bf16 or fp16."""
        if self.fp16.enabled:
            return "fp16"
        return "bf16" if self.bf16.enabled else "fp32"

    @property
    def autocast_dtype(self) -> str | None:
        """The dtype of torch.autocast around the forward, by default the parameters' or bf16; None if it is off."""
        default = "fp16" if self.fp16.enabled else "bf16"
        return (self.torch_autocast.dtype or default) if self.torch_autocast.enabled else None

    @property
    def scales_loss(self) -> bool:
        """Whether anything runs in fp16, so that the loss is scaled as the section `fp16` says."""
        return self.fp16.enabled or self.autocast_dtype == "fp16"

    @property
    def reduces_each(self) -> bool:
        """Whether each micro-batch is reduced by itself at every stage: a tree has one leaf for each."""
        return self.zero.reduce_every_micro_batch or self.zero.reduce == "tree"

    @property
    def shard_sizes(self) -> dict[str, int]:
        """The keys that limit how many ranks state is cut over, with their values; empty if none does."""
        values = {
            "zero.shard_size": self.zero.shard_size,
            "zero_optimization.mics_shard_size": self.zero_optimization.mics_shard_size,
        }
        return {key: value for key, value in values.items() if value > 0}


class Config(File):
    """A checked config: the batch sizes resolved, everything else as in the file or by default."""

    world_size: int
    """The number of data-parallel ranks that the batch sizes were resolved for."""
    grid: Any = Field(repr=False, exclude=True)
    """The `Grid` of all ranks."""
    raw: dict[str, Any] = Field(repr=False)
    """A copy of the user's values."""

    @property
    def shard_size(self) -> int:
        """The number of ranks that state is cut over, from zero.shard_size or mics_shard_size; 0 for all ranks."""
        size = next(iter(self.shard_sizes.values()), 0)
        return 0 if size == self.summed else size

    @property
    def secondary_shard_size(self) -> int:
        """The number of ranks that hold a second copy of the parameters (hpZ); 1 for no such copy."""
        size = self.zero_optimization.zero_hpz_partition_size
        return 1 if size == self.summed else size

    @property
    def summed(self) -> int:
        """The number of ranks that gradients are summed over: those with samples of their own, and their pieces."""
        return self.world_size * self.sequence_parallel_size

    @property
    def summed_together(self) -> int:
        """Of these the ranks whose gradients one step sums: all, or with local SGD those of one replica."""
        replica = self.grid.size("dp_shard") if self.zero_optimization.stage else 1
        return self.summed if self.local_sgd.sync_every == 1 else replica

    @property
    def counted(self) -> bool:
        """Whether the mean is over what the micro-batches of a step count, which is known at its end only."""
        return self.zero.mean == "tokens" or not self.managed_gradient_accumulation

    @property
    def gradient_factor(self) -> float:
        """The factor for the sum of gradients over all micro-batches of all ranks; see `counted`."""
        if self.counted:
            return float(self.world_size) if self.gradient_allreduce_op == "sum" else 1.0
        # The loss of a sequence is the same on all ranks that have a piece of it, and each of them has its backward.
        ranks = self.sequence_parallel_size if self.gradient_allreduce_op == "sum" else self.summed_together
        return 1.0 / (ranks * self.gradient_accumulation_steps)

    @property
    def predivide(self) -> float:
        """The divisor of gradients before they are sent; 1 for none."""
        if self.gradient_predivide_factor == 1.0 and self.prescale_gradients:
            return float(self.summed_together)
        return self.gradient_predivide_factor


def section_of(annotation: Any) -> type[Section] | None:
    """The `Section` behind a field's annotation, `| None` or not."""
    for option in (annotation, *get_args(annotation)):
        if isinstance(option, type) and issubclass(option, Section):
            return option
    return None


def sections(model: type[Section] = File, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], type[Section]]:
    """Every section of the file by its path; the file itself is `()`."""
    by_path = {path: model}
    for name, field in model.model_fields.items():
        inner = section_of(field.annotation)
        if inner is not None:
            by_path |= sections(inner, (*path, name))
    return by_path
