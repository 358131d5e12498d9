"""The file as a whole, and what becomes of it once it is checked."""

from typing import Any, ClassVar

from pydantic import Field

from zero.config.sections import (
    ActivationCheckpointing,
    Aio,
    Bf16,
    Checkpoint,
    CommsLogger,
    CsvMonitor,
    DataTypes,
    FlopsProfiler,
    Fp16,
    Optimizer,
    Scheduler,
    Tensorboard,
    TorchAutocast,
    Wandb,
    Zero,
)
from zero.config.values import Bool, Dtype, NotNegative, Object, Positive, Section, Steps, absent, choice
from zero.config.zero_section import ZeroOptimization


class File(Section):
    """A config as it stands in a file: DeepSpeed's keys, and our own under `zero`."""

    ALIASES: ClassVar[dict[str, str]] = {"bfloat16": "bf16"}

    train_batch_size: Positive | None = None
    """Samples per optimizer step over all ranks."""
    train_micro_batch_size_per_gpu: Positive | None = None
    """Samples per forward pass of one rank."""
    gradient_accumulation_steps: Positive | None = None
    """Forward and backward passes per optimizer step."""
    optimizer: Optimizer | None = None
    """The optimizer that the engine builds."""
    scheduler: Scheduler | None = None
    """The learning rate schedule that the engine builds."""
    gradient_clipping: NotNegative = 1.0
    """The largest norm of all gradients together; 0 switches clipping off."""
    fp16: Fp16 = absent(Fp16)
    """Half precision with loss scaling."""
    bf16: Bf16 = absent(Bf16)
    """Brain floats."""
    zero_optimization: ZeroOptimization = absent(ZeroOptimization)
    """What is sharded over the ranks."""
    zero: Zero = absent(Zero)
    """The keys that DeepSpeed does not have."""
    data_types: DataTypes = absent(DataTypes)
    """Dtypes that follow from the precision unless they are given here."""
    torch_autocast: TorchAutocast = absent(TorchAutocast)
    """torch.autocast around the forward pass."""

    steps_per_print: Steps = 10
    """Optimizer steps between two progress lines; inf prints none."""
    dataloader_drop_last: Bool = False
    """Drop the last batch of the training data when it is not full."""
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
    zero_force_ds_cpu_optimizer: Bool = True
    """Insist on the library's CPU optimizer when the state is offloaded."""

    communication_data_type: Dtype | None = None
    """Gradients are rounded to this dtype before they travel; over gloo they are summed in fp32 all the same, NCCL sums
    in this dtype."""
    seq_parallel_communication_data_type: Dtype | None = None
    """The same over the ranks that share a sequence."""
    prescale_gradients: Bool = False
    """Divide gradients before they are reduced, by gradient_predivide_factor or else by the number of ranks; the result
    is the same mean, but what travels is smaller."""
    gradient_predivide_factor: NotNegative = 1.0
    """What gradients are divided by before they are reduced, with or without prescale_gradients; the rest of the mean
    is taken after it."""
    gradient_allreduce_op: choice("mean", "sum") = "mean"
    """Whether gradients are averaged or summed over the ranks."""
    sparse_gradients: Bool = False
    """Reduce the gradients of embeddings as rows and indices."""
    managed_gradient_accumulation: Bool = True
    """Count micro-batches up to the optimizer step; false leaves that to the script."""
    disable_allgather: Bool = False
    """A relic in DeepSpeed."""
    vocabulary_size: Positive | None = None
    """The size of the vocabulary."""
    graph_harvesting: Bool = False
    """Record CUDA graphs."""
    use_data_before_expert_parallelism: Bool = False
    """The order of the ranks under expert parallelism."""
    sequence_parallel_size: Positive | None = None
    """Ranks that share a sequence."""
    data_parallel_size: Positive | None = None
    """Ranks that see different samples."""

    activation_checkpointing: ActivationCheckpointing = absent(ActivationCheckpointing)
    """Recomputing activations in the backward pass."""
    aio: Aio = absent(Aio)
    """Asynchronous file access."""
    checkpoint: Checkpoint = absent(Checkpoint)
    """Saving and loading."""
    tensorboard: Tensorboard = absent(Tensorboard)
    """Progress as TensorBoard events."""
    wandb: Wandb = absent(Wandb)
    """Progress to Weights & Biases."""
    csv_monitor: CsvMonitor = absent(CsvMonitor)
    """Progress as CSV files."""
    comms_logger: CommsLogger = absent(CommsLogger)
    """A log of the communication."""
    flops_profiler: FlopsProfiler = absent(FlopsProfiler)
    """A count of the operations of one step."""

    comet: Object = Field(default_factory=dict)
    """Progress to Comet."""
    timers: Object = Field(default_factory=dict)
    """Settings of the throughput timer."""
    amp: Object = Field(default_factory=dict)
    """NVIDIA apex mixed precision."""
    msamp: Object = Field(default_factory=dict)
    """Microsoft's FP8 mixed precision."""
    pipeline: Object = Field(default_factory=dict)
    """Pipeline parallelism."""
    tensor_parallel: Object = Field(default_factory=dict)
    """Tensor parallelism."""
    expert_parallel: Object = Field(default_factory=dict)
    """Expert parallelism."""
    compile: Object = Field(default_factory=dict)
    """DeepCompile."""
    elasticity: Object = Field(default_factory=dict)
    """Batch sizes that follow the number of ranks."""
    autotuning: Object = Field(default_factory=dict)
    """A search for good settings."""
    hybrid_engine: Object = Field(default_factory=dict)
    """Training and generation in turns."""
    progressive_layer_drop: Object = Field(default_factory=dict)
    """Skipping layers."""
    data_efficiency: Object = Field(default_factory=dict)
    """Sampling and routing of data."""
    curriculum_learning: Object = Field(default_factory=dict)
    """Data from easy to hard."""
    compression_training: Object = Field(default_factory=dict)
    """Pruning and quantization while training."""
    quantize_training: Object = Field(default_factory=dict)
    """Quantization while training."""
    weight_quantization: Object = Field(default_factory=dict)
    """Quantized weights."""
    sparse_attention: Object = Field(default_factory=dict)
    """Sparse attention kernels."""
    nebula: Object = Field(default_factory=dict)
    """Azure's checkpoint service."""
    datastates_ckpt: Any = None
    """An asynchronous checkpoint engine."""


def autocast_dtype(file: File) -> str | None:
    """The dtype of torch.autocast around the forward, by default the parameters' or bf16; None where it is off."""
    default = "fp16" if file.fp16.enabled else "bf16"
    return (file.torch_autocast.dtype or default) if file.torch_autocast.enabled else None


def shard_sizes(file: File) -> dict[str, int]:
    """The keys that limit how many ranks state is cut over, with their values; empty where none does."""
    values = {
        "zero.shard_size": file.zero.shard_size,
        "zero_optimization.mics_shard_size": file.zero_optimization.mics_shard_size,
    }
    return {key: value for key, value in values.items() if value > 0}


class Config(File):
    """A checked config: the batch sizes resolved, everything else as in the file or by default."""

    train_batch_size: int
    """Samples per optimizer step over all ranks."""
    train_micro_batch_size_per_gpu: int
    """Samples per forward pass of one rank."""
    gradient_accumulation_steps: int
    """Forward and backward passes per optimizer step."""
    world_size: int
    """The number of data-parallel ranks that the batch sizes were resolved for."""
    raw: dict[str, Any] = Field(repr=False)
    """A copy of what the user gave."""

    @property
    def compute_dtype(self) -> str:
        """The dtype that the model computes in: fp32, bf16 or fp16."""
        if self.fp16.enabled:
            return "fp16"
        return "bf16" if self.bf16.enabled else "fp32"

    @property
    def autocast_dtype(self) -> str | None:
        """The dtype of torch.autocast around the forward; None where it is off."""
        return autocast_dtype(self)

    @property
    def scales_loss(self) -> bool:
        """Whether anything runs in fp16, so that the loss is scaled as the section `fp16` says."""
        return self.fp16.enabled or self.autocast_dtype == "fp16"

    @property
    def shard_size(self) -> int:
        """The number of ranks that state is cut over, from zero.shard_size or mics_shard_size; 0 for all ranks."""
        size = next(iter(shard_sizes(self).values()), 0)
        return 0 if size == self.world_size else size

    @property
    def secondary_shard_size(self) -> int:
        """The number of ranks that hold a second copy of the parameters (hpZ); 1 for no such copy."""
        size = self.zero_optimization.zero_hpz_partition_size
        return 1 if size == self.world_size else size

    @property
    def gradient_factor(self) -> float:
        """What the sum of gradients over all micro-batches of all ranks is multiplied by."""
        ranks = 1 if self.gradient_allreduce_op == "sum" else self.world_size
        return 1.0 / (ranks * self.gradient_accumulation_steps)

    @property
    def predivide(self) -> float:
        """What gradients are divided by before they travel; 1 for nothing."""
        if self.gradient_predivide_factor == 1.0 and self.prescale_gradients:
            return float(self.world_size)
        return self.gradient_predivide_factor
