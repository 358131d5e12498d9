"""In a script that `zero tune` runs: other values in its configuration, measured steps, and in one run the plan."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from zero.config import Config
from zero.config.override import apply
from zero.core.comm import local_device
from zero.core.owner import is_released
from zero.engine import assignment
from zero.engine.assignment import AssignedRun, unseen, wrap
from zero.engine.reality import meta_copy
from zero.memory.available import available_nbytes, give_back
from zero.sizes.choice import StageChoice, own_choice
from zero.sizes.cost import POLICIES
from zero.sizes.estimate import PlanRow
from zero.sizes.model_trace import inputs_of, trace
from zero.sizes.rates import Rates
from zero.tools.plan.rank_rates import measure
from zero.tools.plan.search import USABLE, Setup, candidates, choices_of

OUT_OF_MEMORY = "out of memory"
_LOOK = 0.01  # seconds between two looks at memory
WARMUP = 3  # steps: memory is taken that stays, the order of uses is learnt, and the third is looked at, see reality.py


@dataclasses.dataclass(frozen=True)
class Trial:
    """One run of `steps` measured steps with other values in the configuration, by their paths.

    memory: bytes that a rank may take; None: what there is for it. space: of what the plan is wanted, None for no plan.
    """

    sets: Mapping[str, Any]
    steps: int
    memory: float | None = None
    space: Sequence[str] | None = None

    def environment(self, folder: Path) -> dict[str, str]:
        """The variable that tells a script's processes of it."""
        return assignment.environment(__name__, folder, **dataclasses.asdict(self))


class TriedRun(AssignedRun):
    """Measures the first engine of the script that trains, and writes to the folder what it finds.

    rank-N.json: seconds of each step, bytes and samples; plan.json: the configuration and the rows of the plan.
    """

    def __init__(self, trial: Trial, folder: Path) -> None:
        super().__init__(folder)
        self._trial = trial
        self._engine: Any = None
        self._ends: list[float] = []  # of steps
        self._raw: Mapping[str, Any] = {}
        self._before = self._peak = 0  # bytes of this process without its model at `initialize`; the most beyond them
        self._samples = 0
        self._model: nn.Module | None = None
        self._rates: Rates | None = None

    @property
    def taken(self) -> int:
        """Optimizer steps so far."""
        return len(self._ends)

    def config(self, settings: Config, model: nn.Module) -> dict[str, Any]:
        """The script's with the values of the trial. Measures the rates where a plan is wanted; collective."""
        if not self._raw:
            self._raw = settings.raw
            if self._trial.space is not None:
                self._model = meta_copy(model)  # before it is an engine's
                self._rates = Rates(name="measured", **measure(settings.autocast_dtype or settings.compute_dtype))
            self._limit(sum(param.nbytes for param in model.parameters() if not is_released(param)))
        return apply(unseen(settings.raw), self._trial.sets)

    def _limit(self, held: int) -> None:
        """End the process when it takes more memory than it may; `held`: bytes of the model."""
        device, limit = local_device(), self._trial.memory
        if device.type == "cuda":
            total = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, (limit or total) / total), device)
            torch.cuda.reset_peak_memory_stats(device)
            return
        give_back()
        self._before = _private() - held
        most = available_nbytes(int(os.environ.get("LOCAL_WORLD_SIZE", "1"))) if limit is None else limit
        threading.Thread(target=self._watch_memory, args=(most,), daemon=True).start()

    def _watch_memory(self, most: float) -> None:
        while True:
            self._peak = max(self._peak, _private() - self._before)
            if self._peak > most:
                sys.stderr.write(f"{OUT_OF_MEMORY}: {self._peak:,} bytes, of {most:,.0f} for this rank\n")
                os._exit(1)  # now: what is freed on the way would come too late
            time.sleep(_LOOK)

    def watch(self, engine: Any) -> None:
        """Measure the steps of this engine, if it is the first that trains."""
        if self._engine is None and engine.optimizer is not None:
            self._engine = engine
            wrap(engine, "step", stepped=self._stepped)
            self._seen = engine.register_forward_pre_hook(self._see, with_kwargs=True)

    def _see(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """The first forward."""
        self._seen.remove()
        tensors = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor) and leaf.dim())
        self._samples = next((tensor.shape[0] for tensor in tensors), 0)
        if self._trial.space is not None and self._engine.global_rank == 0:
            self._write("plan", self._plan(args, kwargs))

    def _stepped(self) -> None:
        device = self._engine.device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self._ends.append(time.perf_counter())
        if self.taken == WARMUP + self._trial.steps:
            times = self._ends[WARMUP - 1 :]
            found = {"seconds": [end - begin for begin, end in itertools.pairwise(times)]}
            # The most that this rank has taken: of the device, or of main memory beyond what it began with.
            memory = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else self._peak
            found |= {"memory": memory, "samples": self._samples}
            self._write(f"rank-{self._engine.global_rank}", found)
            self.end("zero tune")

    def _write(self, name: str, values: Mapping[str, Any]) -> None:
        (self.folder / f"{name}.json").write_text(json.dumps(values), encoding="utf-8")

    def _plan(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The configuration, the name of what it is now, and the rows that the space has; or the error."""
        config, device, model, rates = self._engine._config, self._engine.device.type, self._model, self._rates
        settings = config.model_copy(update={"raw": {**config.raw, "train_batch_size": config.train_batch_size}})
        if self._trial.memory is not None:
            rates = dataclasses.replace(rates, device_memory=self._trial.memory / USABLE)
        try:
            cost = trace(model, inputs_of(model, args, kwargs), settings, device)
        except ValueError as error:
            return {"error": str(error)}
        setup = Setup(model, cost, settings, rates, settings.summed, device != "cpu")
        own, space = own_choice(settings), self._trial.space
        policies = [setup.policy]
        if "recomputation" in space and any(unit.recomputable for unit in cost.units):
            policies = [policy for policy in POLICIES if policy != "host" or setup.mirrored]
        rows = candidates(setup, [choice for choice in choices_of(setup) if _within(choice, own, space)], policies)
        size = settings.train_micro_batch_size_per_gpu
        rows = [_plain(row, setup.mirrored) for row in rows if "micro_batch" in space or row.micro_batch == size]
        name = _name(own, setup.policy, size, settings.gradient_accumulation_steps)
        return {"config": self._raw, "own": name, "rows": rows}


def make_run(folder: Path, **values: Any) -> TriedRun:
    """What `Trial.environment` has told this process."""
    return TriedRun(Trial(**values), folder)


def _within(choice: StageChoice, own: StageChoice, space: Sequence[str]) -> bool:
    """Whether it differs from the configuration's only in what may differ."""
    same = {
        "stage": choice.stage == own.stage,
        "placement": (choice.optimizer, choice.params) == (own.optimizer, own.params),
        "mesh": (choice.shard_size, choice.secondary) == (own.shard_size, own.secondary),
    }
    return all(equal or axis in space for axis, equal in same.items())


def _name(choice: StageChoice, policy: str, micro_batch: int, accumulation: int) -> str:
    recomputed = "" if policy == "none" else f", recomputing {policy}"
    return f"stage {choice}{recomputed}, {micro_batch} x {accumulation}"


def _plain(row: PlanRow, mirrored: bool) -> dict[str, Any]:
    """What JSON can hold of a row."""
    return {
        "name": _name(row.choice, row.policy, row.micro_batch, row.accumulation),
        "group": str(row.choice),
        "micro_batch": row.micro_batch,
        "seconds": row.step.step,
        "bytes": row.peak + (0 if mirrored else row.host.memory + row.inputs_on_host),
        "sent": row.links.sent,
        "lacks": list(row.lacks),
        "sets": dict(row.sets),
    }


def _private() -> int:
    """Bytes of memory that are this process's own; pages of mapped files are the system's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))
