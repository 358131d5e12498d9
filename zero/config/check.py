"""From plain values to a `Config`: everything that is wrong is found in one go, and said in lines."""

import logging
from collections.abc import Collection, Mapping
from os import PathLike
from typing import Any

from pydantic import BaseModel, ValidationError

from zero import log
from zero.config.batch import MICRO, STEPS, TRAIN, Batch, BatchError, resolve, tree_error
from zero.config.errors import ConfigError, dotted, show
from zero.config.file import Config, File, autocast_dtype, shard_sizes
from zero.config.keys import hint, idle, moves_only, section_of, unavailable
from zero.config.optimizers import ARGUMENTS, torch_reason
from zero.config.read import read
from zero.config.tidy import Tidy
from zero.config.unavailable import lookup
from zero.config.values import WANTED, Section

_STATES = "optimizer.params.zero"
MAX_SCALE_POWER = 64  # of the loss scale: see LARGEST in zero/optim/scaler.py


def load(
    source: str | PathLike | Mapping, world_size: int, *, filled: bool = True, stand_ins: Collection[str] = ()
) -> Config:
    """Read and check a config for `world_size` data-parallel ranks.

    `source` is the path of a JSON or hjson file, or a dict. Raises `ConfigError` with one line for everything
    that is wrong, also for each `"auto"` that no default can stand for. With `filled=False` the config is one that
    Hugging Face has not filled in yet: there they count as not given, and so does the batch size, for which a
    micro-batch of 1 stands. `stand_ins` are sections in whose place the script hands over objects of its own.
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
        batch, wrong = _batch(file, world_size, filled)
        errors += wrong
    if batch is not None and file.zero.reduce == "tree":
        errors += filter(None, [tree_error(batch.steps, world_size)])
    errors += _together(file)
    if not any(line.startswith("zero_optimization.stage") for line in errors):
        errors += _offload(file) + _shards(file, world_size)
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
    """A line for each "auto" that stands for nothing we could know."""
    known = (TRAIN, MICRO, STEPS, *stand_ins)
    return [
        f"{dotted(tidy.written(path))}: got 'auto', which is for Accelerate or Transformers to fill in before this "
        "is called; write a value"
        for path in tidy.autos
        if path[0] not in known and not moves_only(path)
    ]


def _batch(file: File, world_size: int, filled: bool) -> tuple[Batch | None, list[str]]:
    train, micro, steps = (getattr(file, name) for name in (TRAIN, MICRO, STEPS))
    if not filled and train is None and micro is None:
        micro = 1
    try:
        return resolve(train, micro, steps, world_size), []
    except BatchError as error:
        return None, [str(error)]


def _together(file: File) -> list[str]:
    """What is wrong only in combination."""
    lines = []
    if file.fp16.enabled and file.bf16.enabled:
        lines.append("fp16.enabled and bf16.enabled: both are true; set one of them to false")
    for section in ("fp16", "bf16"):
        if getattr(file, section).enabled and autocast_dtype(file) not in (None, "fp32", section):
            lines.append(
                f"torch_autocast.dtype: got '{autocast_dtype(file)}', wanted '{section}', which {section}.enabled "
                "makes the parameters"
            )
    if autocast_dtype(file) == "fp32":
        lines.append("torch_autocast.dtype: got 'fp32', wanted one of 'bf16', 'fp16'")
    if file.gradient_predivide_factor == 0:
        lines.append("gradient_predivide_factor: got 0, wanted a number above 0")
    if file.zero.reduce == "tree" and (file.data_types.grad_accum_dtype or "fp32") != "fp32":
        lines.append(
            f"data_types.grad_accum_dtype: got '{file.data_types.grad_accum_dtype}', wanted 'fp32' "
            "with zero.reduce 'tree', whose sums are fp32"
        )
    saving = file.zero.checkpoint
    if saving.keep is not None and (saving.keep_optimizer or 0) > saving.keep:
        lines.append(
            f"zero.checkpoint.keep_optimizer: got {saving.keep_optimizer}, wanted at most zero.checkpoint.keep, which "
            f"is {saving.keep}"
        )
    return lines + _param_dtype(file) + _dynamic_scale(file) + _files(file) + _recompute(file)


def _offload(file: File) -> list[str]:
    """What is wrong with places off the device: there must be something to send there that the stage cuts."""
    zero, lines = file.zero_optimization, []
    section = "zero_optimization.offload"
    if zero.offload_optimizer.device != "none" and zero.stage == 0:
        lines.append(
            f"{section}_optimizer.device: got '{zero.offload_optimizer.device}' with zero_optimization.stage 0, where "
            "every rank keeps and updates all state; set the stage to 1, 2 or 3"
        )
    if zero.offload_param.device != "none" and zero.stage < 3:
        lines.append(
            f"{section}_param.device: got '{zero.offload_param.device}' with zero_optimization.stage {zero.stage}, "
            "which keeps whole parameters on the device; set the stage to 3, or leave offload_param out"
        )
    return lines


def _shards(file: File, world_size: int) -> list[str]:
    """What is wrong with groups of ranks that are smaller than the world."""
    stage, hpz = file.zero_optimization.stage, file.zero_optimization.zero_hpz_partition_size
    sizes, hpz_key, lines = shard_sizes(file), "zero_optimization.zero_hpz_partition_size", []
    if len(set(sizes.values())) > 1:
        (key, size), (other, differs) = sizes.items()
        lines.append(f"{key} and {other}: got {size} and {differs} for one size; keep one of them")
    for key, size in sizes.items():
        if stage == 0:
            lines.append(
                f"{key}: got {size} with zero_optimization.stage 0, where every rank keeps all state; set the stage to "
                "1, 2 or 3, or leave it out"
            )
        lines += _indivisible(key, size, world_size)
    if hpz > 1:
        if stage < 3:
            lines.append(
                f"{hpz_key}: got {hpz} with zero_optimization.stage {stage}, which keeps whole parameters on every "
                "rank; set the stage to 3, or leave it out"
            )
        lines += [
            f"{hpz_key}: got {hpz} with {key} {size}; it is for state that is cut over all ranks, keep one of the two"
            for key, size in sizes.items()
        ]
        lines += _indivisible(hpz_key, hpz, world_size)
    return lines


def _indivisible(key: str, size: int, world_size: int) -> list[str]:
    if world_size % size == 0:
        return []
    divisors = [str(count) for count in range(1, world_size + 1) if world_size % count == 0]
    return [f"{key}: got {size}, wanted a divisor of world size {world_size}: {', '.join(divisors)}"]


def _recompute(file: File) -> list[str]:
    section, lines = file.zero.recompute, []
    if section.model_fields_set and not section.modules:
        lines.append("zero.recompute.modules: is missing; name classes or paths of modules, such as ['Block']")
    if section.policy == "auto" and section.budget is None:
        lines.append("zero.recompute.budget: is missing; policy 'auto' fits activations into it, such as '12 GiB'")
    if section.policy != "auto" and section.budget is not None:
        lines.append(f"zero.recompute.budget: got {section.budget}; only policy 'auto' has one, leave it out")
    if section.policy == "full" and section.products > 1:
        lines.append(f"zero.recompute.products: got {section.products}; policy 'full' keeps no products, leave it out")
    kept = file.activation_checkpointing
    if kept.contiguous_memory_optimization and kept.number_checkpoints is None:
        lines.append(
            "activation_checkpointing.number_checkpoints: is missing; contiguous_memory_optimization takes room for "
            "so many calls"
        )
    return lines


def _param_dtype(file: File) -> list[str]:
    wanted = file.data_types.param_dtype
    modes = {"fp16": file.fp16.enabled, "bf16": file.bf16.enabled}
    if wanted is None or all(modes.values()):
        return []
    dtype = next((name for name, on in modes.items() if on), "fp32")
    if wanted == dtype:
        return []
    here = (
        f"{dtype}.enabled makes them {dtype}"
        if dtype != "fp32"
        else "without fp16.enabled or bf16.enabled they are fp32"
    )
    fix = f"set it to '{dtype}'" + (f", or switch on {wanted}.enabled instead" if wanted != "fp32" else "")
    return [f"data_types.param_dtype: got '{wanted}', but {here}; {fix}"]


def _files(file: File) -> list[str]:
    """What is wrong with state on a drive."""
    return [
        f"zero_optimization.{name}.nvme_path: is missing; device 'nvme' needs a folder on a fast local drive"
        for name in ("offload_optimizer", "offload_param")
        if (section := getattr(file.zero_optimization, name)).device == "nvme" and not section.nvme_path
    ]


def _dynamic_scale(file: File) -> list[str]:
    """What is wrong with the numbers of a dynamic loss scale, where there is one."""
    fp16 = file.fp16
    if not (fp16.enabled or autocast_dtype(file) == "fp16") or fp16.loss_scale > 0:
        return []
    lines = [
        f"fp16.{name}: got {value}, wanted an integer of at least 1 for a dynamic loss scale"
        for name in ("loss_scale_window", "hysteresis", "min_loss_scale")
        if (value := getattr(fp16, name)) < 1
    ]
    if fp16.initial_scale_power > MAX_SCALE_POWER:
        lines.append(
            f"fp16.initial_scale_power: got {fp16.initial_scale_power}, wanted an integer from 0 to {MAX_SCALE_POWER}"
        )
    elif fp16.min_loss_scale > 2**fp16.initial_scale_power:
        lines.append(
            f"fp16.min_loss_scale: got {fp16.min_loss_scale}, wanted at most 2 ** fp16.initial_scale_power = "
            f"{2**fp16.initial_scale_power}, where the scale starts"
        )
    return lines


def _say_idle(tidy: Tidy) -> None:
    """Log the keys of the file that change nothing, grouped by the reason."""
    paths: dict[str, list[str]] = {}
    for path, mark in idle().items():
        if lookup(tidy.values, path) is not None:
            paths.setdefault(mark.why, []).append(dotted(tidy.written(tuple(path.split(".")))))
    if paths:
        text = "; ".join(f"{', '.join(group)} ({why})" for why, group in paths.items())
        log.log_once(logging.INFO, f"keys of the config that have no effect: {text}")
