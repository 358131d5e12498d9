"""Divides the experts of a model among ranks: stacks of their weights are cut, and forwards send tokens around."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import NoReturn

import torch
from torch import nn

from zero.config import Config
from zero.core import comm
from zero.core.mesh import Meshes
from zero.core.owner import axes_of, cut_of
from zero.parallel.experts.dispatch import DispatchedForward
from zero.parallel.experts.find import Experts, experts_of
from zero.parallel.tensor.cutting import cut_param, deferred_in, make_whole, refuse_graphs, whole_only
from zero.parallel.tensor.plan import Place
from zero.plan.grid import EXPERTS, UnitAxes

RECORD = "_zero_cut_experts"  # of a model whose experts are divided
_COUNT = "expert"  # in the name of an attribute that says how many there are


class CutExperts:
    """The experts of a model, divided among the ranks along ep until `restore`.

    found: the modules that have them, those of other ranks' stages included.
    """

    def __init__(self, model: nn.Module, found: Sequence[Experts], meshes: Meshes) -> None:
        """Collective over ep: all ranks take the values of the first one."""
        self.found, self._model = found, model
        here = set(model.modules())
        found = [each for each in found if each.module in here]
        self.ranks, self.peers = meshes.along("ep"), meshes.along("tp")
        places = {name: (param, self._place(each, stack)) for name, param, each, stack in _stacks(found)}
        refuse_graphs({name: param for name, (param, _) in places.items()})
        model.__dict__[RECORD] = self
        shapes = {name: tuple(param.shape) for name, (param, _) in places.items()}
        self._handle = model.register_state_dict_post_hook(functools.partial(whole_only, shapes, self.ranks.size))
        self._placed: list[tuple[nn.Parameter, Place, UnitAxes]] = []
        for name, (param, place) in places.items():
            if deferred_in(param) is None:
                comm.broadcast(param.detach(), 0, self.ranks, name)
            self._placed.append((param, place, axes_of(param)))
            cut_param(param, name, place, self.ranks.rank, meshes)
        self.forwards = [DispatchedForward(each, self.ranks, self.peers) for each in found]
        self._changed = [(each.module, name, each.count) for each in found for name in _counts(each)]
        for module, name, count in self._changed:
            setattr(module, name, count // self.ranks.size)
        self.attach(meshes)

    def attach(self, meshes: Meshes) -> None:
        """The model has an engine, perhaps another one than before, whose ranks are the same."""
        self.ranks, self.peers = meshes.apart_along("experts", "ep"), meshes.along("tp")
        for forward in self.forwards:
            forward.ranks, forward.peers = self.ranks, self.peers

    def __reduce__(self) -> NoReturn:
        """Refuse copies, and the model in a file: they would have this rank's experts only."""
        raise RuntimeError(
            f"a copy of {type(self._model).__name__}, whose experts are divided among {self.ranks.size} ranks, would "
            "have this rank's; take engine.module_state_dict() and load it into a model made anew"
        )

    @torch.no_grad()
    def restore(self, alone: bool = False) -> None:
        """Make the model whole again; collective, but where other ranks are gone, `alone`: then their parts are NaN."""
        self._model.__dict__.pop(RECORD, None)
        self._handle.remove()
        for param, place, axes in self._placed:
            make_whole(param, place, axes, None if alone else self.ranks)
        for forward in reversed(self.forwards):
            forward.undo()
        for module, name, value in self._changed:
            setattr(module, name, value)
        self._placed, self.forwards, self._changed = [], [], []

    def _place(self, each: Experts, stack: str) -> Place:
        share = each.count // self.ranks.size
        ranges = tuple([(rank * share, share)] for rank in range(self.ranks.size))
        cut = each.cut(stack, self.ranks.rank, self.ranks.size)
        return Place(each.module._parameters[stack], cut, EXPERTS, 0, ranges)


def divided(model: nn.Module, settings: Config, rank: int) -> list[Experts] | CutExperts | None:
    """The experts to divide; None where they are not, or by hand; the record where they are for another engine.

    Raises ValueError for what cannot be divided.
    """
    ranks = settings.grid.ranks("ep", rank)
    if len(ranks) == 1:
        return None
    if (before := model.__dict__.get(RECORD)) is not None:
        if before.ranks.size != len(ranks):
            raise ValueError(
                f"initialize(): the experts of this model were divided among {before.ranks.size} ranks, for an engine "
                f"that was dropped or could not be made, and this JSON says {len(ranks)}; make the model anew, and "
                "call destroy() of an engine before another one is made"
            )
        return before
    if any(cut_of(param) is not None and "ep" in axes_of(param).parts for param in model.parameters()):
        return None
    return experts_of(model, settings.expert_parallel, len(ranks))


def _stacks(found: Sequence[Experts]) -> Iterator[tuple[str, nn.Parameter, Experts, str]]:
    for each in found:
        for stack in each.stacks:
            yield f"{each.name}.{stack}" if each.name else stack, each.module._parameters[stack], each, stack


def _counts(each: Experts) -> list[str]:
    """The attributes of the module that say how many experts it has."""
    return [name for name, value in vars(each.module).items() if _COUNT in name and value == each.count]
