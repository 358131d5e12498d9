"""The tie from a parameter to the unit and the engine that manage it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from zero.core.released import Released
from zero.plan.cut import Box, Cut
from zero.plan.grid import DENSE, PARTS, UnitAxes

_CUTS = "_zero_cuts"


class Owner(NamedTuple):
    """Its name in the model, its unit, and its index there."""

    name: str
    unit: Any  # a Unit, which imports us
    index: int

    @property
    def param(self) -> nn.Parameter:
        """The parameter itself."""
        return self.unit.params[self.index]

    @staticmethod
    def ensure_all_gathered(params: Sequence[torch.Tensor]) -> bool:
        """`Unit.ensure_gathered` of all these parameters, so that gathering one does not send another away again."""
        units = list({id(owner.unit): owner.unit for owner in map(owner_of, params)}.values())
        # Others stay, and other threads may read them at the same time.
        held = [unit for unit in units if unit.resharded]
        for unit in held:
            unit.holds += 1
        try:
            return all(unit.ensure_gathered() for unit in units)
        finally:
            for unit in held:
                unit.holds -= 1

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """A parameter that is saved leaves us behind: on the other side None stands here, and no engine manages it."""
        return type(None), ()


class PlacedParameter(nn.Parameter):
    """A parameter whose axes and cut are known; its copies' are, too."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """As of any parameter."""
        return placed_as(self, super().__deepcopy__(memo))


def axes_of(param: torch.Tensor) -> UnitAxes:
    """The axes of the grid along which the ranks lie that will share the parameter, or do."""
    return getattr(param, "_zero_axes", DENSE)


def cut_of(param: torch.Tensor) -> Cut | None:
    """The part of a larger parameter that it is; None where it is all of it."""
    return getattr(param, "_zero_cut", None)


def set_cut(param: nn.Parameter, cut: Cut, axes: UnitAxes = PARTS, module: nn.Module | None = None) -> None:
    """Have an engine that is made later know that the parameter is a part of a larger one.

    The other parts lie along those `axes` that say so. `module`: the one that the parameter belongs to; then the cut is
    kept there by name, and holds for whatever parameter takes the place of this one. Raises ValueError for a cut with
    another number of elements, and for a module that has not this parameter.
    """
    if is_released(param):
        raise RuntimeError(
            "set_cut() of a parameter that is sharded already, with the values of rank 0; call it where the parameter "
            "is made, before its module is registered in another"
        )
    if param.numel() != cut.numel:
        raise ValueError(f"Cut: its boxes have {cut.numel} elements, and the parameter {param.numel()}")
    _place(param, axes, cut)
    if module is not None:
        names = [name for name, each in module._parameters.items() if each is param]
        if not names:
            raise ValueError(f"set_cut(module=...): this {type(module).__name__} has no such parameter of its own")
        module.__dict__.setdefault(_CUTS, {})[names[0]] = axes, cut


def complete_cut(param: torch.Tensor, every: Iterable[Iterable[Box]]) -> None:
    """Have the parameter's cut know the boxes of all ranks beside, in their order."""
    param._zero_cut = replace(cut_of(param), every=tuple(map(tuple, every)))


def share_along(axes: UnitAxes, params: Iterable[nn.Parameter]) -> None:
    """Have an engine that is made later cut and repeat these along `axes` of its grid; on all ranks alike."""
    for param in params:
        _place(param, axes, cut_of(param))


def keep_cuts(module: nn.Module) -> None:
    """Tell parameters of the cuts that modules keep by their names."""
    for child in module.modules():
        for name, placed in child.__dict__.get(_CUTS, {}).items():
            if (param := child._parameters.get(name)) is not None:
                _place(param, *placed)


def placed_as(param: torch.Tensor, made: nn.Parameter) -> nn.Parameter:
    """`made`, with the axes and the cut of `param`."""
    _place(made, axes_of(param), cut_of(param))
    return made


def _place(param: nn.Parameter, axes: UnitAxes, cut: Cut | None) -> None:
    if type(param) is nn.Parameter:
        param.__class__ = PlacedParameter
    param._zero_axes, param._zero_cut = axes, cut


def owner_of(param: torch.Tensor) -> Owner | None:
    """The unit of a parameter, or None when no engine manages it."""
    return getattr(param, "_zero_owner", None)


def is_released(param: torch.Tensor) -> bool:
    """Whether the parameter's values are away, and not on their way to whoever reads it."""
    return isinstance(param, Released) and not param._zero_owner.unit.coming
