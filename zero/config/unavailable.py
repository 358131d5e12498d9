"""Marks for keys that the config knows but this release does not support, or that have no effect here.

A key's mark is part of its annotation: `zenflow: Annotated[Bool, Unavailable("...")] = False`. A later release that has
the feature deletes the mark.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


def given(value: Any) -> bool:
    """Switched on by anything but an empty value."""
    return value not in (None, False, {}, [])


def false(value: Any) -> bool:
    """Switched on by `false`, because the default is true."""
    return value == 0  # false equals 0, and some files write 0 for it


def enabled(value: Any) -> bool:
    """Switched on by an `enabled: true` anywhere inside."""
    if not isinstance(value, Mapping):
        return False
    return value.get("enabled") == 1 or any(enabled(inner) for inner in value.values())


def beyond(*keys: str) -> Callable[[Any], bool]:
    """Switched on by other keys than these; by none where `enabled` is among these, and not true."""

    def on(value: Any) -> bool:
        idle = isinstance(value, Mapping) and "enabled" in keys and not enabled(value)
        return given(value) and not idle and not (isinstance(value, Mapping) and value.keys() <= {*keys})

    return on


@dataclass(frozen=True)
class Unavailable:
    """Marks a key that is an error once it is switched on."""

    message: str  # what is missing, and an alternative
    at: str = ""  # the dotted path of the key inside the marked one, if that is an object without a section
    on: Callable[[Any], bool] = given  # takes the value in the file, None if it has none

    @property
    def description(self) -> str:
        """The description of a key without another one."""
        return f"An error once it is switched on: {self.message}."


@dataclass(frozen=True)
class Idle:
    """Marks a key that is accepted and changes nothing."""

    why: str

    @property
    def description(self) -> str:
        """The description of a key without another one."""
        return f"Accepted without effect: {self.why}."


NOT_AVAILABLE = Unavailable("is not available; leave it out")
NOTHING_TO_SET = Idle("there is nothing to set here")
ALWAYS_ON = Idle("here it is always on")


def lookup(values: Mapping[str, Any], path: str) -> Any:
    """The value at a dotted path, or None if there is none."""
    here: Any = values
    for part in path.split("."):
        if not isinstance(here, Mapping) or part not in here:
            return None
        here = here[part]
    return here
