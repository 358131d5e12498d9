"""Leaf modules: all parameters below one are gathered at its entry and released at its end, whatever runs inside.

Where each rank takes another way through a module, as through a mixture of experts, the ranks must still gather
the same parameters in the same order; what is inside a leaf cannot make a difference to that. Planning reads the
flag when an engine is made: a leaf becomes one block, unless it lies in a block, which is gathered at once anyway.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from zero.log import rank_zero

_FLAG = "_zero_leaf"


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Make this very module a leaf, or no longer one."""
    model.__dict__[_FLAG] = bool(flag)
    for param in model.parameters():
        setattr(param, _FLAG, bool(flag))


def z3_leaf_module(model: nn.Module) -> bool:
    """Whether the module is a leaf."""
    return model.__dict__.get(_FLAG, False)


def z3_leaf_parameter(model: Any) -> bool:
    """Whether a parameter is in a leaf."""
    return getattr(model, _FLAG, False)


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """The leaves of the model, in order of registration."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type] | Sequence[str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Make all modules of these classes leaves; returns them. Call it before `zero.initialize`.

    Classes are given as such (subclasses count) or by name, short or with the package in front. Raises
    ValueError if there is none and `raise_if_not_found`.
    """
    return _of_classes(model, leaf_module_classes, True, raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type] | Sequence[str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """The opposite of `set_z3_leaf_modules`."""
    return _of_classes(model, leaf_module_classes, False, raise_if_not_found)


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Make the modules at these paths leaves; returns them and the names that there are none for.

    Raises ValueError if none of the names is found and `raise_if_not_found`.
    """
    found = _marked(model, module_names, flag, lambda name, wanted: name == wanted)
    if raise_if_not_found and not found[0]:
        raise ValueError(f"No modules named {_listed(module_names)} found in model {type(model).__name__}")
    return found


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Make the modules whose path ends so leaves; returns them and the suffixes that there are none for.

    Raises ValueError if none of the suffixes is found and `raise_if_not_found`.
    """
    found = _marked(model, module_name_suffixes, flag, str.endswith)
    if raise_if_not_found and not found[0]:
        wanted = _listed(module_name_suffixes)
        raise ValueError(f"No modules matching suffixes {wanted} found in model {type(model).__name__}")
    return found


def mark_leaf_modules(
    model: nn.Module, classes: Sequence[str], names: Sequence[str], suffixes: Sequence[str], asked: bool
) -> None:
    """Mark what the configuration names and warn of names without a match, of classes only if the user `asked`."""
    unknown = [name for name in classes if not _of_classes(model, [name], True, False)]
    missing = [f"classes: {name!r}" for name in unknown] if asked else []
    missing += [f"names: {name!r}" for name in set_z3_leaf_modules_by_name(model, names, True, False)[1]]
    missing += [f"name_suffixes: {name!r}" for name in set_z3_leaf_modules_by_suffix(model, suffixes, True, False)[1]]
    if missing:
        rank_zero(logging.WARNING, "zero_optimization.leaf_module: nothing in the model matches %s", ", ".join(missing))


def _of_classes(model: nn.Module, classes: Sequence[Any], flag: bool, raise_if_not_found: bool) -> list[nn.Module]:
    classes = [classes] if isinstance(classes, (str, type)) else classes
    for kind in classes:
        if not isinstance(kind, (type, str)):
            raise TypeError(f"leaf_module_classes: got {kind!r}, wanted classes or names of classes")
    found = [module for module in model.modules() if any(_is_a(module, kind) for kind in classes)]
    if raise_if_not_found and not found:
        raise ValueError(f"No modules of type {_listed(classes)} found in model {type(model).__name__}")
    for module in found:
        set_z3_leaf_module(module, flag)
    return found


def _is_a(module: nn.Module, kind: type | str) -> bool:
    if isinstance(kind, type):
        return isinstance(module, kind)
    own = type(module)
    return kind in (own.__name__, own.__qualname__, f"{own.__module__}.{own.__qualname__}")


def _marked(
    model: nn.Module, wanted: Sequence[str], flag: bool, matches: Callable[[str, str], bool]
) -> tuple[list[nn.Module], list[str]]:
    found: dict[str, nn.Module] = {}
    missing = []
    for each in [wanted] if isinstance(wanted, str) else wanted:
        hits = {name: module for name, module in model.named_modules() if matches(name, each)}
        found |= hits
        missing += [] if hits else [each]
    for module in found.values():
        set_z3_leaf_module(module, flag)
    return list(found.values()), missing


def _listed(wanted: Sequence[Any]) -> list[str]:
    given = [wanted] if isinstance(wanted, (str, type)) else wanted
    return [each if isinstance(each, str) else each.__name__ for each in given]
