"""What a check runs: every stage and accumulation count, and plain torch in the same precision."""

from __future__ import annotations

import copy
import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zero.config import Config
from zero.config.batch import MICRO, STEPS, TRAIN
from zero.config.unavailable import lookup
from zero.engine.assignment import unseen


class RunKind(enum.Enum):
    """Who trains; the values stand in names of runs.

    ENGINE: the engine, under the stage of the run;
    PLAIN:  plain torch, nothing cut, in the precision that the config says;
    NUDGED: plain torch from the weights of PLAIN at each step, off by one rounding: what rounding does to gradients;
    BESIDE: plain torch from the weights and with the gradients of a run of the engine at each step.
    """

    ENGINE = ""
    PLAIN = "plain torch"
    NUDGED = "plain torch, nudged"
    BESIDE = "plain torch beside "


@dataclass(frozen=True)
class CheckRun:
    """One training run of `steps` optimizer steps; `stage` is that of ENGINE, or which BESIDE follows, None elsewhere.

    `places`: a key of PLACES, where state rests in this run; None leaves that to the config.
    """

    kind: RunKind
    accumulation: int
    steps: int
    stage: int | None = None
    places: str | None = None

    @property
    def name(self) -> str:
        """What the table calls it."""
        stage = f"stage {self.stage}" if self.stage is not None else ""
        where = f", {self.places}" if self.places else ""
        return f"{self.kind.value}{stage}{where}, accumulation {self.accumulation}"


def engine_runs(stages: Sequence[int], accumulation: int, steps: int, offload: bool = False) -> Iterator[CheckRun]:
    """The runs that are judged, for one accumulation count; with `offload`, state in host memory as well."""
    for stage in stages:
        yield CheckRun(RunKind.ENGINE, accumulation, steps, stage)
        for places, section in PLACES.items() if offload and stage > 0 else ():
            if stage == 3 or "offload_param" not in section:
                yield CheckRun(RunKind.ENGINE, accumulation, steps, stage, places)


_HOST = {"device": "cpu"}
PLACES: Mapping[str, Mapping[str, Any]] = {
    "optimizer on cpu": {"offload_optimizer": _HOST},
    "half the optimizer on cpu": {"offload_optimizer": {**_HOST, "ratio": 0.5}},
    "parameters on cpu": {"offload_param": _HOST},
    "optimizer and parameters on cpu": {"offload_optimizer": _HOST, "offload_param": _HOST},
}


def check_counts(steps: int, stages: Sequence[int], accumulations: Sequence[int]) -> None:
    """Raise ValueError, by argument, for what cannot be run."""
    if steps < 1:
        raise ValueError(f"steps: got {steps}, wanted at least 1")
    if not stages or not set(stages) <= {0, 1, 2, 3}:
        raise ValueError(f"stages: got {list(stages)}, wanted some of 0, 1, 2 and 3")
    if not accumulations or min(accumulations) < 1:
        raise ValueError(f"accumulations: got {list(accumulations)}, wanted counts of at least 1")


def overridden(settings: Config, run: CheckRun) -> dict[str, Any]:
    """The user's config as `run` needs it; the micro-batch stays, the global batch follows the accumulation.

    The loss scale of fp16 is 1, moments are fp32, and Muon takes one matrix at a time as torch does: all else would be
    a difference that is meant.
    """
    raw = unseen(settings.raw)
    raw.pop("local_sgd", None)  # not all stages have it
    micro = settings.train_micro_batch_size_per_gpu
    raw |= {TRAIN: micro * run.accumulation * settings.world_size, MICRO: micro, STEPS: run.accumulation}
    if run.kind is RunKind.ENGINE:
        section = raw.get("zero_optimization")
        raw["zero_optimization"] = _placed({**(section if isinstance(section, dict) else {}), "stage": run.stage}, run)
        if run.stage == 0 and isinstance(raw.get("zero"), dict):
            raw["zero"].pop("shard_size", None)
    if settings.fp16.enabled:
        raw["fp16"] = {**raw["fp16"], "loss_scale": 1}
    states = lookup(raw, "optimizer.params.zero")  # any of the three may be "auto"
    if isinstance(states, dict):
        states["moments"] = "fp32"
    if settings.optimizer is not None and settings.optimizer.type.lower() == "muon":
        raw["optimizer"]["params"] = {**raw["optimizer"]["params"], "ns_method": "standard"}
    return raw


def _placed(section: dict[str, Any], run: CheckRun) -> dict[str, Any]:
    """The section with what may rest off the device on the run's stage, where the run says, and sizes that fit it."""
    old = {"offload_optimizer": "cpu_offload", "offload_param": "cpu_offload_param"}
    for key, least in (("offload_optimizer", 1), ("offload_param", 3)):
        if run.places is not None or run.stage < least:
            section.pop(key, None)
            section.pop(old[key], None)
    for key, least in (("mics_shard_size", 1), ("zero_hpz_partition_size", 3)):
        if run.stage < least:
            section.pop(key, None)
    return section | copy.deepcopy(dict(PLACES[run.places] if run.places is not None else {}))
