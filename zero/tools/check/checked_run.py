"""In a script that `zero check` runs: the run that it is started for, which is recorded, and ends after its steps."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from zero.config import Config
from zero.launch.contract import ASSIGNED
from zero.tools.assigned_run import AssignedRun
from zero.tools.check.plain_engine import PlainEngine, plain_engine
from zero.tools.check.recording import Recorder, load, save
from zero.tools.check.runs import Kind, Run, overridden


class CheckedRun(AssignedRun):
    """The run that `zero check` wants of this process, with a folder for its outcome, and that of the run to follow."""

    def __init__(self, run: Run, folder: Path, lead: Path | None = None) -> None:
        super().__init__(folder)
        self.run = run
        self.plain = run.kind is not Kind.ENGINE
        self._lead = load(lead) if lead is not None else None
        self._recorders: list[Recorder] = []

    @property
    def taken(self) -> int:
        """Optimizer steps that all engines have taken."""
        return min((recorder.engine.global_steps for recorder in self._recorders), default=0)

    def config(self, settings: Config, model: Any) -> dict[str, Any]:
        """The configuration that replaces the script's."""
        return overridden(settings, self.run)

    def plain_engine(self, model: Any, client: Any, model_parameters: Any, settings: Config) -> PlainEngine:
        """An unsharded engine of `model`; `settings` are those of the run."""
        return plain_engine(model, client, model_parameters, settings, self.run.kind)

    def watch(self, engine: Any) -> None:
        """Record this engine; the script ends when all that train have taken their steps."""
        recorder = Recorder(engine)
        recorder.after_step = self._stepped
        recorder.record_begin()
        if self._lead is not None and engine.optimizer is not None:
            engine.follow(self._lead.of_engine(len(self._training)))
        self._recorders.append(recorder)

    @property
    def _training(self) -> list[Recorder]:
        return [recorder for recorder in self._recorders if recorder.engine.optimizer is not None]

    def _stepped(self) -> None:
        training = self._training
        if any(recorder.engine.global_steps < self.run.steps for recorder in training):
            return
        save(self.folder, training[0].engine.global_rank, training)
        self.end("zero check")


def checked_run(values: dict[str, Any], folder: Path) -> CheckedRun:
    """What `environment` has told this process."""
    lead = values.pop("lead")
    run = Run(**{**values, "kind": Kind(values["kind"])})
    return CheckedRun(run, folder, Path(lead) if lead else None)


def environment(run: Run, folder: Path, lead: Path | None) -> dict[str, str]:
    """The variable that tells a script's processes their run."""
    values = {**dataclasses.asdict(run), "kind": run.kind.value, "folder": str(folder), "lead": lead and str(lead)}
    return {ASSIGNED: json.dumps(values)}
