"""`--set a.b=c` of a command line: one value of a config, by its path."""

import copy
import json
from collections.abc import Mapping, MutableMapping
from typing import Any


def override(values: MutableMapping[str, Any], text: str) -> str:
    """Apply `text`, such as "zero_optimization.stage=3", to `values`; returns the path.

    The value is JSON, or else a string. Raises ValueError for a text that is no path and value, or leads through what
    is no object.
    """
    path, equals, value = text.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        wanted = "KEY=VALUE with dots in the key, such as zero_optimization.stage=3"
        raise ValueError(f"--set: got {text!r}, wanted {wanted}")
    for count, key in enumerate(keys[:-1], 1):
        values = values.setdefault(key, {})
        if not isinstance(values, MutableMapping):
            raise ValueError(f"--set {text}: {'.'.join(keys[:count])} is no object, so nothing can be set in it")
    try:
        values[keys[-1]] = json.loads(value)
    except json.JSONDecodeError:
        values[keys[-1]] = value
    return ".".join(keys)


def apply(values: Mapping[str, Any], sets: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a config in which each path of `sets` has its value. Raises ValueError, see `override`."""
    found = copy.deepcopy(dict(values))
    for path, value in sets.items():
        override(found, f"{path}={json.dumps(value)}")
    return found
