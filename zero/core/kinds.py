"""The classes of a model's modules, by which the configuration names some: also of those that other ranks have."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn


class ModuleKind(NamedTuple):
    """The class of a module by name, and the module, None where another rank has it."""

    name: str
    module: nn.Module | None


def kinds_of(model: nn.Module) -> dict[str, ModuleKind]:
    """By path, parents before children.

    `stands_for` of a module: pairs of a path below it and a class, of what is elsewhere; "" is the module's own place.
    """
    found: dict[str, ModuleKind] = {}
    for path, module in model.named_modules():
        away = {f"{path}.{below}".strip("."): kind for below, kind in getattr(module, "stands_for", ())}
        if path not in away:
            found.setdefault(path, ModuleKind(type(module).__name__, module))
        for place, kind in away.items():
            found.setdefault(place, ModuleKind(kind, None))
    return found
