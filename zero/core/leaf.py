"""Modules that a user marks: what is gathered at once, and what on its own. Planning reads it when an engine is made.

All parameters below a leaf are gathered at its entry and released at its end, whatever runs inside. Where each rank
takes another way through a module, as through a mixture of experts, the ranks must still gather the same parameters in
the same order; what is inside a leaf cannot make a difference to that. A leaf becomes one block, unless it lies in a
block, which is gathered at once anyway.

All parameters below a module that is set apart are units of their own although a larger module around it is gathered
as a block, which keeps the rest. Inside a leaf that says nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from zero.log import rank_zero

_FLAG = "_z3_leaf"  # as DeepSpeed has it, where programs look
_APART = "_zero_apart"


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


def set_apart(module: nn.Module) -> None:
    """Have this module's parameters gathered when it runs, not when the block around it does."""
    module.__dict__[_APART] = True


def is_apart(module: nn.Module) -> bool:
    """Whether the module was set apart."""
    return module.__dict__.get(_APART, False)


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
    return _mark(model, leaf_module_classes, True, "of type", _is_a, raise_if_not_found)[0]


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type] | Sequence[str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """The opposite of `set_z3_leaf_modules`."""
    return _mark(model, leaf_module_classes, False, "of type", _is_a, raise_if_not_found)[0]


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Make the modules at these paths leaves; returns them and the names that there are none for.

    Raises ValueError if none of the names is found and `raise_if_not_found`.
    """
    return _mark(model, module_names, flag, "named", lambda name, _, wanted: name == wanted, raise_if_not_found)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Make the modules whose path ends so leaves; returns them and the suffixes that there are none for.

    Raises ValueError if none of the suffixes is found and `raise_if_not_found`.
    """
    what = "matching suffixes"
    return _mark(model, module_name_suffixes, flag, what, lambda name, _, end: name.endswith(end), raise_if_not_found)


def mark_leaf_modules(
    model: nn.Module, classes: Sequence[str], names: Sequence[str], suffixes: Sequence[str], asked: bool
) -> None:
    """Mark what the configuration names and warn of names without a match, of classes only if the user `asked`."""
    unknown = _mark(model, classes, True, "of type", _is_a, False)[1]
    missing = [f"classes: {name!r}" for name in unknown] if asked else []
    missing += [f"names: {name!r}" for name in set_z3_leaf_modules_by_name(model, names, True, False)[1]]
    missing += [f"name_suffixes: {name!r}" for name in set_z3_leaf_modules_by_suffix(model, suffixes, True, False)[1]]
    if missing:
        rank_zero(logging.WARNING, "zero_optimization.leaf_module: nothing in the model matches %s", ", ".join(missing))


def _mark(
    model: nn.Module, wanted: Any, flag: bool, what: str, meant: Callable[[str, nn.Module, Any], bool], strict: bool
) -> tuple[list[nn.Module], list[Any]]:
    """Mark every module that is `meant` by one of `wanted`; returns those, and the ones of `wanted` that mean none.

    `strict`: ValueError where there are no modules `what`.
    """
    wanted = [wanted] if isinstance(wanted, (str, type)) else wanted
    named = list(model.named_modules()) if wanted else []
    hits = {each: [module for name, module in named if meant(name, module, each)] for each in wanted}
    found = list(dict.fromkeys(module for modules in hits.values() for module in modules))
    if strict and not found:
        names = [each if isinstance(each, str) else each.__name__ for each in wanted]
        raise ValueError(f"No modules {what} {names} found in model {type(model).__name__}")
    for module in found:
        set_z3_leaf_module(module, flag)
    return found, [each for each, modules in hits.items() if not modules]


def _is_a(name: str, module: nn.Module, kind: type | str) -> bool:
    if isinstance(kind, type):
        return isinstance(module, kind)
    if not isinstance(kind, str):
        raise TypeError(f"leaf_module_classes: got {kind!r}, wanted classes or names of classes")
    own = type(module)
    return kind in (own.__name__, own.__qualname__, f"{own.__module__}.{own.__qualname__}")
