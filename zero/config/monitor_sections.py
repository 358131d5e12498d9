"""The sections of what watches a run: DeepSpeed's monitors and profiles, the alarm and `zero.profile`."""

from typing import Annotated

from pydantic import Field

from zero.config.unavailable import Idle
from zero.config.values import (
    Bool,
    Count,
    Counts,
    NotNegative,
    Positive,
    Section,
    StepRange,
    Texts,
    choice,
    integer,
)

_MEASURED = Idle("recomputation is counted as it happens, and is no part of the model's FLOPs")


class JobFolder(Section):
    """A monitor that writes files."""

    enabled: Bool = False
    """Write them."""
    output_path: str = ""
    """The folder of all jobs; by default the working directory."""
    job_name: str = "DeepSpeedJobName"
    """The folder of this job inside it."""


class TensorBoard(JobFolder):
    """Values of each step as files for TensorBoard; needs the package `tensorboard`."""


class Csv(JobFolder):
    """Values of each step as one CSV file for each name, with a column of samples so far and one of values."""


class Wandb(Section):
    """Values of each step for Weights & Biases; needs the package `wandb`. `WANDB_MODE=offline` needs no network."""

    enabled: Bool = False
    """Send them."""
    group: str | None = None
    """The group of the run."""
    team: str | None = None
    """The team, which wandb calls entity."""
    project: str = "deepspeed"
    """The project."""


class Comet(Section):
    """Values of each step for Comet; needs the package `comet_ml`, whose own settings replace missing keys."""

    enabled: Bool = False
    """Send them."""
    samples_log_interval: Count = 100
    """Samples between two values of one name."""
    project: str | None = None
    """The project."""
    workspace: str | None = None
    """The workspace."""
    api_key: str | None = None
    """The key. Prefer the variable COMET_API_KEY: a configuration is printed and saved."""
    experiment_name: str | None = None
    """The name of the experiment."""
    experiment_key: str | None = None
    """The experiment to continue."""
    online: Bool | None = None
    """false writes files to be sent later."""
    mode: choice("get", "create", "get_or_create") | None = None
    """get continues the experiment of experiment_key, create makes a new one, get_or_create does either."""


class Alarm(Section):
    """The reaction to a step whose loss or norm stands out: see docs/monitors.md. Off if neither is given."""

    loss: NotNegative | None = None
    """A loss stands out if it is more than this many standard deviations above the mean of the last `window` steps."""
    norm: NotNegative | None = None
    """The same for the norm of all gradients."""
    window: integer(2) = 100
    """Steps to look back at; before that many steps nothing stands out."""
    action: choice("log", "skip", "checkpoint") = "log"
    """log warns; skip also skips the update; checkpoint also saves after it."""
    folder: str | None = None
    """Where checkpoints go, for action checkpoint."""


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
