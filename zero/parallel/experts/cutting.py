"""Divides the experts of a model among ranks: stacks of their weights are cut, and forwards send tokens around."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import NoReturn

import torch
from torch import nn

from zero.config import Config
from zero.core import comm
from zero.core.comm import Axis
from zero.core.mesh import Meshes
from zero.core.owner import axes_of, cut_of
from zero.parallel.experts.dispatch import DispatchedForward
from zero.parallel.experts.find import Experts, experts_of
from zero.parallel.tensor.cutting import cut_param, deferred_in, make_whole, refuse_graphs, whole_only
from zero.parallel.tensor.plan import Place
from zero.plan.grid import DENSE, EXPERTS, UnitAxes
from zero.plan.tensors import slice_of

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
        places = dict(places_of(model, found, self.ranks, self.peers.size > 1))
        refuse_graphs({name: place.param for name, place in places.items() if place.cut is not None})
        model.__dict__[RECORD] = self
        shapes = {name: place.cut.shape for name, place in places.items() if place.cut is not None}
        self._handle = model.register_state_dict_post_hook(functools.partial(whole_only, shapes, self.ranks.size))
        self._placed: list[tuple[nn.Parameter, Place, UnitAxes]] = []
        for name, place in places.items():
            if deferred_in(place.param) is None:
                comm.broadcast(place.param.detach(), 0, self.ranks, name)
            self._placed.append((place.param, place, axes_of(place.param)))
            cut_param(place.param, name, place, self.ranks.rank, meshes)
        self.forwards = [DispatchedForward(each, self.ranks, self.peers) for each in found]
        counting = [(each, module) for each in found for module in (each.module, *each.adapters(model))]
        self._changed = [
            (module, name, each.count) for each, module in counting for name in _counts(module, each.count)
        ]
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


def places_of(model: nn.Module, found: Sequence[Experts], ranks: Axis, shared: bool) -> Iterator[tuple[str, Place]]:
    """Where parameters of experts are, by name.

    What all experts of a module have in common stays whole; with `shared` tokens each rank sees a part of them.
    """
    names = {param: name for name, param in model.named_parameters()}
    for each in found:
        adapters = each.adapters(model)
        for part in each.parts(ranks.size, adapters):
            param = part.module._parameters[part.own]
            cut = slice_of(tuple(param.shape), part.dim, part.ranges[ranks.rank])
            yield names.pop(param), Place(param, cut, EXPERTS, part.dim, part.ranges)
        for param in each.module.parameters() if shared else ():
            if param in names:
                yield names.pop(param), Place(param, None, DENSE._replace(sums=("tp",)))


def _counts(module: nn.Module, count: int) -> list[str]:
    """The attributes of a module that say how many experts it has."""
    return [name for name, value in vars(module).items() if _COUNT in name and value == count]
