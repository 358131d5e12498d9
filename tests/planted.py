"""Errors planted in the engine for the trust check to find, and right models for it to find nothing wrong with.

Each kind is an error that such an engine has had, or that the design must prevent. It is planted in the engine of one
run of the check, before its first step. What no check can see is left out: under bf16 a gradient that is a thousandth
too large, under Adam a clipping that is left away (`SGD` takes their place).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from matrix_models import CASES, UNITS, inputs, loss_of
from models import WIDTH, Net, batch, config
from torch import nn

import zero
from zero.core.tree import Leaf
from zero.core.unit import Unit
from zero.engine.check.compare import compare_runs
from zero.engine.check.in_process import Copies
from zero.engine.check.recording import Outcome
from zero.engine.check.runs import Kind, Run
from zero.optim.norm import RankReport, global_norm

STEPS = 2


class Dropping(nn.Module):
    """Dropout, batch statistics (a bias before them has a gradient of rounding alone), a frozen weight, a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(CASES["Twice"].model().blocks[:2])
        self.statistics = nn.BatchNorm1d(WIDTH)
        self.blocks[0].up.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for block in self.blocks:
            x = nn.functional.dropout(block(x), 0.2, self.training)
        x = self.statistics(x)
        return {"loss": x.square().mean() + x.sin().mean(), "features": x}


MODELS: dict[str, Callable[[], nn.Module]] = {
    "Net": Net,
    "Dropping": Dropping,
    **{name: case.model for name, case in CASES.items()},
}


class Form(NamedTuple):
    """Settings of a check: sections of the JSON, and whether there are two parameter groups."""

    more: dict[str, Any]
    groups: bool = False


def _optimizer(kind: str, **params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": kind, "params": params}}


FORMS = {
    "AdamW": Form(_optimizer("AdamW", lr=1e-2, weight_decay=0.1)),
    "SGD": Form(_optimizer("SGD", lr=0.1, momentum=0.9) | {"gradient_clipping": 1e-2}, groups=True),
    "bf16": Form(_optimizer("AdamW", lr=5e-2, weight_decay=0.1) | {"bf16": {"enabled": True}}),
    "Lion": Form(_optimizer("Lion", lr=1e-3, weight_decay=0.1) | {"gradient_clipping": 0.5}),
    "Adagrad": Form(_optimizer("Adagrad", lr=1e-2), groups=True),
    "bf16, 8bit": Form(_optimizer("Adam", lr=1e-3, zero={"moments": "8bit"}) | {"bf16": {"enabled": True}}),
}


def forms_of(model: str) -> list[str]:
    """Those that a model runs under: batch statistics in fp32 do not go with weights in bf16."""
    return [form for form in FORMS if model != "Dropping" or "bf16" not in form]


Plant = Callable[[Any, pytest.MonkeyPatch], None]


class Error(NamedTuple):
    """One kind: what is wrong, the form in which it shows, and how it is planted."""

    name: str
    form: str
    plant: Plant


ERRORS: list[Error] = []


def _kind(name: str, *forms: str, at: Callable[[Any, Any], None] | None = None) -> Callable[[Any], Any]:
    """Lists an error: a Plant or, with `at`, a function of the engine and what `at` hands to it."""

    def listed(change: Any) -> Any:
        plant = change if at is None else lambda engine, patch: at(engine, functools.partial(change, engine))
        ERRORS.extend(Error(name, form, plant) for form in forms)
        return change

    return listed


def _unit(engine: Any) -> Unit:
    """The unit that is tampered with: the first block, which every model runs on all ranks in every step."""
    return next(unit for unit in engine._sharded.trained if unit.plan.name.startswith("blocks.0"))


def _before_reduction(engine: Any, change: Callable[[Unit], None]) -> None:
    """Have `change(unit)` run on each unit with gradients before they are reduced."""
    for unit in engine._sharded.trained:

        def wrong(leaf: Leaf, unit: Unit = unit, reduce: Callable[[Leaf], None] = unit.reduce) -> None:
            if unit.gradients.flat is not None:  # else nothing came on this rank
                change(unit)
            reduce(leaf)

        unit.reduce = wrong


def _after_update(engine: Any, change: Callable[[torch.Tensor], None]) -> None:
    """Have `change(the unit's shard before the update)` run after each update."""
    update, unit = engine.optimizer.update, _unit(engine)

    def wrong(report: RankReport, *more: Any) -> dict[int, RankReport]:
        before = unit.exact().clone()
        everyone = update(report, *more)
        change(before)
        return everyone

    engine.optimizer.update = wrong


def _after_gather(engine: Any, change: Callable[[torch.Tensor], None]) -> None:
    """Have `change` run on the whole values of the unit, each time when they have come."""
    unit = _unit(engine)
    wait = unit.wait

    def wrong() -> None:
        there = unit.readable
        wait()
        if not there:
            change(unit.full)

    unit.wait = wrong


@_kind("one unit's gradient is a thousandth too large on one rank", "AdamW", at=_before_reduction)
def _too_large(engine: Any, unit: Unit) -> None:
    if unit is _unit(engine) and dist.get_rank() == 1:
        unit.gradients.flat.mul_(1.001)


@_kind("one rank's share of a unit's gradient is missing", "AdamW", "bf16", at=_before_reduction)
def _missing(engine: Any, unit: Unit) -> None:
    if unit is _unit(engine) and dist.get_rank() == 1:
        unit.gradients.flat.zero_()


@_kind("a micro-batch counts twice", "AdamW", at=_before_reduction)
def _twice(engine: Any, unit: Unit) -> None:
    if engine._sharded.reducer.leaf.micro_batch == 0:
        unit.gradients.flat.mul_(2)


@_kind("the last micro-batch is lost", "SGD", at=_before_reduction)
def _lost(engine: Any, unit: Unit) -> None:
    if engine._sharded.reducer.boundary:
        unit.gradients.flat.zero_()


@_kind("the mean is taken twice", "AdamW")
def _mean(engine: Any, patch: pytest.MonkeyPatch) -> None:
    engine.optimizer._mean /= 2


@_kind("the gradients of two parameters are mixed up", "AdamW")
def _mixed(engine: Any, patch: pytest.MonkeyPatch) -> None:
    spans = _unit(engine).gradients._spans
    pairs = [(a, b) for b in range(len(spans)) for a in range(b) if spans[a][0].numel == spans[b][0].numel]
    one, other = pairs[0]
    spans[one], spans[other] = (spans[other][0], spans[one][1]), (spans[one][0], spans[other][1])


@_kind("there is no weight decay", "AdamW")
def _no_decay(engine: Any, patch: pytest.MonkeyPatch) -> None:
    for group in engine.optimizer.param_groups:
        group["weight_decay"] = 0.0


@_kind("the learning rate of one rank is 3 % off", "AdamW")
def _rate_of_rank(engine: Any, patch: pytest.MonkeyPatch) -> None:
    for group in engine.optimizer.param_groups:
        group["lr"] *= 1 + 0.03 * dist.get_rank()


@_kind("the learning rate of one group is 3 % off", "SGD")
def _rate_of_group(engine: Any, patch: pytest.MonkeyPatch) -> None:
    engine.optimizer.param_groups[0]["lr"] *= 1.03


@_kind("the bias correction is one step behind", "AdamW", at=_after_update)
def _correction(engine: Any, before: torch.Tensor) -> None:
    unit = _unit(engine)
    group = engine.optimizer.param_groups[unit.plan.group]
    engine.optimizer.shard_optimizer.set_number(unit, group, "step", engine.global_steps)


@_kind("one element of a shard is not updated", "AdamW", at=_after_update)
def _element(engine: Any, before: torch.Tensor) -> None:
    unit = _unit(engine)
    at = int((unit.exact() - before).abs().argmax())
    if dist.get_rank() == 0:
        unit.write_exact(at, before[at : at + 1])


@_kind("a unit is not updated on one rank", "SGD", at=_after_update)
def _not_updated(engine: Any, before: torch.Tensor) -> None:
    if dist.get_rank() == 1:
        _unit(engine).write_exact(0, before)


@_kind("the forward computes with the weights before the last update", "AdamW", "bf16")
def _stale(engine: Any, patch: pytest.MonkeyPatch) -> None:
    known: list[torch.Tensor] = []

    def change(full: torch.Tensor) -> None:
        known[:] = known or [full.clone()]
        full.copy_(known[0])

    _after_gather(engine, change)


@_kind("two elements of a gathered parameter are swapped", "AdamW", at=_after_gather)
def _swapped(engine: Any, full: torch.Tensor) -> None:
    one, other = int(full.argmax()), int(full.argmin())
    full[[one, other]] = full[[other, one]]


@_kind("gradients are not clipped", "SGD")
def _unclipped(engine: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(engine.optimizer, "clipping", 0.0)  # raises where there is no such attribute


@_kind("the norm leaves a unit out", "SGD")
def _norm(engine: Any, patch: pytest.MonkeyPatch) -> None:
    def wrong(units: Any, mesh: Any, report: RankReport) -> Any:
        return global_norm([unit for unit in units if unit is not _unit(engine)], mesh, report)

    patch.setattr("zero.optim.optimizer.global_norm", wrong)


@_kind("the momentum is forgotten", "SGD", at=_after_update)
def _forgotten(engine: Any, before: torch.Tensor) -> None:
    for param in _unit(engine).params:
        zero.utils.safe_set_full_optimizer_state(param, torch.zeros(param.shape), "momentum_buffer")


@_kind("masters are rounded to the parameters at each step", "bf16", at=_after_update)
def _rounded(engine: Any, before: torch.Tensor) -> None:
    unit = _unit(engine)
    unit.master.follow(0, unit.shard.numel())


# --- checks ---------------------------------------------------------------------------------------------------


def _batch(model: str, seed: int, number: int, dtype: torch.dtype) -> tuple[Any, ...]:
    rank, step = dist.get_rank(), 1000 * seed + number
    if model == "Net":
        tokens, targets = batch(step, 4)
        return tokens[2 * rank : 2 * rank + 2], targets[2 * rank : 2 * rank + 2]
    if model == "Dropping":
        return (torch.cat([inputs(step, rank), inputs(step, 2 + rank)]).to(dtype),)
    return inputs(step, rank).to(dtype), rank, number


def _verdicts(model: str, form: str, seed: int, stage: int, plants: list[Plant | None]) -> list[str]:
    """What the check says of one seed of a model, with each plant in turn."""
    torch.manual_seed(seed)
    made, given = MODELS[model](), FORMS[form]
    accumulation = 2 + seed % 2
    more = given.more | ({"zero": {"units": UNITS[model]}} if model in UNITS else {})
    groups: Any = None
    if given.groups:
        blocks = [param for param in made.blocks.parameters() if param.requires_grad]
        rest = [param for param in made.parameters() if param.requires_grad and all(param is not one for one in blocks)]
        groups = [{"params": blocks, "lr": 0.05}, *([{"params": rest}] if rest else [])]
    settings = config(stage, dist.get_world_size(), accumulation=accumulation, **{"gradient_clipping": 0} | more)
    engine, *_ = zero.initialize(model=made, model_parameters=groups, config=settings)
    dtype = next(param.dtype for param in made.parameters())
    batches = [_batch(model, seed, number, dtype) for number in range(STEPS * accumulation)]
    try:
        torch.manual_seed(seed)
        copies = Copies(engine, engine._initialize, batches, lambda model, one: loss_of(model(*one)))
        train = _planting(copies, iter(plants))
        report = compare_runs(STEPS, [stage] * len(plants), [accumulation], False, train)
    finally:
        engine.destroy()
    return [row.verdict for row in report.rows]


def _planting(copies: Copies, plants: Iterator[Plant | None]) -> Callable[[Run, Outcome | None], Outcome]:
    """What trains, with an error of `plants` in each run of the engine."""

    def train(run: Run, lead: Outcome | None) -> Outcome:
        with pytest.MonkeyPatch.context() as patch:
            plant = next(plants) if run.kind is Kind.ENGINE else None
            if plant is not None:
                build = copies._build

                def built(model: nn.Module, run: Run) -> Any:
                    engine = build(model, run)
                    plant(engine, patch)
                    return engine

                patch.setattr(copies, "_build", built)
            return copies.train(run, lead)

    return train


def alarms(seed: int, models: Iterable[str] = MODELS) -> dict[str, str | None]:
    """False alarms about right models, by model, None where there is none; form and stage change with the seed."""
    found: dict[str, str | None] = {}
    for index, model in enumerate(models):
        forms = forms_of(model)
        form, stage = forms[(seed + index) % len(forms)], seed % 4
        verdict = _verdicts(model, form, seed, stage, [None])[0]
        good = verdict in ("same bits", "within rounding")
        where = f"{model}, {form}, seed {seed}, stage {stage}, {dist.get_world_size()} ranks"
        found[model] = None if good else f"{where}: {verdict}"
    return found


def planted(model: str, seed: int) -> dict[str, bool]:
    """Which planted errors are found in a model, by name and form."""
    found = {}
    for form in [form for form in forms_of(model) if any(error.form == form for error in ERRORS)]:
        errors = [error for error in ERRORS if error.form == form]
        verdicts = _verdicts(model, form, seed, 3, [error.plant for error in errors])
        pairs = zip(errors, verdicts, strict=True)
        found |= {f"{error.name} ({form})": verdict.startswith("DIFFERS") for error, verdict in pairs}
    return found
