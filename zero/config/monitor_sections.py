"""The sections of DeepSpeed's monitors, and the alarm."""

from zero.config.values import Bool, Count, NotNegative, Section, choice, integer


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
