"""The promise: values of each step reach every sink under DeepSpeed's names, and a sink that fails ends no run."""

from __future__ import annotations

import csv
import errno
import importlib.util
import re
import sys
import types
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import config, make_net
from nodes import eventually
from ranks import listening
from scenario import Record, run, same

import zero
from zero.config import load
from zero.monitor.sinks import CometSink

SAMPLES = "Train/Samples/"


class Sink:
    """Keeps what it gets; fails at the event with this number."""

    def __init__(self, fails_at: int = 10**6) -> None:
        self.got: list[Any] = []
        self.calls = 0
        self.closed = False
        self._fails_at = fails_at

    def write_events(self, event_list: Any) -> None:
        self.calls += 1
        self.got += event_list
        if len(self.got) >= self._fails_at:
            raise OSError(errno.ENOSPC, "no space")

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def warned() -> Any:
    with listening() as lines:
        yield lines


def train(steps: int, *sinks: Any, values: Any = None, stage: int = 0, **more: Any) -> Record:
    """Some steps with these sinks, where `values(number)` are logged, and the settings `more`."""

    def loop(engine: Any, number: int, inputs: Any) -> torch.Tensor:
        for sink in sinks if number == 0 else ():
            engine.monitor.add(sink)
        loss = engine(*inputs)
        if values:
            engine.log(values(number))
        engine.backward(loss)
        return loss

    return run("net", stage, steps, loop=loop, **more)


def named(sink: Sink, name: str) -> list[tuple[float, int]]:
    return [(value, samples) for key, value, samples in sink.got if key == SAMPLES + name]


def table(path: Any) -> list[list[str]]:
    with path.open() as file:
        return list(csv.reader(file))


def test_a_sink_gets_each_step_under_deepspeeds_names():
    sink = Sink()
    logged = {0: {"accuracy": torch.tensor(0.25), "text": "no number"}, 1: {"seldom": 1.0}, 2: {"accuracy": 0.5}}
    losses = train(3, sink, values=logged.get).losses
    assert named(sink, "train_loss") == [(loss, 2 * number) for number, loss in enumerate(losses, 1)]
    assert named(sink, "lr") == [(0.01, 2), (0.01, 4), (0.01, 6)]
    assert named(sink, "accuracy") == [(0.25, 2), (0.5, 6)], "what was logged counts for its own step only"
    assert named(sink, "seldom") == [(1.0, 4)]
    assert len(named(sink, "grad_norm")) == 3 and not named(sink, "loss_scale") and not named(sink, "text")
    for phase in ("forward", "backward", "step"):
        assert all(milliseconds > 0 for milliseconds, _ in named(sink, f"elapsed_time_ms_{phase}"))
    assert sink.closed


@pytest.mark.ranks(2)
def test_rank_0_writes_the_mean_over_ranks():
    sink = Sink()
    losses = torch.tensor(train(2, sink, stage=2).losses).double()
    dist.all_reduce(losses)
    wanted = [(loss / 2, 4 * number) for number, loss in enumerate(losses.tolist(), 1)]
    assert named(sink, "train_loss") == (wanted if dist.get_rank() == 0 else [])


def test_a_sink_that_raises_is_dropped_after_one_warning_and_the_others_go_on(warned):
    bad, good = Sink(fails_at=1), Sink()
    assert same(train(4, bad, good), train(4)), "the run is the same"
    assert bad.calls == 1 and bad.closed and len(named(good, "train_loss")) == 4
    assert len(warned) == 1 and re.match(r"Sink at \w+: nothing more is written there", warned[0])
    assert "no space" in warned[0]


def test_events_of_the_scripts_own_reach_those_that_are_there():
    engine, *_ = zero.initialize(model=make_net(), config=config(0, 1))
    assert not engine.monitor.enabled
    engine.monitor.write_events([("nobody", 0.0, 0)])
    with pytest.raises(TypeError, match=r"monitor\.add\(\): got dict, wanted an object with write_events"):
        engine.monitor.add({})
    sinks = [Sink(fails_at=1), Sink(), Sink()]
    for sink in sinks[:2]:
        engine.monitor.add(sink)
    assert engine.monitor.enabled
    engine.monitor.write_events([("first", 1.0, 1)])
    assert eventually(lambda: sinks[0].closed)
    engine.monitor.add(sinks[2])
    engine.monitor.write_events([("second", 2.0, 2)])
    engine.destroy()
    first, second = ("first", 1.0, 1), ("second", 2.0, 2)
    assert [sink.got for sink in sinks] == [[first], [first, second], [second]], "none takes another's place"


def test_csv_files_have_deepspeeds_names_and_a_later_run_goes_on_with_them(tmp_path):
    section = {"enabled": True, "output_path": str(tmp_path)}
    losses = train(2, csv_monitor=section).losses
    folder = tmp_path / "DeepSpeedJobName"
    wanted = [["step", "train_loss"], ["2", str(losses[0])], ["4", str(losses[1])]]
    assert table(folder / "Train_Samples_train_loss.csv") == wanted
    train(1, csv_monitor=section)
    assert table(folder / "Train_Samples_lr.csv") == [["step", "lr"], ["2", "0.01"], ["4", "0.01"], ["2", "0.01"]]


def test_what_was_told_is_on_the_drive_without_a_further_step(tmp_path, monkeypatch):
    for name in ("_QUIET", "_FLUSH_EVERY"):
        monkeypatch.setattr(f"zero.monitor.monitor.{name}", 0.01)
    section = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    engine, *_ = zero.initialize(model=make_net(), config=config(0, 1, csv_monitor=section))
    engine.monitor.write_events([("Eval/a", 0.25, 8), ("Eval/a", 0.5, 16)])
    path = tmp_path / "job" / "Eval_a.csv"
    assert eventually(lambda: path.exists() and table(path) == [["step", "a"], ["8", "0.25"], ["16", "0.5"]])
    engine.destroy()


def test_a_full_disk_or_a_folder_that_cannot_be_made_is_one_warning(tmp_path, warned):
    """/dev/full takes nothing, as a disk that is full."""
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "Train_Samples_lr.csv").symlink_to("/dev/full")
    assert train(3, csv_monitor={"enabled": True, "output_path": str(tmp_path), "job_name": "job"}).steps == 3
    (text,) = warned
    assert text.startswith("csv_monitor: nothing more is written there, and the run goes on: OSError") and "28" in text
    file = str(tmp_path / "job" / "Train_Samples_train_loss.csv")
    train(1, csv_monitor={"enabled": True, "output_path": file}, zero={"report": file})
    assert [text.split(":")[0] for text in warned[1:]] == ["zero.report", "csv_monitor"]


@pytest.mark.parametrize("key", ["tensorboard", "wandb", "comet"])
def test_a_library_that_is_not_installed_is_an_error_of_initialize(key, monkeypatch):
    package = {"comet": "comet_ml"}.get(key, key)
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == package else found(name))
    wanted = rf"{key}\.enabled: the package {package} is not installed; pip install {package.replace('_', '-')}"
    with pytest.raises(ValueError, match=wanted):
        train(1, **{key: {"enabled": True}})


class Library(types.ModuleType):
    """Stands for wandb and comet_ml, with the calls that the sinks make."""

    def __init__(self, name: str, fails: bool = False) -> None:
        super().__init__(name)
        self.__spec__ = importlib.machinery.ModuleSpec(name, None)
        self.run = None
        self.calls: list[Any] = []
        self._fails = fails

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append((name, args, kwargs))
            if self._fails:
                raise ConnectionError("no network")
            return self

        return call


def test_wandb_gets_a_dict_of_each_step_and_is_finished(monkeypatch):
    library = Library("wandb")
    monkeypatch.setitem(sys.modules, "wandb", library)
    losses = train(2, wandb={"enabled": True, "group": "g", "team": "t", "project": "p"}).losses
    first, *logs, last = library.calls
    assert first == ("init", (), {"project": "p", "group": "g", "entity": "t"}) and last == ("finish", (), {})
    wanted = [(losses[0], {"step": 2}), (losses[1], {"step": 4})]
    assert [(args[0][SAMPLES + "train_loss"], kwargs) for _, args, kwargs in logs] == wanted


def test_wandb_without_network_is_one_warning(monkeypatch, warned):
    monkeypatch.setitem(sys.modules, "wandb", Library("wandb", fails=True))
    assert train(2, wandb={"enabled": True}).steps == 2
    assert warned == ["wandb: nothing is written there: ConnectionError: no network"]


def test_comet_gets_a_metric_once_in_so_many_samples(monkeypatch):
    library = Library("comet_ml")
    monkeypatch.setitem(sys.modules, "comet_ml", library)
    settings = {"enabled": True, "project": "p", "experiment_name": "n", "samples_log_interval": 4, "online": False}
    sink = CometSink(load({"train_batch_size": 1, "comet": settings}, 1).comet)
    for samples in (2, 4, 6, 10):
        sink.write_events([("loss", 0.5, samples)])
    sink.close()
    assert library.calls == [
        ("start", (), {"project": "p", "online": False}),
        ("set_name", ("n",), {}),
        *(("log_metric", ("loss", 0.5), {"step": samples}) for samples in (2, 6, 10)),
        ("end", (), {}),
    ]


@pytest.mark.long
def test_tensorboard_reads_its_files(tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed: pip install 'zero[monitors]'")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    losses = train(3, tensorboard={"enabled": True, "output_path": str(tmp_path), "job_name": "job"}).losses
    read = EventAccumulator(str(tmp_path / "job")).Reload().Scalars(SAMPLES + "train_loss")
    assert [(event.step, event.value) for event in read] == [(2 * n, pytest.approx(x)) for n, x in enumerate(losses, 1)]
