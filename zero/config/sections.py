"""The sections of a config other than `zero_optimization`."""

from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import Field

from zero.config.monitor_sections import Alarm, Profile
from zero.config.unavailable import ALWAYS_ON, NOT_AVAILABLE, NOTHING_TO_SET, Idle, Unavailable, false
from zero.config.values import (
    Bool,
    Count,
    Dtype,
    Every,
    Int,
    Nbytes,
    Positive,
    Scale,
    Seconds,
    Section,
    Settings,
    Texts,
    absent,
    choice,
    integer,
)

TIMEOUT = 600.0  # the default of zero.timeout
_NO_THREADS = Idle("DeepSpeed ignores it, too; intra_op_parallelism is the number of workers")
_TOGETHER = Idle("blocks go to the drive together, while others are on their way")
_EXACT_MASTERS = Unavailable("masters are exact here; optimizer.params.zero.master says how")
_UNIVERSAL = Unavailable("DeepSpeed's universal checkpoints are not available; leave it out")
_SHARED_FOLDER = Unavailable("is not available in this release; use a shared folder")
_STATES_IN_FP32 = Unavailable(
    "set optimizer.params.zero.moments to 'bf16' or '8bit' instead", at="fp32_optimizer_states", on=false
)


class Optimizer(Section):
    """The optimizer that the engine builds when the script passes none."""

    type: str
    """Adam, AdamW, Lamb, Lion, Muon, SGD, Adagrad, or a class in torch.optim; as in DeepSpeed, Adam decays weights as
    AdamW."""
    params: Annotated[Settings, _STATES_IN_FP32]
    """Its arguments; of the first seven, `zero` says how their state is kept."""
    legacy_fusion: Annotated[Bool, NOT_AVAILABLE] = False


class Scheduler(Section):
    """The learning rate schedule that the engine builds when the script passes none."""

    type: str
    """WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest, or a class in torch's lr_scheduler."""
    params: Settings
    """Its arguments."""


class Fp16(Section):
    """Half precision with loss scaling."""

    enabled: Bool = False
    """Compute in fp16."""
    auto_cast: Bool = False
    """Cast the float inputs of the model to fp16."""
    loss_scale: Scale = 0.0
    """A fixed loss scale; 0 means dynamic."""
    initial_scale_power: Count = 16
    """The dynamic scale starts at two to this power."""
    loss_scale_window: Int = 1000
    """Good steps after which the dynamic scale doubles."""
    hysteresis: Count = 2
    """Overflows that are tolerated before the dynamic scale halves."""
    consecutive_hysteresis: Bool = False
    """Reset the count of overflows after each good step."""
    min_loss_scale: Int = 1
    """The dynamic scale never goes below this."""
    fp16_master_weights_and_grads: Annotated[Bool, Unavailable("masters are exact fp32 here; leave it out")] = False


class Bf16(Section):
    """Brain floats: the range of fp32 in 16 bits, so there is no loss scaling."""

    enabled: Bool = False
    """Compute in bf16; the masters stay exact, see optimizer.params.zero.master."""
    immediate_grad_update: Annotated[Bool, ALWAYS_ON] = False
    check_grad_overflow: Bool = True
    """Skip the step on all ranks when a gradient is not finite."""
    bf16_master_weights_and_grads: Annotated[Bool, _EXACT_MASTERS] = False
    bf16_optimizer_states: Annotated[Bool, Unavailable("set optimizer.params.zero.moments to 'bf16' instead")] = False


class TorchAutocast(Section):
    """torch.autocast around the forward pass."""

    enabled: Bool = False
    """Run the forward pass under torch.autocast; parameters stay fp32 unless bf16 or fp16 is enabled, too."""
    dtype: Dtype | None = None
    """The dtype that autocast computes in; default: that of the parameters, or bf16 if they are fp32."""
    lower_precision_safe_modules: Annotated[Texts | None, NOTHING_TO_SET] = None


class LocalSgd(Section):
    """Replicas that train by themselves between means of their parameters, at stages 0 and 1."""

    sync_every: Positive = 1
    """Steps after which replicas take the mean of their parameters and of the optimizer's moments; no gradient leaves
    its replica before: a rank at stage 0, zero.shard_size ranks at stage 1. 1 is plain training."""


class DataTypes(Section):
    """Dtypes that follow from the precision unless they are given here."""

    grad_accum_dtype: Dtype | None = None
    """The dtype that gradients accumulate in; default: fp32."""
    param_dtype: Dtype | None = None
    """The dtype of the parameters."""
    buffer_dtype: Dtype | None = None
    """The dtype that the model's buffers are cast to; by default they keep theirs."""


class ActivationCheckpointing(Section):
    """Where the inputs of recomputed modules are kept, under `zero.recompute` and `zero.checkpointing`."""

    partition_activations: Bool = False
    """Each rank of the model axis, which `zero.checkpointing.configure` names, keeps its slice of an input."""
    contiguous_memory_optimization: Bool = False
    """Keep the inputs in one preallocated buffer, for number_checkpoints calls."""
    cpu_checkpointing: Bool = False
    """Keep the inputs in main memory; they are fetched one call ahead of their use."""
    number_checkpoints: Positive | None = None
    """The number of calls that contiguous_memory_optimization allocates for; no effect without that key. Where it is
    missing, zero.checkpointing.configure gives it, and until then each input takes memory of its own."""
    synchronize_checkpoint_boundary: Bool = False
    """Wait for the device before and after each call."""
    profile: Bool = False
    """Log the time of forward passes and recomputations; waits for the device, too."""


class Aio(Section):
    """Asynchronous file access, for offload to nvme."""

    block_size: integer(4096, 2**30, multiple_of=4096) = 1_048_576
    """Bytes that a worker reads or writes at once."""
    queue_depth: integer(1, 4096) = 8
    """Blocks of each worker in flight."""
    intra_op_parallelism: integer(1, 256) = 1
    """Workers."""
    single_submit: Annotated[Bool, _TOGETHER] = False
    overlap_events: Annotated[Bool, _TOGETHER] = True
    use_gds: Annotated[Bool, Unavailable("GPUDirect is not available; what is read goes through host memory")] = False
    thread_count: Annotated[Positive, _NO_THREADS] = 1


class Checkpoint(Section):
    """Saving and loading."""

    tag_validation: choice("ignore", "warn", "fail") = "warn"
    """If folder, tag or file name of a save differ between ranks, for example by a time stamp, rank 0's is used, with
    a warning the first time or, with "ignore", without one; "fail" makes it an error on all ranks."""
    load_universal: Annotated[Bool, _UNIVERSAL] = False
    use_node_local_storage: Annotated[Bool, _SHARED_FOLDER] = False
    parallel_write: Annotated[Settings, Unavailable(NOT_AVAILABLE.message, at="pipeline_stage")]
    checkpoint_serialization: Annotated[Bool, NOTHING_TO_SET] = True
    writer: Annotated[dict | None, Unavailable("DeepSpeed's writers are not available; leave it out")] = None


class Recompute(Section):
    """Modules whose activations are computed again in the backward pass and not kept."""

    modules: Texts = Field(default_factory=list)
    """Class names or path patterns (fnmatch on the module path) of the modules; of nested ones the outermost."""
    every: Positive = 1
    """Every n-th of them, in order, is recomputed: 1 is all of them."""
    policy: choice("full", "selective", "auto") = "full"
    """full keeps a module's inputs; selective also the results of matrix products and attention; auto chooses for each
    module after the first step, and recomputes as little as the budget allows."""
    ops: Texts = Field(default_factory=list)
    """Operators of torch by name, such as "gelu" or "aten.mm": of the modules only these are computed again, and what
    all others give is kept. With policy full."""
    products: Positive = 1
    """Under selective, every n-th matrix product is kept: 1 is all, with 2 every second is recomputed."""
    budget: Nbytes | None = None
    """Under auto, how much the modules' activations may take on each rank: bytes, or text such as '12 GiB'."""


class Saving(Section):
    """How `save_checkpoint` saves, and what it keeps."""

    ALIASES: ClassVar[Mapping[str, str]] = {"async": "asynchronous"}

    asynchronous: Bool = False
    """Written `async`: copy to host memory during the call, and write while training continues."""
    keep: Positive | None = None
    """How many checkpoints a folder keeps; older ones are deleted once a newer one is whole. Default: all."""
    keep_optimizer: Positive | None = None
    """How many of them keep the optimizer state; older ones keep only the weights. Default: all."""


class Context(Section):
    """How attention works on a sequence that `sequence_parallel_size` ranks share."""

    mode: choice("ulysses", "ring") = "ulysses"
    """ulysses: each rank computes some heads over the whole sequence. ring: all heads over its piece, and keys and
    values travel, as far as another rank's queries see them."""
    cut: Texts = Field(default_factory=list)
    """Names of the arguments of the model that have a sequence as their second dimension. Default: `input_ids`, and
    every tensor of its first two dimensions."""
    count: str = ""
    """The name of the argument whose values are what each position counts in the loss of the model, a mask or weights.
    Default: where the argument named label or target is not negative."""
    reduction: choice("mean", "sum") = "mean"
    """Whether the loss of the model is a mean over what it counts, or a sum."""
    check: Bool = True
    """Before the first step, run a short part of the first batch whole and shared, and compare the outputs."""


class Zero(Section):
    """The keys that DeepSpeed does not have."""

    units: Texts = Field(default_factory=list)
    """Class names or path patterns (fnmatch on the module path) of the modules that become one unit each;
    default: the repeated blocks of the model."""
    shard_size: integer(-1) = 0
    """The number of ranks that state is cut over, at stages 1 to 3; each group of that many consecutive ranks holds one
    replica. A divisor of the world size; 0 and -1 mean all ranks."""
    reduce_every_micro_batch: Bool = False
    """Stages 0 and 1 reduce gradients at the accumulation boundary only; true makes them reduce after every micro-batch
    like stages 2 and 3, so that the four stages sum in one order and are bitwise equal under accumulation too, at the
    price of more communication."""
    reduce: choice("auto", "ranks", "backend", "tree") = "auto"
    """How gradients are added up. "ranks": in fp32 in the order of ranks, whatever dtype is sent. "backend": over NCCL
    by its reduce-scatter, which adds in the dtype sent, in its own order. "tree": in a fixed binary tree over the
    micro-batches of one optimizer step, which gives the same bits at every world size and takes a power of two of
    micro-batches. "auto" is "backend" for fp32 over NCCL and for ranks of several machines, else "ranks"."""
    mean: choice("micro_batches", "tokens") = "micro_batches"
    """What the gradient of a step is the mean over: "micro_batches", each of one weight, or "tokens", all that count on
    all ranks and in all micro-batches, as engine.backward(loss, tokens=n) tells."""
    context: Context = absent(Context)
    shard: Settings
    """By class names or path patterns of modules, the pieces that each dim of their tensors is cut in over the ranks,
    `[[4, 1], [1, 1]]` for each input and then each own parameter, or `{"in": [...], "out": [...]}`; as `zero.shard`."""
    full_batch: Bool = False
    """All ranks are given the whole batch, of which each computes its rows, and get whole outputs; with `shard`."""
    drop_last_window: Bool = False
    """Drop the gradients of a step that the end of a pass over the training data leaves incomplete."""
    timeout: Seconds = TIMEOUT
    """Seconds that a rank waits for another before the job ends with a report of which rank waits for what."""
    check_order: Bool = False
    """Compare the order of communication at each step; a difference is an error that names the first."""
    check_replicas: Count = 0
    """Every n steps, compare values that ranks hold in common, unit by unit, and name the first parameter that differs;
    0 means never."""
    plan: Bool = False
    """After the third step, compare the memory of each kind with the estimate, and say what differs and why."""
    recompute: Recompute = absent(Recompute)
    checkpoint: Saving = absent(Saving)
    report: str | None = None
    """A folder to which every rank writes what it does during the run. If another engine is writing to it, a folder
    beside it (DIR-2); see docs/monitors.md."""
    unit_norms: Every = False
    """The norms of each unit's gradient, parameters and update: true for each step, or every n steps."""
    alarm: Alarm = absent(Alarm)
    track_updates: Bool = False
    """Mark the values that each step changes from the start, for engine.weight_updates(); false marks from its first
    call on."""
    profile: Profile = absent(Profile)
