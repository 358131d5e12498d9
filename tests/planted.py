"""Errors planted in the engine for the trust check to find, and right models for it to find nothing wrong with.

An error is planted in the engine of one run of the check, before its first step, and by what scripts have too: hooks,
parameter groups, the JSON, and the functions of `zero.utils`. What no check can see is left out: under bf16 a gradient
that is a thousandth too large, under Adam a clipping that is left away (`SGD` takes their place).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from matrix_models import CASES, UNITS, inputs, loss_of
from models import WIDTH, Net, batch, config
from torch import nn

import zero
from zero.utils import (
    safe_get_full_fp32_param,
    safe_set_full_fp32_param,
)

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


def _optimizer(kind: str, **params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": kind, "params": params}}


BF16 = {"bf16": {"enabled": True}}
FORMS: dict[str, dict[str, Any]] = {  # sections of the JSON
    "AdamW": _optimizer("AdamW", lr=1e-2, weight_decay=0.1),
    "SGD": _optimizer("SGD", lr=0.1, momentum=0.9) | {"gradient_clipping": 1e-2},
    "bf16": _optimizer("AdamW", lr=5e-2, weight_decay=0.1) | BF16,
    "Lion": _optimizer("Lion", lr=1e-3, weight_decay=0.1) | {"gradient_clipping": 0.5},
    "Adagrad": _optimizer("Adagrad", lr=1e-2),
    "bf16, 8bit": _optimizer("Adam", lr=1e-3, zero={"moments": "8bit"}) | BF16,
}
TWO_GROUPS = ("SGD", "Adagrad")


def forms_of(model: str) -> list[str]:
    """Those that a model runs under: batch statistics in fp32 do not go with weights in bf16."""
    return [form for form in FORMS if model != "Dropping" or "bf16" not in form]


class Error(NamedTuple):
    """What is wrong, the form in which it shows, sections of the JSON that make it, and what is done to the engine."""

    name: str
    form: str
    section: dict[str, Any]
    plant: Callable[[Any], None] = lambda engine: None


ERRORS = [
    Error("gradients are not clipped", "SGD", {"gradient_clipping": 0}),
]


def _planted(name: str, *forms: str) -> Callable[[Any], Any]:
    """Lists an error: a function of the engine."""

    def listed(plant: Any) -> Any:
        ERRORS.extend(Error(name, form, {}, plant) for form in forms)
        return plant

    return listed


def _block(engine: Any) -> list[nn.Parameter]:
    """What is trained of the first block, which every model runs on all ranks in every step."""
    return [param for param in engine.module.blocks[0].parameters() if param.requires_grad]


def _turn(engine: Any) -> int:
    """The number of the micro-batch within its step."""
    return engine.micro_steps % engine.gradient_accumulation_steps()


def _on_gradients(engine: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    for param in _block(engine):
        param.register_hook(change)


@_planted("a gradient is a thousandth too large on one rank", "AdamW")
def _too_large(engine: Any) -> None:
    _on_gradients(engine, lambda grad: grad * (1.001 if dist.get_rank() == 1 else 1))


@_planted("one rank's share of a gradient is missing", "AdamW", "bf16")
def _missing(engine: Any) -> None:
    _on_gradients(engine, lambda grad: grad * (dist.get_rank() != 1))


@_planted("the last micro-batch is lost", "SGD")
def _lost(engine: Any) -> None:
    _on_gradients(engine, lambda grad: grad * (_turn(engine) < engine.gradient_accumulation_steps() - 1))


def _all_groups(engine: Any, **numbers: Any) -> None:
    for group in engine.optimizer.param_groups:
        group.update(numbers)


_planted("the moments forget too fast", "AdamW")(functools.partial(_all_groups, betas=(0.8, 0.9)))


@_planted("the learning rate of one group is 3 % off", "SGD")
def _rate_of_group(engine: Any) -> None:
    engine.optimizer.param_groups[0]["lr"] *= 1.03


def _after_update(read: Callable[[nn.Parameter], Any]) -> Callable[[Any], Any]:
    """Have a function of the parameter, and of what `read` said of it before, run after each update."""

    def made(change: Callable[[nn.Parameter, Any], None]) -> Callable[[Any], None]:
        def plant(engine: Any) -> None:
            real = engine.step

            def step() -> None:
                params = _block(engine) if _turn(engine) == engine.gradient_accumulation_steps() - 1 else []
                before = [read(param) for param in params]
                real()
                for param, kept in zip(params, before, strict=True):
                    change(param, kept)

            engine.step = step

        return plant

    return made


@_planted("one element of a parameter is not updated", "AdamW")
@_after_update(safe_get_full_fp32_param)
def _element(param: nn.Parameter, before: torch.Tensor) -> None:
    after = safe_get_full_fp32_param(param)
    at = int((after - before).abs().argmax())
    after.view(-1)[at] = before.view(-1)[at]
    safe_set_full_fp32_param(param, after)


@_planted("masters are rounded to the parameters at each step", "bf16")
@_after_update(lambda param: None)
def _rounded(param: nn.Parameter, before: None) -> None:
    safe_set_full_fp32_param(param, safe_get_full_fp32_param(param).bfloat16().float())


def _in_forward(engine: Any, change: Callable[[int, torch.Tensor], None]) -> None:
    """Have `change` run on the values that the first block computes with, and their numbers."""

    def hook(*_: Any) -> None:
        for number, param in enumerate(_block(engine)):
            change(number, param.data)

    engine.module.blocks[0].register_forward_pre_hook(hook)


@_planted("the forward computes with the weights before the last update", "AdamW", "bf16")
def _stale(engine: Any) -> None:
    known: dict[int, torch.Tensor] = {}
    _in_forward(engine, lambda number, values: values.copy_(known.setdefault(number, values.clone())))


# --- checks ---------------------------------------------------------------------------------------------------


def _batch(model: str, seed: int, number: int, dtype: torch.dtype) -> tuple[Any, ...]:
    rank, step = dist.get_rank(), 1000 * seed + number
    if model == "Net":
        tokens, targets = batch(step, 4)
        return tokens[2 * rank : 2 * rank + 2], targets[2 * rank : 2 * rank + 2]
    if model == "Dropping":
        return (torch.cat([inputs(step, rank), inputs(step, 2 + rank)]).to(dtype),)
    return inputs(step, rank).to(dtype), rank, number


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    """The blocks, with a learning rate of their own, and what else is trained."""
    blocks = [param for param in model.blocks.parameters() if param.requires_grad]
    inside = set(map(id, blocks))
    rest = [param for param in model.parameters() if param.requires_grad and id(param) not in inside]
    return [{"params": blocks, "lr": 0.05}, *([{"params": rest}] if rest else [])]


def verdicts(model: str, form: str, seed: int, stage: int, errors: list[Error | None]) -> list[str]:
    """What the check says of one seed of a model, with each error in turn."""
    torch.manual_seed(seed)
    made, accumulation = MODELS[model](), 2 + seed % 2
    more = FORMS[form] | ({"zero": {"units": UNITS[model]}} if model in UNITS else {})
    settings = config(stage, dist.get_world_size(), accumulation=accumulation, **more)
    groups = _groups(made) if form in TWO_GROUPS else None
    engine, *_ = zero.initialize(model=made, model_parameters=groups, config=settings)
    initialize, turns = engine._initialize, iter(errors)

    def planted(config: dict[str, Any], **given: Any) -> Any:
        error = next(turns)
        made = initialize(config=config | (error.section if error else {}), **given)
        if error:
            error.plant(made[0])
        return made

    engine._initialize = planted
    dtype = next(param.dtype for param in made.parameters())
    batches = [_batch(model, seed, number, dtype) for number in range(STEPS * accumulation)]
    torch.manual_seed(seed)
    how = {"steps": STEPS, "stages": [stage] * len(errors), "accumulations": [accumulation]}
    try:
        report = engine.check(batches, **how, loss_fn=lambda model, one: loss_of(model(*one)))
    finally:
        engine.destroy()
    return [row.verdict for row in report.rows]


def alarms(seed: int, models: Iterable[str] = MODELS) -> dict[str, str | None]:
    """False alarms about right models, by model, None where there is none; form and stage change with the seed."""
    found: dict[str, str | None] = {}
    for index, model in enumerate(models):
        forms = forms_of(model)
        form, stage = forms[(seed + index) % len(forms)], seed % 4
        (verdict,) = verdicts(model, form, seed, stage, [None])
        good = verdict in ("same bits", "within rounding")
        where = f"{model}, {form}, seed {seed}, stage {stage}, {dist.get_world_size()} ranks"
        found[model] = None if good else f"{where}: {verdict}"
    return found


def planted(model: str, seed: int) -> dict[str, bool]:
    """Which planted errors are found in a model, by name and form."""
    found = {}
    for form in forms_of(model):
        if errors := [error for error in ERRORS if error.form == form]:
            pairs = zip(errors, verdicts(model, form, seed, 3, errors), strict=True)
            found |= {f"{error.name} ({form})": verdict.startswith("DIFFERS") for error, verdict in pairs}
    return found
