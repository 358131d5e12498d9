"""In the script that `zero check` runs: builds the engine that this run asks for, and ends it after its steps."""

from __future__ import annotations

import atexit
import dataclasses
import functools
import json
import logging
import os
from pathlib import Path
from typing import Any

import torch.distributed as dist

from zero.config import Config
from zero.core.mesh import local_device
from zero.engine.check.plain import PlainEngine, plain_optimizer
from zero.engine.check.recording import Recorder, load, save
from zero.engine.check.runs import Kind, Run, overridden
from zero.log import rank_zero

VARIABLE = "ZERO_CHECK"
"""Set by `zero check` for the script: the run and the folder for what comes of it, as JSON."""


class Order:
    """What `zero check` wants of this process: one run, and its outcome in a folder; `lead` is that of another run."""

    def __init__(self, run: Run, folder: Path, lead: Path | None = None) -> None:
        self.run = run
        self.folder = folder
        self._lead = load(lead) if lead is not None else None
        self._recorders: list[Recorder] = []
        atexit.register(self._came_short)

    @property
    def plain(self) -> bool:
        """Whether this run is one in plain torch."""
        return self.run.kind is not Kind.ENGINE

    def config(self, settings: Config) -> dict[str, Any]:
        """The configuration that replaces the script's."""
        return overridden(settings, self.run)

    def watch(self, engine: Any) -> None:
        """Record this engine; the script ends when all that train have taken their steps."""
        recorder = Recorder(engine)
        recorder.after_step = self._stepped
        recorder.look_at_begin()
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
        if dist.is_initialized():
            dist.barrier()  # a rank that ends early may take what others still need with it
        rank_zero(logging.INFO, "zero check: %d steps are done, which is all; the script ends here", self.run.steps)
        raise SystemExit(0)

    def _came_short(self) -> None:
        """Leave word of how far the script came."""
        steps = [recorder.engine.global_steps for recorder in self._recorders]
        if self.folder.is_dir():
            (self.folder / "steps.txt").write_text(str(min(steps, default=0)))


@functools.cache
def order_of_environment() -> Order | None:
    """The order that this process was started with; None outside of `zero check`. Read once."""
    text = os.environ.get(VARIABLE)
    if text is None:
        return None
    given = json.loads(text)
    run = Run(Kind(given["kind"]), given["accumulation"], given["steps"], given["stage"], given["places"])
    return Order(run, Path(given["folder"]), Path(given["lead"]) if given["lead"] else None)


def environment(run: Run, folder: Path, lead: Path | None) -> dict[str, str]:
    """What the script's processes need to find their order."""
    given = {**dataclasses.asdict(run), "kind": run.kind.value}
    return {VARIABLE: json.dumps({**given, "folder": str(folder), "lead": str(lead) if lead is not None else None})}


def make_plain(model: Any, client: Any, model_parameters: Any, settings: Config, kind: Kind) -> PlainEngine:
    """An unsharded engine of `model`; `settings` are those of the run."""
    if model_parameters is not None:
        model_parameters = list(model_parameters)
    optimizer_first = client is not None  # a client's optimizer is bound to the parameters as they are
    optimizer = plain_optimizer(model, client, model_parameters, settings) if optimizer_first else None
    engine = PlainEngine(model, settings, kind, local_device())
    engine.bind(optimizer or plain_optimizer(model, None, model_parameters, settings))
    return engine
