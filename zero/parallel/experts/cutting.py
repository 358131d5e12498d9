"""Divides the experts of a model among ranks: stacks of their weights are cut, and forwards send tokens around."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn

from zero.config import Config
from zero.core.agree import agree
from zero.core.comm import Axis
from zero.core.mesh import Meshes
from zero.core.owner import axes_of, cut_of
from zero.parallel.division import Division, Place
from zero.parallel.experts.dispatch import DispatchedForward
from zero.parallel.experts.find import Experts, experts_of
from zero.parallel.experts.separate import SeparateExperts, told_experts
from zero.plan.grid import DENSE, EXPERTS
from zero.plan.tensors import slice_of

_COUNT = "expert"  # in the name of an attribute that says how many there are


class CutExperts(Division):
    """The experts of a model, divided among the ranks along ep until `restore`.

    found: the modules that have them, those of other ranks' stages included.
    """

    RECORD, WHAT = "_zero_cut_experts", "experts"

    def __init__(self, model: nn.Module, found: Sequence[Experts], meshes: Meshes) -> None:
        """Collective over ep: all ranks take the values of the first one."""
        here, axis = set(model.modules()), meshes.along("ep")
        self.found, found = found, [each for each in found if each.module in here]
        super().__init__(model, dict(places_of(model, found, axis, meshes.grid.size("tp") > 1)), axis)
        self._named = [each.module.deepspeed_experts for each in found if isinstance(each.module, SeparateExperts)]
        for experts in self._named:
            experts.number(self.axis.rank * len(experts))
        self._cut([(name, each.param) for name, each in self._places.items()], meshes)
        axes = axis, meshes.along("tp")
        self.forwards = [DispatchedForward(each, *axes, number) for number, each in enumerate(found)]
        counting = [(each.count, module) for each in found for module in (each.module, *each.adapters(model))]
        for count, module in counting:
            for name in _counts(module, count):
                self._changed.append((module, name, count))
                setattr(module, name, count // axis.size)
        self._bypassed = dict[str, str]()  # stacks that had a gradient without a call of their module, and its class
        self._watching = [
            each.module._parameters[stack].register_hook(self._watch(f"{each.name}.{stack}".lstrip("."), forward))
            for each, forward in zip(found, self.forwards, strict=True)
            for stack in each.stacks
            if each.module._parameters[stack].requires_grad
        ]
        self.attach(meshes)

    def _watch(self, name: str, forward: DispatchedForward) -> Callable[[Any], None]:
        def seen(_: Any) -> None:
            if not forward.called:
                self._bypassed[name] = type(forward.module).__name__

        return seen

    def before_step(self) -> None:
        """Gradients are there; raise RuntimeError before the first step where experts compute without a call."""
        if not self._watching:
            return
        self._close()
        found = next(filter(None, agree(self._bypassed, self.axis, name="calls of experts")), None)
        if found:
            names = ", ".join(f"'{name}' ({kind})" for name, kind in sorted(found.items()))
            raise RuntimeError(
                f"expert_parallel: {names} had gradients, and no forward called the module: whoever reads its "
                f"parameters finds the experts of one of {self.axis.size} ranks. Call the module with tokens, their "
                "experts and weights, or leave it out by expert_parallel.moe_layer_pattern"
            )

    def _close(self) -> None:
        for handle in self._watching:
            handle.remove()
        self._watching = []

    def attach(self, meshes: Meshes) -> None:
        """The model has an engine, perhaps another one than before, whose ranks are the same."""
        self.axis = meshes.apart_along("experts", "ep")
        for forward in self.forwards:
            forward.ranks, forward.peers = self.axis, meshes.along("tp")

    def restore(self, alone: bool = False) -> None:
        """As of any division; separate experts are named as they were made."""
        self._close()
        super().restore(alone)
        for experts in self._named:
            experts.number(0)


def divided(model: nn.Module, settings: Config, rank: int) -> list[Experts] | CutExperts | None:
    """The experts to divide; None where they are not, or by hand; the record where they are for another engine.

    Raises ValueError for what cannot be divided.
    """
    ranks = settings.grid.ranks("ep", rank)
    told, tp = told_experts(model).get("ep"), settings.grid.size("tp")
    if told is not None and (told, 1) != (len(ranks), tp):
        raise ValueError(
            f"initialize(): got MoE layers of ep_size {told} on a grid of ep {len(ranks)} x tp {tp}; wanted tp 1, "
            "and beside a mesh or an mpu the same expert_parallel.ep_size in the JSON"
        )
    if len(ranks) == 1:
        return None
    if (before := model.__dict__.get(CutExperts.RECORD)) is not None:
        if before.axis.size != len(ranks):
            raise ValueError(
                f"initialize(): the experts of this model were divided among {before.axis.size} ranks, for an engine "
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
            if param not in names:
                continue  # of a module before, which shares it
            cut = slice_of(tuple(param.shape), part.dim, part.ranges[ranks.rank])
            yield names.pop(param), Place(param, cut, EXPERTS, part.dim, part.ranges)
        for param in each.module.parameters() if shared else ():
            if param in names:
                yield names.pop(param), Place(param, None, DENSE._replace(sums=("tp",)))


def _counts(module: nn.Module, count: int) -> list[str]:
    """The attributes of a module that say how many experts it has."""
    return [name for name, value in vars(module).items() if _COUNT in name and "per_tok" not in name and value == count]
