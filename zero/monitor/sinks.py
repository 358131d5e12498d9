"""DeepSpeed's monitors: sinks for the values of each step, on rank 0. Each library is imported when it is used."""

from __future__ import annotations

import csv
import importlib
import importlib.util
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from zero.config import Config
from zero.config.monitor_sections import Comet, JobFolder, Wandb
from zero.monitor.step_record import Event

_PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "comet": "comet_ml"}


class Sink(Protocol):
    """A destination of values; the script's own may be any object with this method, and optionally with these.

    flush(): called about every 5 seconds, whether or not there are values. close(): at the end, after `flush`.
    """

    def write_events(self, event_list: Sequence[Event]) -> None:
        """Take events (name, value, samples so far); called from a separate thread, one call at a time."""


class CsvSink:
    """A file for each name in `output_path`/`job_name`, with the header `step,NAME`; an existing one is continued.

    `flush` writes the rows, so that not every value of every step opens a file.
    """

    def __init__(self, section: JobFolder) -> None:
        self._folder = Path(section.output_path, section.job_name)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._rows: dict[str, list[tuple[int, float]]] = {}  # by name

    def write_events(self, event_list: Sequence[Event]) -> None:
        """Queue one row for the file of each name."""
        for name, value, samples in event_list:
            self._rows.setdefault(name, []).append((samples, value))

    def flush(self) -> None:
        """Append the rows to their files."""
        rows, self._rows = self._rows, {}
        for name, each in rows.items():
            path = self._folder / f"{name.replace('/', '_').replace(' ', '_')}.csv"
            with path.open("a", newline="") as file:
                header = [["step", name.rpartition("/")[2]]] if file.tell() == 0 else []
                csv.writer(file).writerows([*header, *each])


class TensorBoardSink:
    """Torch's writer of TensorBoard's files, in `output_path`/`job_name`; `flush` passes the values to it.

    The writer has its own thread, which each value would wake.
    """

    def __init__(self, section: JobFolder) -> None:
        self._summary = importlib.import_module("tensorboard.compat.proto.summary_pb2").Summary
        folder = str(Path(section.output_path, section.job_name))
        self._writer = importlib.import_module("torch.utils.tensorboard").FileWriter(folder, max_queue=1000)
        self._kept: list[tuple[Any, int, float]] = []
        self.close = self._writer.close

    def write_events(self, event_list: Sequence[Event]) -> None:
        """Queue a scalar for each; those of a step are one record, which is cheaper than one each."""
        for samples, events in itertools.groupby(event_list, lambda event: event[2]):
            values = [self._summary.Value(tag=name, simple_value=float(value)) for name, value, _ in events]
            self._kept.append((self._summary(value=values), samples, time.time()))

    def flush(self) -> None:
        """Write the queued scalars."""
        kept, self._kept = self._kept, []
        for record in kept:
            self._writer.add_summary(*record)
        self._writer.flush()


class WandbSink:
    """A run of Weights & Biases: the script's own, if it has started one."""

    def __init__(self, section: Wandb) -> None:
        library = importlib.import_module("wandb")
        own = library.run is None
        self._run = library.run or library.init(project=section.project, group=section.group, entity=section.team)
        if own:
            self.close = self._run.finish

    def write_events(self, event_list: Sequence[Event]) -> None:
        """Log them together; the step is the number of samples so far."""
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
        """Log a metric for each name that is due."""
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
    """Raise ValueError for an enabled sink without its library, with the command that installs it."""
    for key, package in _PACKAGES.items():
        if getattr(config, key).enabled and importlib.util.find_spec(package) is None:
            raise ValueError(
                f"{key}.enabled: the package {package} is not installed; pip install {package.replace('_', '-')}, or "
                f"leave {key} out of the configuration"
            )
