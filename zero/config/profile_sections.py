"""The sections of profiles: DeepSpeed's `flops_profiler` and `comms_logger`, and `zero.profile`."""

from typing import Annotated

from pydantic import Field

from zero.config.unavailable import Idle
from zero.config.values import Bool, Count, Counts, NotNegative, Positive, Section, StepRange, Texts, integer

_MEASURED = Idle("recomputation is counted as it happens, and is no part of the model's FLOPs")


class FlopsProfiler(Section):
    """FLOPs, parameters and time of the model's modules in one step, and MFU from then on."""

    enabled: Bool = False
    """Count them."""
    recompute_fwd_factor: Annotated[NotNegative, _MEASURED] = 0.0
    profile_step: Count = 1
    """The number of steps before the counted one; the step after that is timed, and then the table is printed."""
    module_depth: integer(-1) = -1
    """The depth to which modules are listed; -1 means all."""
    top_modules: Positive = 1
    """With detailed false, how many modules of each depth are listed: those with the most FLOPs."""
    detailed: Bool = True
    """List all modules."""
    output_file: str | None = None
    """Where rank 0 writes the table; by default into the log."""


class CommsLogger(Section):
    """Messages between ranks; `engine.log_comms_summary()` prints them."""

    enabled: Bool = False
    """Record each collective."""
    prof_all: Bool = True
    """All operations."""
    prof_ops: Texts = Field(default_factory=list)
    """With prof_all false, the operations to record: names of the table, or DeepSpeed's, such as all_gather."""
    verbose: Bool = False
    """Also log each wait for a message."""
    debug: Annotated[Bool, Idle("lines name the unit, and not the function that has called")] = False


class Profile(Section):
    """Steps that torch's profiler traces, with the names of units and operations."""

    steps: StepRange | None = None
    """The first and the last of them, counted from 1 as in the log."""
    dir: str = "profile"
    """Where each rank writes rank-N.trace.json, for https://ui.perfetto.dev, and rank-N.summary.txt."""
    ranks: Counts | None = None
    """The ranks that do; default: all."""
