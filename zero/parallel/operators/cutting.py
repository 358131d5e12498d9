"""Cuts the operators of a model that have a strategy, by the JSON or by `zero.shard`, and feeds them."""

from __future__ import annotations

import contextlib
import logging
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from zero.config import Config
from zero.core import comm
from zero.core.agree import agree
from zero.core.comm import local_device
from zero.core.hooks import tensors_in
from zero.core.mesh import Meshes
from zero.core.tensors import map_leaves
from zero.core.torch_private import require_torch
from zero.log import rank_zero
from zero.parallel.division import Division
from zero.parallel.operators.strategy import Strategy, plan_mesh, strategy_of
from zero.parallel.tensor.first_step import compare_batch
from zero.plan.grid import DATA
from zero.plan.patterns import hits

T = TypeVar("T", bound=Callable[..., Any])

_STRATEGY = "_zero_strategy"  # of a module, or a function that is to be cut


def shard(target: T, in_strategy: Any, out_strategy: Any = None) -> T:
    """Have an engine cut a module's forward, or a function, over its ranks; returns the module, or what to call.

    in_strategy: the pieces of each dim, ((4, 1), (1, 1)), of each tensor that it is given and, behind them, of the
    module's own parameters; None for a tensor that is whole and the same on all ranks. Their product divides the ranks;
    ranks beyond it compute the same. out_strategy: the pieces of the result; without it that stays as it comes, perhaps
    as parts of a sum, and is moved where the next operator wants it otherwise, or its rows. A function is to be an
    attribute of the module that calls it. Raises ValueError for what are no pieces.
    """
    strategy = strategy_of(getattr(target, "__name__", type(target).__name__), target, in_strategy, out_strategy)
    if isinstance(target, nn.Module):
        setattr(target, _STRATEGY, strategy)
        return target
    from zero.parallel.operators.operator import CutFunction  # imports DTensor

    return CutFunction(target, strategy)  # type: ignore[return-value]


def layout(x: torch.Tensor) -> str:
    """How a tensor lies on the ranks: mesh, placements, local and whole shape, and MindSpore's tensor map."""
    from zero.parallel.operators.placed import text_of

    return text_of(x)


def strategies_in(model: nn.Module, settings: Config) -> list[tuple[Any, Strategy]]:
    """What is cut, modules and functions, and how. Raises ValueError for a pattern that names no module, and beside
    other divisions."""
    found, section, left = list[tuple[Any, Strategy]](), settings.zero.shard, {*settings.zero.shard}
    for path, module in model.named_modules():
        own = getattr(module, _STRATEGY, None)
        if own is not None:
            own = own._replace(name=path)
        for pattern in hits(section, type(module).__name__, path):
            left.discard(pattern)
            said = section[pattern] if isinstance(section[pattern], Mapping) else {"in": section[pattern]}
            own = strategy_of(path, module, said.get("in"), said.get("out"))
        if own is not None:
            found.append((module, own))
        for name, value in vars(module).items():
            if type(own := getattr(value, "strategy", None)) is Strategy:
                found.append((value, own._replace(name=f"{path}.{name}".lstrip("."))))
    if left:
        raise ValueError(f"zero.shard: {sorted(left)} name no module; there are {[*dict(model.named_modules())][1:]}")
    cut = {axis: size for axis in ("pp", "tp", "cp", "ep") if (size := settings.grid.size(axis)) > 1}
    if found and (cut or settings.zero.reduce == "tree" or settings.zero.mean == "tokens"):
        raise ValueError(
            f"zero.shard: operators are cut over the ranks with samples, on a grid of these alone (got {cut}), whose "
            "gradients are sums of parts: zero.reduce 'tree' and zero.mean 'tokens' are not for them"
        )
    return found


class CutOperators(Division):
    """The operators of a model that are cut over the ranks with samples, until `restore`."""

    RECORD, WHAT = "_zero_cut_operators", "operators"

    def __init__(self, model: nn.Module, found: list[tuple[Any, Strategy]], meshes: Meshes, full: bool) -> None:
        """Collective. full: all ranks are given the whole batch, and get whole outputs."""
        if (before := model.__dict__.get(self.RECORD)) is not None:
            before.restore()  # of an engine that was dropped
        super().__init__(model, {}, meshes.along(*DATA))
        require_torch((2, 13), "operators with strategies")
        from zero.parallel.operators.operator import CutForward, Cutter
        from zero.parallel.operators.placed import OperatorMesh, Placed

        shape, placings = plan_mesh(self.axis.size, [strategy for _, strategy in found])
        self.mesh, self._kind, self._full, self._compared = OperatorMesh(meshes, shape), Placed, full, False
        for (target, strategy), placing in zip(found, placings, strict=True):
            cutter = Cutter(self.mesh, strategy, placing)
            if isinstance(target, nn.Module):
                self.forwards.append(CutForward(target, cutter))
            else:
                self._changed.append((target, "cutter", None))
                target.cutter = cutter
        rank_zero(logging.INFO, "zero.shard: %d operators on a mesh %s of ranks", len(found), shape)

    @contextlib.contextmanager
    def uncut(self) -> Iterator[None]:
        """Inside, each rank computes whole operators, as of texts that it generates for itself."""
        before, self.mesh.uncut = self.mesh.uncut, True
        try:
            yield
        finally:
            self.mesh.uncut = before

    def before_step(self) -> None:
        """Nothing is compared."""

    def run(self, call: Callable[..., Any], /, *inputs: Any, **kwargs: Any) -> Any:
        """The model on its rows of the batch that all are given, or on its own batch.

        ValueError for batches that have other shapes on other ranks, or rows that these do not divide; without a graph
        each rank then computes all it has alone.
        """
        shapes = [[*each.shape] for each in tensors_in((inputs, kwargs))]
        ranks, rows = self.axis.size, next((shape[0] for shape in shapes if shape), 0)
        if not self._full:
            mark = torch.tensor([zlib.crc32(repr(shapes).encode())], device=local_device())
            marks = comm.gather_scalars(mark, self.axis, "shapes of a batch").flatten().tolist()
        elif not self._compared:
            compare_batch((inputs, kwargs), self.axis, "zero.full_batch")
            self._compared = True
        if rows % ranks if self._full else len({*marks}) > 1:
            if torch.is_grad_enabled():
                every = shapes if self._full else agree(shapes, self.axis)
                raise ValueError(
                    f"zero.shard: {ranks} ranks are given batches of the shapes {every}; they want equally many rows "
                    "each, padded alike; leave the last batch out"
                )
            with self.uncut():
                return call(*inputs, **kwargs)

        def cut(leaf: Any) -> Any:
            of_batch = self._full and isinstance(leaf, torch.Tensor) and leaf.ndim and len(leaf) == rows
            return leaf.chunk(ranks)[self.axis.rank] if of_batch else leaf

        def give(leaf: Any) -> Any:
            leaf = leaf.plain() if isinstance(leaf, self._kind) else leaf
            if self._full and isinstance(leaf, torch.Tensor) and not leaf.ndim and leaf.is_floating_point():
                mean = comm.gather_scalars(leaf.detach()[None], self.axis, "losses").mean()
                return mean + (leaf - leaf.detach())  # the number is that of all rows, the gradient of these
            of_batch = self._full and isinstance(leaf, torch.Tensor) and leaf.ndim and len(leaf) * ranks == rows
            return self.mesh.whole_of(self.mesh.of_rows(leaf), "full_batch") if of_batch else leaf

        inputs, kwargs = map_leaves((inputs, kwargs), cut)
        return map_leaves(call(*inputs, **kwargs), give)
