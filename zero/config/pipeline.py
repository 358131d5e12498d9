"""The section `pipeline`: layers divided among ranks."""

from typing import Annotated, NamedTuple

from pydantic import Field

from zero.config.unavailable import NOTHING_TO_SET
from zero.config.values import Bool, Count, Partition, Places, Positive, PositiveOrAuto, Section, choice


class Style(NamedTuple):
    """A kind of schedule: the class of torch that makes it, and how many stages a rank has; 0: two by default."""

    made_by: str
    per_rank: int


STYLES = {
    "gpipe": Style("", 1),
    "1f1b": Style("", 1),
    "interleaved": Style("ScheduleInterleaved1F1B", 0),
    "zero_bubble": Style("ScheduleInterleavedZeroBubble", 0),
    "zbv": Style("ScheduleZBVZeroBubble", 2),
    "dualpipev": Style("ScheduleDualPipeV", 2),
}


SPLIT = ("zero_bubble", "zbv", "dualpipev")  # whose backwards are in two parts


class Pipeline(Section):
    """Layers divided among ranks, which pass micro-batches on."""

    stages: PositiveOrAuto = 1
    """Ranks that the layers are divided among."""
    schedule: choice(*STYLES) = "1f1b"
    """In which order a rank runs forwards and backwards of its micro-batches."""
    stages_per_rank: Positive | None = None
    """Runs of layers that a rank has under `interleaved` and `zero_bubble`, by default 2; `zbv` and `dualpipev` have 2,
    `gpipe` and `1f1b` 1."""
    micro_batches: Positive | None = None
    """Another word for gradient_accumulation_steps; or, of those, how many run in one schedule."""
    split_size: Positive | None = None
    """Cut each batch of the loader into micro-batches of so many samples; the last one may have fewer."""
    partition: Partition = "parameters"
    """How layers are divided: by `parameters`, `uniform`, by how many have a class that matches (`type:regex`), by the
    `time` of each on the first batch; or how many layers each stage has, as in [5, 7]."""
    stage_map: Places = Field(default_factory=dict)
    """The stage of modules by name; others are of that of the module before them. Instead of `partition`."""
    gather: choice("step", "use") = "step"
    """Where parameters are cut: whole from a stage's first use in a step to its last; or gathered for each use."""
    seed_layers: Annotated[Bool, NOTHING_TO_SET] = False
    activation_checkpoint_interval: Count = 0
    """Of a `PipelineModule`, recompute runs of so many layers; 0 for none. Else `zero.recompute` says it."""
    pipe_partitioned: Annotated[Bool, NOTHING_TO_SET] = True
    grad_partitioned: Annotated[Bool, NOTHING_TO_SET] = True
    use_reentrant: Annotated[Bool, NOTHING_TO_SET] = True
