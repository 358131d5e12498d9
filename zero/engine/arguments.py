"""Where the configuration comes from: the call, or the command line of the user's script."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from os import PathLike
from typing import Any


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--zero_config FILE`, and DeepSpeed's spelling of it, to a script's parser; returns the parser."""
    group = parser.add_argument_group("zero")
    group.add_argument("--zero_config", type=str, default=None, help="the engine's JSON")
    group.add_argument("--deepspeed_config", type=str, default=None, help="the same, as DeepSpeed spells it")
    group.add_argument("--deepspeed", action="store_true", help="accepted for scripts written for DeepSpeed; no effect")
    return parser


def resolve_config(
    args: Any,
    config: str | PathLike | Mapping[str, Any] | None,
    config_params: str | PathLike | Mapping[str, Any] | None,
) -> str | PathLike | Mapping[str, Any]:
    """The one configuration among `config`, its alias `config_params`, and the script's arguments.

    Raises ValueError when there is none or more than one.
    """
    given = {
        "config": config,
        "config_params": config_params,
        "args.zero_config": getattr(args, "zero_config", None),
        "args.deepspeed_config": getattr(args, "deepspeed_config", None),
    }
    found = {name: value for name, value in given.items() if value is not None}
    if len(found) == 1:
        return next(iter(found.values()))
    if not found:
        raise ValueError(
            "initialize() needs a configuration: pass config=<path or dict>, "
            "or args with zero_config (see zero.add_config_arguments)"
        )
    raise ValueError(f"initialize() got more than one configuration: {', '.join(found)}; pass one of them")
