"""Makes a `Config` from plain values; one error lists everything that is wrong with them."""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from os import PathLike
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError

from zero import log
from zero.config import rules
from zero.config.batch import MICRO, STEPS, TRAIN, resolve, tree_error
from zero.config.errors import ConfigError, dotted, show
from zero.config.file import Config, File
from zero.config.grid_sizes import NOTHING_TOLD, Told, grid_of
from zero.config.optimizers import ARGUMENTS, torch_reason
from zero.config.override import override
from zero.config.read import Source, read
from zero.config.unavailable import lookup
from zero.config.walk import Walk, problem_line
from zero.plan.grid import DATA

_FILLED_IN = "which is for Accelerate or Transformers to fill in before this is called"
_NOT_AVAILABLE = {"amsgrad": "AMSGrad is not available", "eps_inside_sqrt": "eps is added to the root"}


def load(
    source: str | PathLike | Mapping,
    world_size: int,
    told: Told = NOTHING_TOLD,
    *,
    refused: Collection[str] = (),
    filled: bool = True,
    stand_ins: Collection[str] = (),
    checks: Mapping[str, Callable[[str, Mapping[str, Any]], list[str]]] = MappingProxyType({}),
) -> Config:
    """Read and check a config for `world_size` ranks, which its sizes and those `told` make a grid.

    `source` is the path of a JSON or hjson file, or a dict. Raises `ConfigError` with one line for everything
    that is wrong, also for each `"auto"` that no default can replace. With `filled=False` the config is one that
    Hugging Face has not filled in yet: "auto" counts as not given. If no batch size is given then, or where the script
    ends its steps by itself, the micro-batch is 1. `stand_ins`: sections that the script replaces by its own objects.
    `checks`: by section, what finds problems of its `type` and `params` that only torch knows. `refused`: axes of the
    grid along which ranks have parts of the model, and which the caller cannot count on.
    """
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
        raise ValueError(f"world_size: got {show(world_size)}, wanted an integer of at least 1")
    config, walk = read(source), Walk()
    file = walk.section(config.values, File)
    errors = [*config.errors, *walk.errors, *_optimizer(file), *rules.fused(file)]
    staged = not any(line.startswith("zero_optimization.stage") for line in errors)
    sharded = [*rules.sharding(file, world_size)] if staged else []
    grid, wrong = grid_of(file, world_size, told)
    divided = [*rules.indivisible("sequence_parallel_size", file.sequence_parallel_size, world_size)]
    errors += [*(divided or ([] if sharded else wrong)), *rules.forms(file, grid, refused)]
    file = file.model_copy(update={"sequence_parallel_size": grid.size("cp")})
    for name, check in checks.items():
        if (section := getattr(file, name)) is not None and name not in stand_ins:
            errors += check(section.type, section.params)
    autos = [dotted(path) for path in walk.autos if filled and path[0] not in (TRAIN, MICRO, STEPS, *stand_ins)]
    errors += [f"{path}: got 'auto', {_FILLED_IN}; write a value" for path in autos]
    batch = None
    if not any(line.startswith((TRAIN, MICRO, STEPS)) for line in errors):
        train, micro, steps = (getattr(file, name) for name in (TRAIN, MICRO, STEPS))
        if train is None and micro is None and not (filled and file.managed_gradient_accumulation):
            micro = 1
        try:
            batch = resolve(train, micro, steps or file.pipeline.micro_batches, grid.size(*DATA))
        except ValueError as error:
            note = "; ranks share sequences, which Accelerate is told by ParallelismConfig(sp_size=...) instead"
            errors.append(str(error) + note * (file.sequence_parallel_size > 1))
    if batch is not None and file.zero.reduce == "tree":
        errors += filter(None, [tree_error(batch.steps, grid.size(*DATA, "cp"))])
    errors += [*rules.precision(file), *rules.storage(file), *rules.means(file), *rules.local_sgd(file, grid)]
    errors += [*rules.quantized(file), *sharded, *rules.pipelines(file, grid, batch and batch.steps)]
    for warning in walk.warnings:
        log.log_once(logging.WARNING, warning)  # before the error: a misspelt section may be its cause
    if errors or batch is None:
        raise ConfigError(errors, config.name)
    if walk.idle:
        text = "; ".join(f"{', '.join(keys)} ({why})" for why, keys in walk.idle.items())
        log.log_once(logging.INFO, f"keys of the config that have no effect: {text}")
    fields = dict(file) | {TRAIN: batch.train, MICRO: batch.micro, STEPS: batch.steps}
    return Config.model_construct(
        _fields_set=set(file.model_fields_set), **fields, world_size=grid.size(*DATA), grid=grid, raw=config.values
    )


def problems(file: str | None, sets: Sequence[str]) -> list[str]:
    """Errors in a file, and in what `--set` puts in place of its values, as far as no number of ranks decides."""
    try:
        source = _with_sets(file, sets)
    except ValueError as error:
        return str(error).splitlines()
    walk = Walk()
    found = walk.section(source.values, File)
    return [*source.errors, *walk.errors, *_optimizer(found)]


def group_lines(file: str | None, sets: Sequence[str], hosts: Sequence[int]) -> list[str]:
    """The groups that such a configuration makes of the ranks, so many on each host, as comments of a shell.

    Behind them is a warning where layers are cut over several hosts. Raises ConfigError for sizes that do not fit.
    """
    grid, errors = grid_of(Walk().section(_with_sets(file, sets).values, File), sum(hosts), NOTHING_TOLD)
    if errors:
        raise ConfigError(errors)
    return [f"# {line}" for line in [*grid.text(), *(f"warning: {line}" for line in grid.crossing(hosts))]]


def _with_sets(file: str | None, sets: Sequence[str]) -> Source:
    source = read({} if file is None else file)
    for text in sets:
        override(source.values, text)
    return source


def _optimizer(file: File) -> list[str]:
    if (section := file.optimizer) is None:
        return []
    return optimizer_problems(section.type, section.params, file.bf16.enabled, ("optimizer", "params"))


def optimizer_problems(kind: str, params: Mapping[str, Any], bf16: bool, at: tuple[str, ...]) -> list[str]:
    """What is wrong with the arguments of an optimizer at the path `at`.

    Only our own optimizers are checked here, not torch's. bf16: whether parameters are bf16.
    """
    known, lines, states = dict(params), [], dotted((*at, "zero"))
    if "max_grad_norm" in known:
        norm = show(known.pop("max_grad_norm"))
        lines.append(
            f"{dotted(at)}: 'max_grad_norm' is not an argument of the optimizer; "
            f"set the top-level key gradient_clipping to {norm}"
        )
    reason = torch_reason(kind, known)
    if reason is not None and known.get("zero") is not None:
        lines.append(
            f"{states}: {kind} runs as torch's own class here ({reason}), which keeps its state in fp32; leave it out"
        )
    arguments = ARGUMENTS.get(kind.lower())
    if arguments is None:
        return lines
    for key, why in _NOT_AVAILABLE.items():
        if known.get(key) == 1:
            lines.append(f"{dotted((*at, key))}: got true, wanted false; {why}")
    try:
        arguments.model_validate(known)
    except ValidationError as error:
        lines += [problem_line(problem, arguments, at, {}) for problem in error.errors(include_url=False)]
    if str(lookup(known, "zero.master")).lower() == "remainder" and not bf16:
        lines.append(
            f"{states}.master: 'remainder' needs bf16.enabled, because it is the lower half of a master "
            "whose upper half is the bf16 parameter; use 'fp32'"
        )
    return lines
