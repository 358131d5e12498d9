"""Makes a `Config` of plain values; one error lists everything that is wrong with them."""

import logging
from collections.abc import Collection, Mapping
from os import PathLike
from typing import Any

from pydantic import BaseModel, ValidationError

from zero import log
from zero.config import rules
from zero.config.batch import MICRO, STEPS, TRAIN, BatchError, resolve, tree_error
from zero.config.errors import ConfigError, dotted, show
from zero.config.file import Config, File
from zero.config.keys import hint, idle, moves_only, section_of, unavailable
from zero.config.optimizers import ARGUMENTS, torch_reason
from zero.config.read import read
from zero.config.tidy import Tidy
from zero.config.unavailable import lookup
from zero.config.values import WANTED, Section

_STATES = "optimizer.params.zero"


def load(
    source: str | PathLike | Mapping, world_size: int, *, filled: bool = True, stand_ins: Collection[str] = ()
) -> Config:
    """Read and check a config for `world_size` data-parallel ranks.

    `source` is the path of a JSON or hjson file, or a dict. Raises `ConfigError` with one line for everything
    that is wrong, also for each `"auto"` that no default can replace. With `filled=False` the config is one that
    Hugging Face has not filled in yet: "auto" counts as not given, and where no batch size is given, the micro-batch
    is 1. `stand_ins` are sections that the script replaces by objects of its own.
    """
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
        raise ValueError(f"world_size: got {show(world_size)}, wanted an integer of at least 1")
    config = read(source)
    tidy = Tidy(config.values)
    file, errors = _validated(tidy)
    errors = [*config.errors, *tidy.errors, *errors, *_optimizer(tidy, file.bf16.enabled)]
    errors += _autos(tidy, stand_ins) if filled else []
    batch = None
    if not any(line.startswith((TRAIN, MICRO, STEPS)) for line in errors):
        train, micro, steps = (getattr(file, name) for name in (TRAIN, MICRO, STEPS))
        if not filled and train is None and micro is None:
            micro = 1
        try:
            batch = resolve(train, micro, steps, world_size)
        except BatchError as error:
            errors.append(str(error))
    if batch is not None and file.zero.reduce == "tree":
        errors += filter(None, [tree_error(batch.steps, world_size)])
    errors += [*rules.precision(file), *rules.storage(file)]
    if not any(line.startswith("zero_optimization.stage") for line in errors):
        errors += rules.sharding(file, world_size)
    errors += [
        f"{dotted(tidy.written(tuple(path.split('.'))))}: {mark.message}"
        for path, mark in unavailable().items()
        if mark.on(lookup(tidy.values, path))
    ]
    for line in tidy.warnings:
        log.log_once(logging.WARNING, line)  # before the error: a misspelt section may be its cause
    if errors or batch is None:
        raise ConfigError(errors, config.name)
    _say_idle(tidy)
    fields = dict(file) | {TRAIN: batch.train, MICRO: batch.micro, STEPS: batch.steps}
    return Config.model_construct(
        _fields_set=set(file.model_fields_set), **fields, world_size=world_size, raw=config.values
    )


def _validated(tidy: Tidy) -> tuple[File, list[str]]:
    """The file without its wrong keys, so that later checks can go on, and a line for each of those keys."""
    lines: list[str] = []
    while True:
        try:
            return File.model_validate(tidy.values), lines
        except ValidationError as error:
            first = not lines
            for problem in error.errors(include_url=False):
                # A key can be missing in a later round only because its wrong value was taken out before.
                if first or problem["type"] != "missing":
                    lines.append(_line(problem, tidy, File))
                _remove(tidy.values, problem["loc"])


def _remove(values: dict, path: tuple) -> None:
    """Take the wrong key out; a section that misses a key goes as a whole."""
    here: Any = values
    for part in path[:-1]:
        if not isinstance(here.get(part), dict):
            break
        holder, last, here = here, part, here[part]
    else:
        if path[-1] in here:
            del here[path[-1]]
        elif len(path) > 1:
            del holder[last]
        return
    here.pop(part, None)


def _line(problem: Any, tidy: Tidy, model: type[BaseModel], prefix: tuple = ()) -> str:
    path = tidy.written((*prefix, *problem["loc"]))
    if problem["type"] == "extra_forbidden":
        home = _home(model, problem["loc"][:-1])
        return f"{dotted(path[:-1])}: unknown key {str(path[-1])!r}{hint(str(path[-1]), home)}"
    if problem["type"] == "missing":
        return f"{dotted(path[:-1])}: {str(path[-1])!r} is missing"
    if problem["type"] == WANTED:
        wanted = problem["ctx"]["wanted"]
    elif problem["type"] in ("model_type", "model_attributes_type", "dict_type"):
        wanted = "an object {...}"
    else:
        return f"{dotted(path)}: got {show(problem['input'])}; {problem['msg']}"
    if (
        problem["input"] is None
        and model is File
        and isinstance(default := _default(problem["loc"]), bool | int | float | str)
    ):
        wanted += f"; leave it out for {show(default)}"
    return f"{dotted(path)}: got {show(problem['input'])}, wanted {wanted}"


def _default(path: tuple) -> Any:
    field = _home(File, path[:-1]).model_fields.get(path[-1])
    return None if field is None else field.default


def _home(model: type[BaseModel], path: tuple) -> type[Section]:
    for part in path:
        model = section_of(model.model_fields[part].annotation)
    return model


def _optimizer(tidy: Tidy, bf16: bool) -> list[str]:
    """What is wrong with the optimizer's arguments: our kernels' are known here, others are torch's to check."""
    kind, params = lookup(tidy.values, "optimizer.type"), lookup(tidy.values, "optimizer.params")
    if kind is None or not params:
        return []
    prefix, lines, known = ("optimizer", "params"), [], dict(params)
    if "max_grad_norm" in known:
        norm = show(known.pop("max_grad_norm"))
        lines.append(
            f"optimizer.params: 'max_grad_norm' is not an argument of the optimizer; "
            f"set the top-level key gradient_clipping to {norm}"
        )
    reason = torch_reason(kind, known)
    if reason is not None and known.get("zero") is not None:
        lines.append(
            f"{_STATES}: {kind} runs as torch's own class here ({reason}), which keeps its state in fp32; leave it out"
        )
    arguments = ARGUMENTS.get(kind.lower())
    if arguments is None:
        return lines
    if known.get("amsgrad") == 1:
        lines.append("optimizer.params.amsgrad: got true, wanted false; AMSGrad is not available")
    try:
        arguments.model_validate(known)
    except ValidationError as error:
        lines += [_line(problem, tidy, arguments, prefix) for problem in error.errors(include_url=False)]
    if str(lookup(known, "zero.master")).lower() == "remainder" and not bf16:
        lines.append(
            f"{_STATES}.master: 'remainder' needs bf16.enabled, because it is the lower half of a master "
            "whose upper half is the bf16 parameter; use 'fp32'"
        )
    return lines


def _autos(tidy: Tidy, stand_ins: Collection[str]) -> list[str]:
    """A line for each "auto" whose value we cannot know."""
    known = (TRAIN, MICRO, STEPS, *stand_ins)
    return [
        f"{dotted(tidy.written(path))}: got 'auto', which is for Accelerate or Transformers to fill in before this "
        "is called; write a value"
        for path in tidy.autos
        if path[0] not in known and not moves_only(path)
    ]


def _say_idle(tidy: Tidy) -> None:
    """Log the keys of the file that change nothing, grouped by the reason."""
    paths: dict[str, list[str]] = {}
    for path, mark in idle().items():
        if lookup(tidy.values, path) is not None:
            paths.setdefault(mark.why, []).append(dotted(tidy.written(tuple(path.split(".")))))
    if paths:
        text = "; ".join(f"{', '.join(group)} ({why})" for why, group in paths.items())
        log.log_once(logging.INFO, f"keys of the config that have no effect: {text}")
