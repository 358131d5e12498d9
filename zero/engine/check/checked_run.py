"""In a script that `zero check` runs: the run that it is started for, which is recorded, and ends after its steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zero.config import Config
from zero.core.owner import cut_of
from zero.engine import assignment
from zero.engine.arguments import make_scheduler
from zero.engine.assignment import AssignedRun, Given
from zero.engine.check.plain_engine import PlainEngine
from zero.engine.check.recording import RunRecorder, load, save
from zero.engine.check.runs import CheckRun, RunKind, overridden


class CheckedRun(AssignedRun):
    """The run that `zero check` wants of this process, with a folder for its outcome, and that of the run to follow."""

    def __init__(self, run: CheckRun, folder: Path, lead: Path | None = None) -> None:
        super().__init__(folder)
        self.run = run
        self.plain = run.kind is not RunKind.ENGINE
        self._lead = load(lead) if lead is not None else None
        self._recorders: list[RunRecorder] = []

    @property
    def taken(self) -> int:
        """Optimizer steps that all engines have taken."""
        return min((recorder.engine.global_steps for recorder in self._recorders), default=0)

    def config(self, settings: Config, model: Any) -> dict[str, Any]:
        """The configuration that replaces the script's."""
        return overridden(settings, self.run)

    def engine(self, make: Callable[[Given], Any], given: Given) -> Any:
        """See `ScriptRun.engine`."""
        return super().engine(self._plain if self.plain else make, given)

    def _plain(self, given: Given) -> PlainEngine:
        """An unsharded engine. ValueError where the script has made parts of parameters."""
        for name, param in given.model.named_parameters():
            if cut_of(param) is not None:
                why = "is a part of a larger one, which the script has made: no process has the whole model to compare"
                raise ValueError(f"zero check: parameter '{name}' {why}")
        *parts, lr_scheduler, settings = given
        engine = PlainEngine(*parts, settings, self.run.kind)
        engine.lr_scheduler = make_scheduler(lr_scheduler, engine.optimizer, settings)
        return engine

    def watch(self, engine: Any) -> None:
        """Record this engine; the script ends when all that train have taken their steps."""
        recorder = RunRecorder(engine, self._stepped)
        recorder.record_begin()
        if self._lead is not None and engine.optimizer is not None:
            engine.follow(self._lead.of_engine(len(self._training)))
        self._recorders.append(recorder)

    @property
    def _training(self) -> list[RunRecorder]:
        return [recorder for recorder in self._recorders if recorder.engine.optimizer is not None]

    def _stepped(self) -> None:
        training = self._training
        if all(recorder.engine.global_steps >= self.run.steps for recorder in training):
            save(self.folder, training[0].engine.global_rank, training)
            self.end("zero check")


def make_run(folder: Path, lead: str | None, **values: Any) -> CheckedRun:
    """What `environment` has told this process."""
    return CheckedRun(CheckRun(**{**values, "kind": RunKind(values["kind"])}), folder, Path(lead) if lead else None)


def environment(run: CheckRun, folder: Path, lead: Path | None) -> dict[str, str]:
    """The variable that tells a script's processes their run."""
    values = {**dataclasses.asdict(run), "kind": run.kind.value}
    return assignment.environment(__name__, folder, lead=lead and str(lead), **values)
