"""Cuts the operators of a model that have a strategy, by the JSON or by `zero.shard`, and feeds them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from zero.config import Config
from zero.core import comm
from zero.core.comm import local_device
from zero.core.hooks import tensors_in
from zero.core.mesh import Meshes
from zero.core.tensors import map_leaves
from zero.log import rank_zero
from zero.parallel.division import Division
from zero.parallel.operators.strategy import Strategy, kind_of, plan_mesh, strategy_of
from zero.parallel.tensor.first_step import compare_batch
from zero.plan.grid import DATA
from zero.plan.patterns import hits

T = TypeVar("T", bound=Callable[..., Any])

_STRATEGY = "_zero_strategy"  # of a module: what `shard` was told


def shard(target: T, in_strategy: Any, out_strategy: Any = None) -> T:
    """Have an engine cut a module's forward, or a function, over its ranks; returns the module, or the function to call.

    in_strategy: a tuple with the pieces of each dim, ((4, 1), (1, 1)), for each tensor that it is given and, behind
    them, each parameter of the module itself; None for a tensor that is whole and the same on all ranks. The product of
    pieces divides the ranks; the rest of them computes the same. out_strategy: the pieces of the result; without it the
    result stays as it comes, which may be the parts of a sum, and the next operator has it moved where it disagrees.
    A function is to be an attribute of the module that calls it. Raises ValueError for what are no pieces.
    """
    name = getattr(target, "__name__", type(target).__name__)
    strategy = strategy_of(name, kind_of(target), in_strategy, out_strategy)
    if isinstance(target, nn.Module):
        setattr(target, _STRATEGY, strategy)
        return target
    from zero.parallel.operators.operator import CutFunction  # imports DTensor

    return CutFunction(target, strategy)  # type: ignore[return-value]


def layout(x: torch.Tensor) -> str:
    """How a tensor lies on the ranks: mesh, placements, local and whole shape; and as MindSpore says it."""
    from zero.parallel.operators.placed import text_of

    return text_of(x)


def strategies_in(model: nn.Module, settings: Config) -> dict[str, tuple[Any, Strategy]]:
    """What is cut, and how, by the names of modules, or of the modules' attributes that are functions.

    Raises ValueError for a pattern that names no module, and for what are no pieces.
    """
    section = settings.zero.shard
    found, missing = dict[str, tuple[Any, Strategy]](), set(section)
    for path, module in model.named_modules():
        here = hits(section, type(module).__name__, path)
        missing.difference_update(here)
        if here:
            said = section[here[-1]]
            said = said if isinstance(said, Mapping) else {"in": said}
            strategy = strategy_of(path, kind_of(module), said.get("in"), said.get("out"))
            found[path] = module, strategy
        elif (own := getattr(module, _STRATEGY, None)) is not None:
            found[path] = module, own._replace(name=path or own.name)
        for name, value in vars(module).items():
            if type(value).__name__ == "CutFunction":
                value.strategy = value.strategy._replace(name=f"{path}.{name}".lstrip("."))
                found[value.strategy.name] = value, value.strategy
    if missing:
        names = [path for path, _ in model.named_modules() if path]
        raise ValueError(f"zero.shard: {sorted(missing)} name no module of the model; it has {names}")
    return found


class CutOperators(Division):
    """The operators of a model that are cut over the ranks with samples, until `restore`."""

    RECORD, WHAT = "_zero_cut_operators", "operators"

    def __init__(self, model: nn.Module, found: Mapping[str, tuple[Any, Strategy]], meshes: Meshes, full: bool) -> None:
        """Collective. full: all ranks are given the whole batch, and get whole outputs."""
        if (before := model.__dict__.get(self.RECORD)) is not None:
            before.restore()
        super().__init__(model, {}, meshes.along(*DATA))
        from zero.parallel.operators.operator import CutForward
        from zero.parallel.operators.placed import OperatorMesh, Placed

        plan = plan_mesh(self.axis.size, [strategy for _, strategy in found.values()])
        self.mesh = OperatorMesh(meshes, plan)
        for target, strategy in found.values():
            if isinstance(target, nn.Module):
                self.forwards.append(CutForward(target, strategy, self.mesh))
            else:
                self._changed.append((target, "mesh", None))
                target.mesh = self.mesh
        self._kind, self._full, self._compared = Placed, full, False
        rank_zero(logging.INFO, "zero.shard: %d operators on a mesh %s of ranks", len(found), plan.shape)

    def before_step(self) -> None:
        """Nothing is compared."""

    def run(self, call: Callable[..., Any], /, *inputs: Any, **kwargs: Any) -> Any:
        """The model on this rank's rows of the batch, or on its own batch; ValueError where ranks cannot have rows."""
        rows = next((len(each) for each in tensors_in((inputs, kwargs)) if each.ndim), 0)
        ranks = self.axis.size
        if not self._full:
            counts = comm.gather_scalars(torch.tensor([rows], device=local_device()), self.axis, "rows of a batch")
            if len({*map(tuple, counts)}) > 1:
                raise ValueError(f"zero.shard: ranks have {counts} rows; all want equally many")
            return map_leaves(call(*inputs, **kwargs), self._plain)
        if not self._compared:
            compare_batch((inputs, kwargs), self.axis)
            self._compared = True
        if rows % ranks:
            raise ValueError(
                f"zero.full_batch: {ranks} ranks do not divide the {rows} rows of a batch; drop the last ones"
            )

        def cut(leaf: Any) -> Any:
            whole = not isinstance(leaf, torch.Tensor) or not leaf.ndim or len(leaf) != rows
            return leaf if whole else leaf.chunk(ranks)[self.axis.rank]

        def gather(leaf: Any) -> Any:
            own = isinstance(leaf, torch.Tensor) and leaf.ndim and len(leaf) * ranks == rows
            return self.mesh.gathered(leaf) if own else leaf

        inputs, kwargs = map_leaves((inputs, kwargs), cut)
        return map_leaves(map_leaves(call(*inputs, **kwargs), self._plain), gather)

    def _plain(self, leaf: Any) -> Any:
        return leaf.plain() if isinstance(leaf, self._kind) else leaf
