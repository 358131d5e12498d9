"""`zero config`: asks what a run shall be like, says what memory each choice takes, and writes a checked JSON."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from zero.config import ConfigError, load
from zero.config.override import override
from zero.launch.args.hosts import above_zero, at_least
from zero.launch.launch_messages import check_writable
from zero.sizes.estimate import GB, Estimate, PlanRow, estimate
from zero.sizes.lines import of_each

_ROOM = 0.6  # of a device's memory: the rest is for activations
# What --set says of one of these answers the whole question.
_PRECISION = ("bf16", "fp16")
_ACCUMULATION = ("gradient_accumulation_steps", "train_batch_size")
_PLACE = ("zero_optimization.stage", "zero_optimization.offload_optimizer", "zero_optimization.offload_param")
_PRECISIONS = {name: {name: {"enabled": True}} for name in _PRECISION} | {"fp32": {}}
_OPTIMIZERS = {name: {"optimizer": {"type": name}} for name in ("AdamW", "Adam", "Lion", "SGD", "Adagrad")}

Parse = Callable[[str], Any]
"""Reads an answer; raises ArgumentTypeError with what was wanted."""
Ask = Callable[[str, Any, Parse], Any]
"""Gives the answer to a question, which has a default."""


def run(given: argparse.Namespace) -> int:
    """Do what `zero config` was asked to; returns the exit status."""
    try:
        return _write(given)
    except ConfigError as error:
        return _refuse("this is no configuration that runs:\n" + "\n".join(error.errors))
    except (OSError, ValueError) as error:
        return _refuse(str(error))
    except (KeyboardInterrupt, EOFError):
        print(file=sys.stderr)
        return _refuse("nothing was written")


def _refuse(why: str) -> int:
    print(f"zero config: error: {why}", file=sys.stderr)
    return 2


def _write(given: argparse.Namespace) -> int:
    path = Path(given.output)
    if given.output != "-" and path.exists() and not given.force:
        raise ValueError(f"{path} is there already; give another name with --output, or --force to write over it")
    if not given.default and not sys.stdin.isatty():
        how = "pass --default for the defaults, and --set KEY=VALUE for what shall differ from them, such as"
        raise ValueError(f"there is no terminal to ask at; {how} --set zero_optimization.stage=3")
    if given.output != "-":
        check_writable(given.output, "--output")
    values: dict[str, Any] = {}
    fixed = {override(values, text) for text in given.set}
    ask = (lambda text, default, parse: default) if given.default else _ask
    numel = given.params or ask("parameters of the model, such as 7e9", 1e9, above_zero)
    ranks = given.world or ask("ranks (one for each GPU)", 8, at_least(1))
    memory = given.memory or ask("GB of memory of one device", 80.0, above_zero)

    def is_open(*keys: str) -> bool:
        """Whether none of what was set is one of these, or in it, or around it."""
        return not any(
            f"{a}.".startswith(f"{b}.") for said in fixed for key in keys for a, b in ((said, key), (key, said))
        )

    def sized(more: Mapping[str, Any]) -> Estimate:
        return estimate(numel, {**_OPTIMIZERS["AdamW"], **values, **more}, ranks, device=given.device)

    if is_open(*_PRECISION):
        values |= _PRECISIONS[_ask_sized(ask, "precision", _PRECISIONS, sized)]
    if is_open("optimizer"):
        values |= {"optimizer": {"type": _ask_sized(ask, "optimizer", _OPTIMIZERS, sized)}}
        values["optimizer"]["params"] = {"lr": ask("learning rate", 1e-4, _not_negative)}
    for keys, text, default, parse in (
        (("train_micro_batch_size_per_gpu",), "samples of one forward on one rank", 1, at_least(1)),
        (_ACCUMULATION, "forwards on one rank per step", 1, at_least(1)),
        (("gradient_clipping",), "largest norm of the gradients (0: any)", 1.0, _not_negative),
    ):
        if is_open(*keys):
            values[keys[0]] = ask(text, default, parse)
    if is_open(*_PLACE):
        values["zero_optimization"] = {**values.get("zero_optimization", {}), **_place(ask, sized({}), memory)}
    found = estimate(numel, values, ranks, device=given.device)
    load(values, ranks)
    text = json.dumps(values, indent=2) + "\n"
    if given.output == "-":
        sys.stdout.write(text)
    else:
        path.write_text(text, encoding="utf-8")
    where = "" if given.output == "-" else f"wrote {path}: "
    _say(f"{where}stage {_row_text(found.configured)}; without activations, for {found.what}")
    return 0


def _ask_sized(ask: Ask, what: str, choices: Mapping[str, Any], sized: Callable[[Mapping[str, Any]], Estimate]) -> str:
    """Which of these choices; says the memory that a whole replica takes with each."""
    _say(f"{what}, and the memory of a rank that keeps all state (stage 0), without activations:")
    for name, section in choices.items():
        _say(f"  {name:<8} {sized(section).rows[0].device.total / GB:,.2f} GB")
    names = tuple(choices)
    return ask(f"{what}: {', '.join(names)}", names[0], _one_of(names))


def _place(ask: Ask, found: Estimate, memory: float) -> dict[str, Any]:
    """Ask for stage and placement, each with its memory; the default is the first that leaves room."""
    _say(f"stage and placement, and what {of_each(found.ranks)} holds, without activations:")
    for number, row in enumerate(found.rows, 1):
        _say(f"  {number}  stage {_row_text(row)}")
    totals = [row.device.total for row in found.rows]
    fits = [number for number, total in enumerate(totals, 1) if total <= _ROOM * memory * GB]
    if not fits:
        _say(f"none takes less than {_ROOM:.0%} of {memory:g} GB; on more ranks each takes less")
    numbers = tuple(str(number) for number in range(1, len(totals) + 1))
    default = str(fits[0] if fits else totals.index(min(totals)) + 1)
    text = f"which of them (default: the first that leaves {1 - _ROOM:.0%} of {memory:g} GB for activations)"
    choice = found.rows[int(ask(text, default, _one_of(numbers))) - 1].choice
    section: dict[str, Any] = {"stage": choice.stage}
    for name, device in (("offload_optimizer", choice.optimizer), ("offload_param", choice.params)):
        if device != "none":
            section[name] = {"device": device}
        if device == "nvme":
            section[name]["nvme_path"] = ask(f"folder on a fast local drive, for {name}", "/tmp", str)
    return section


def _row_text(row: PlanRow) -> str:
    cells = {"device": row.device.total, "host": row.host.memory, "drive": row.host.files}
    return f"{row.choice}: " + ", ".join(f"{cell / GB:,.2f} GB on {name}" for name, cell in cells.items() if cell)


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def _ask(text: str, default: Any, parse: Parse) -> Any:
    """The answer of the user, the default for an empty one; asks again until it can be read."""
    while True:
        shown = f"{default:g}" if isinstance(default, float) else default
        print(f"{text} [{shown}]: ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        if not line.strip():
            return default
        try:
            return parse(line.strip())
        except argparse.ArgumentTypeError as error:
            _say(f"  {error}")


def _not_negative(text: str) -> float:
    return 0.0 if re.fullmatch(r"0+(\.0*)?", text) else above_zero(text)


def _one_of(choices: tuple[str, ...]) -> Parse:
    def parse(text: str) -> str:
        for choice in choices:
            if choice.lower() == text.lower():
                return choice
        raise argparse.ArgumentTypeError(f"got {text!r}, wanted one of {', '.join(choices)}")

    return parse
