"""DeepSpeed's monitors: where the values of each step go, on rank 0. Each library is imported when it is used."""

from __future__ import annotations

import csv
import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from zero.config import Config
from zero.config.monitor_sections import Comet, JobFolder, Wandb
from zero.monitor.step_report import Event

_PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "comet": "comet_ml"}


class Sink(Protocol):
    """Somewhere values go; the script's own may be anything with this method, and with `close()` if it likes."""

    def write_events(self, event_list: Sequence[Event]) -> None:
        """Take (name, value, samples so far) of each; called from a thread of its own, with one call at a time."""


class CsvSink:
    """A file for each name in `output_path`/`job_name`, with the header `step,NAME`; one that is there goes on."""

    def __init__(self, section: JobFolder) -> None:
        self._folder = Path(section.output_path, section.job_name)
        self._folder.mkdir(parents=True, exist_ok=True)

    def write_events(self, event_list: Sequence[Event]) -> None:
        """Append one row to the file of each name."""
        for name, value, samples in event_list:
            path = self._folder / f"{name.replace('/', '_').replace(' ', '_')}.csv"
            with path.open("a", newline="") as file:
                header = [["step", name.rpartition("/")[2]]] if file.tell() == 0 else []
                csv.writer(file).writerows([*header, [samples, value]])


class TensorBoardSink:
    """Torch's SummaryWriter in `output_path`/`job_name`."""

    def __init__(self, section: JobFolder) -> None:
        writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter
        self._writer = writer(log_dir=str(Path(section.output_path, section.job_name)))
        self.close = self._writer.close

    def write_events(self, event_list: Sequence[Event]) -> None:
        """Add a scalar of each."""
        for name, value, samples in event_list:
            self._writer.add_scalar(name, value, samples)
        self._writer.flush()


class WandbSink:
    """A run of Weights & Biases: that of the script, if it has begun one."""

    def __init__(self, section: Wandb) -> None:
        library = importlib.import_module("wandb")
        own = library.run is None
        self._run = library.run or library.init(project=section.project, group=section.group, entity=section.team)
        if own:
            self.close = self._run.finish

    def write_events(self, event_list: Sequence[Event]) -> None:
        """Log them together, at the step that is the samples so far."""
        for samples in dict.fromkeys(event[2] for event in event_list):
            self._run.log({name: value for name, value, at in event_list if at == samples}, step=samples)


class CometSink:
    """An experiment of Comet; each name at most once in `samples_log_interval` samples."""

    def __init__(self, section: Comet) -> None:
        keys = ("api_key", "project", "workspace", "experiment_key", "mode", "online")
        given = {key: value for key in keys if (value := getattr(section, key)) is not None}
        self._experiment = importlib.import_module("comet_ml").start(**given)
        if section.experiment_name is not None:
            self._experiment.set_name(section.experiment_name)
        self.close = self._experiment.end
        self._interval = section.samples_log_interval
        self._sent: dict[str, int] = {}

    def write_events(self, event_list: Sequence[Event]) -> None:
        """Log a metric of each whose turn it is."""
        for name, value, samples in event_list:
            if samples - self._sent.get(name, samples - self._interval) >= self._interval:
                self._sent[name] = samples
                self._experiment.log_metric(name, value, step=samples)


SINKS: Mapping[str, Callable[[Any], Sink]] = {
    "tensorboard": TensorBoardSink,
    "wandb": WandbSink,
    "csv_monitor": CsvSink,
    "comet": CometSink,
}


def check_installed(config: Config) -> None:
    """Raise ValueError for a sink that is asked for whose library is not there, with the command that installs it."""
    for key, package in _PACKAGES.items():
        if getattr(config, key).enabled and importlib.util.find_spec(package) is None:
            raise ValueError(
                f"{key}.enabled: the package {package} is not installed; pip install {package.replace('_', '-')}, or "
                f"leave {key} out of the configuration"
            )
