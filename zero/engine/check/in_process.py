"""The check in the running process: copies of an engine's model, trained on the caller's batches."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zero.config import load
from zero.config.grid_sizes import KEYS, given_sizes
from zero.core.agree import agree
from zero.core.quantized_params import format_of, quant_tensors
from zero.core.released import Released
from zero.core.tensors import find_loss
from zero.core.torch_private import parameter_of_class
from zero.engine.check.compare import Failed, Report, compare_runs
from zero.engine.check.plain_engine import PlainEngine
from zero.engine.check.recording import RunRecord, RunRecorder, record_of, weights
from zero.engine.check.runs import CheckRun, RunKind, overridden
from zero.engine.checkpoint import random_state
from zero.log import logger
from zero.optim.fused import FusedShardOptimizer
from zero.plan.grid import PARTS_OF_MODEL

Loss = Callable[[Any, Any], torch.Tensor]


class Copies:
    """Trains copies of an engine's model, each from the weights and the random numbers of now."""

    def __init__(self, engine: Any, batches: Sequence[Any], loss_fn: Loss) -> None:
        self.random = random_state.capture(engine.device)
        self._engine = engine
        self._batches = batches
        self._loss_fn = loss_fn
        self._model = whole_copy(engine)

    def train(self, run: CheckRun, lead: RunRecord | None) -> RunRecord:
        """Train a copy as `run` says; raises `Failed` where the engine does, and what plain torch raises."""
        try:
            random_state.restore(self.random, self._engine.device)
            engine = self._build(copy.deepcopy(self._model), run)
            recorder = RunRecorder(engine)
            if lead is not None:
                engine.follow(lead.steps)
            try:
                for micro in range(run.steps * run.accumulation):
                    loss = self._loss_fn(engine, self._batches[micro % len(self._batches)])
                    engine.backward(loss, tokens=1 if engine._config.zero.mean == "tokens" else None)
                    engine.step()
            finally:
                engine.destroy()
            own = recorder.part()
            first, *others = agree(own | {"steps": []}, self._engine._sharded.world)
            return record_of([first | {"steps": own["steps"]}, *others])
        except Exception as error:
            if run.kind is not RunKind.ENGINE:
                raise
            raise Failed(f"{type(error).__name__}: {error}") from error

    def _build(self, model: nn.Module, run: CheckRun) -> Any:
        origin = self._engine
        raw = {key: value for key, value in overridden(origin._config, run).items() if key != "scheduler"}
        raw["managed_gradient_accumulation"] = True  # for here are as many micro-batches on every rank
        by_name = dict(model.named_parameters())
        names = {param: name for name, param in origin.module.named_parameters()}
        groups = [
            {**group, "params": [by_name[names[param]] for param in group["params"]]}
            for group in origin.optimizer.param_groups
        ]
        client = None
        if origin._config.optimizer is None:
            rule = origin.optimizer.shard_optimizer
            if isinstance(rule, FusedShardOptimizer):
                raw["optimizer"] = rule.section
            else:
                client = rule.kind(groups, **rule.params)
        if run.kind is not RunKind.ENGINE:
            settings = load(raw, origin.world_size, filled=False, refused=("pp",))
            return PlainEngine(model, client, groups, settings, run.kind)
        trained = {"optimizer": client} if client is not None else {"model_parameters": groups}
        return origin._initialize(model=model, config=raw, dist_init_required=False, **trained)[0]


def check(
    engine: Any,
    batch: Any,
    steps: int,
    stages: Sequence[int],
    accumulations: Sequence[int],
    loss_fn: Loss | None,
    offload: bool,
) -> Report:
    """See `Engine.check`."""
    if engine.optimizer is None:
        raise ValueError("check() needs an engine with an optimizer; give `optimizer` in the JSON or to initialize()")
    batches = batch if isinstance(batch, list) else [batch]
    if not batches:
        raise ValueError("check(batch=...): got an empty list, wanted one batch or more")
    if dist.is_initialized() and engine.world_size != dist.get_world_size():
        raise ValueError(
            f"engine.check() trains copies on all {dist.get_world_size()} ranks, and this engine is one of "
            f"{engine.world_size} of them"
        )
    said = {KEYS[key] for key in given_sizes(engine._config)}
    for axis in PARTS_OF_MODEL:
        if engine._config.grid.size(axis) > 1 and axis not in said:
            raise ValueError(f"check(): an argument says {axis}, and copies of the engine are made by the JSON alone")
    copies, level = Copies(engine, batches, loss_fn or loss_of), logger.level
    logger.setLevel(max(level, logging.WARNING))  # engines do not log that they start
    try:
        return compare_runs(steps, stages, accumulations, offload, copies.train)
    finally:
        logger.setLevel(level)
        random_state.restore(copies.random, engine.device)


def loss_of(engine: Any, batch: Any) -> torch.Tensor:
    """The loss of one micro-batch where the model computes it; raises ValueError where it does not."""
    if isinstance(batch, dict):
        output = engine(**batch)
    else:
        output = engine(*batch) if isinstance(batch, tuple) else engine(batch)
    loss = find_loss(output)
    if loss is None:
        raise ValueError(
            f"check(): the model returned {type(output).__name__}, in which no loss was found (a scalar tensor, .loss, "
            "['loss'] or [0]); pass loss_fn=<function of (engine, batch) that returns it>"
        )
    return loss


def whole_copy(engine: Any) -> nn.Module:
    """A copy of the engine's module with whole parameters of its own and none of its hooks; collective."""
    values = weights(engine)
    memo: dict[int, Any] = {}
    for name, param in engine.module.named_parameters():
        memo[id(param)] = _like(param, values[name].to(engine.device))
    divisions = engine._training.forms.divisions
    memo |= dict.fromkeys(map(id, divisions), "cut")  # the records that the model has, which no copy needs
    try:
        model = copy.deepcopy(engine.module, memo)
    except Exception as error:
        raise ValueError(f"check(): the model cannot be copied ({type(error).__name__}: {error})") from error
    for division in divisions:
        division.widen(memo)
    ours = {handle.id for handle in engine._sharded.handles}
    for module in model.modules():
        for table, entries in vars(module).items():
            if table.startswith(("_forward_hooks", "_forward_pre_hooks")):
                for key in ours & entries.keys():
                    del entries[key]
    return model


def _like(param: nn.Parameter, values: torch.Tensor) -> nn.Parameter:
    """A parameter with these values; a quantised one of the same class, with a copy of what is beside them."""
    form = format_of(param)
    if form is None:
        return nn.Parameter(values, requires_grad=param.requires_grad)
    kind = next(each for each in type(param).__mro__ if not issubclass(each, Released))
    made = parameter_of_class(kind, values)
    vars(made).update({key: value for key, value in vars(param).items() if not key.startswith("_zero")})
    if form == "int8":
        made.CB, made.SCB = values, quant_tensors(param)[0].clone()
    else:
        made.quant_state, made.module = copy.deepcopy(param.quant_state), None
    return made
