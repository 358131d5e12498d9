"""The section `tensor_parallel`: layers cut over neighbouring ranks."""

import re
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from zero.config.unavailable import NOTHING_TO_SET, Idle, Unavailable
from zero.config.values import Bool, Count, Fused, Positive, Section, Texts, absent, choice, refuse

_OURS = Unavailable("layers are found by the model's tp_plan, or by partition_config; leave it out")


def _compiles(patterns: list[str]) -> list[str]:
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise refuse(f"regular expressions, of which {pattern!r} is none: {error}") from None
    return patterns


def _power_of_two(value: int) -> int:
    if value & (value - 1):
        raise refuse("a power of two")
    return value


class LayerSpec(Section):
    """How layers are cut whose weights have names that match."""

    patterns: Annotated[Texts, AfterValidator(_compiles)] = Field(default_factory=list)
    """Regular expressions, of which one matches the beginning of the name of the weight."""
    partition_type: choice("column", "row", "skip") = "column"
    """Cut along the outputs (`column`) or the inputs (`row`), or left whole (`skip`)."""
    shape: Fused | None = None
    """Of a weight in which several are fused, as [3, -1] for three equal ones, or [[64, 16, 16], -1]."""
    partition_dim: Count | None = None
    """The dim of `shape` that says these; by default 0 of columns and 1 of rows."""
    model_types: Texts | None = None
    """Only for models whose config has one of these types."""
    gather_output: Bool = False
    """Every rank gets all outputs, as of a head."""
    grad_allreduce: Bool = False
    """What is skipped sees a part of the activations on each rank: its gradients are summed."""


class PartitionConfig(Section):
    """Which layers are cut, and how."""

    layer_specs: list[LayerSpec] = Field(default_factory=list)
    """Rules, of which the first that matches holds."""
    use_default_specs: Bool = True
    """Cut other layers as the model's tp_plan or what they are called says."""
    strict_mode: Bool = False
    """An error where no rule matches a linear layer."""
    embedding_partition_dim: Annotated[Count, NOTHING_TO_SET] = 1
    lm_head_patterns: Annotated[Texts, NOTHING_TO_SET] = Field(default_factory=list)
    tp_size: Annotated[Count, NOTHING_TO_SET] = 1


class Ranks(Section):
    """DeepSpeed's other place for the number of ranks."""

    tp_size: Positive = 1
    """As `autotp_size`."""
    tp_grain_size: Annotated[Positive, NOTHING_TO_SET] = 1
    mpu: Annotated[Any, Unavailable("is an argument of initialize(), not of a file")] = None
    tp_group: Annotated[Any, Unavailable("groups follow from the number of ranks; leave it out")] = None


class TensorParallel(Section):
    """Layers cut over neighbouring ranks, which share their batches."""

    autotp_size: Count = 0
    """Ranks that layers are cut over; 0 and 1 for none."""
    tp: Ranks = absent(Ranks)
    sequence_parallel: Bool = False
    """Between the layers that are cut, each rank has a part of the sequence (Megatron's)."""
    broadcast_batch: Bool = False
    """The first of the ranks gives the others its batch; else all must have the same one, and the first is compared."""
    reduce: choice("sum", "tree") = "sum"
    """`tree`: sums over what is cut are those of a fixed tree, so that any number of ranks gives the same bits."""
    blocks: Annotated[Positive, AfterValidator(_power_of_two)] = 8
    """Blocks that such sums have under `tree`: the most ranks that give the same bits."""
    partition_config: PartitionConfig = absent(PartitionConfig)
    """Which layers are cut, and how; by default the model's tp_plan, or what its layers are called, says it."""
    preset_model: Annotated[str | None, Idle("presets are found by what layers are called")] = None
    dtype: Annotated[Any, NOTHING_TO_SET] = None
    tp_overlap_comm: Annotated[Bool, NOTHING_TO_SET] = False
    keep_module_on_host: Annotated[Bool, NOTHING_TO_SET] = False
    replace_with_kernel_inject: Annotated[Bool, Unavailable("is for inference; leave it out")] = False
    kernel_inject: Annotated[Bool, Unavailable("is for inference; leave it out")] = False
    injection_policy_tuple: Annotated[Any, _OURS] = None
