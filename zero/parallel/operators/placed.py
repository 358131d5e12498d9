"""Tensors on the mesh of operators: DTensors inside of them, this rank's rows outside, and what moves in between."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._pytree import tree_map_only

from zero.core.mesh import Meshes
from zero.core.torch_private import without_torch_function
from zero.log import rank_zero
from zero.parallel.operators.strategy import MeshPlan
from zero.parallel.operators.torch_private import device_mesh, local_shape, with_class
from zero.plan.grid import DATA

_WORDS = {  # of torch's functional collectives
    "all_gather_into_tensor": "all-gather",
    "all_reduce": "all-reduce",
    "all_to_all_single": "all-to-all",
    "reduce_scatter_tensor": "reduce-scatter",
}


class Moved(NamedTuple):
    """A redistribution: before or behind which operator, in the backward or not, and its collectives in order."""

    where: str
    backward: bool
    collectives: tuple[str, ...]


class OperatorMesh:
    """The ranks that operators are cut over, and what moves on them; counts: how often each redistribution was done."""

    def __init__(self, meshes: Meshes, plan: MeshPlan) -> None:
        """Collective: groups of ranks are made along each dim of the plan's mesh."""
        self.axis, self.plan = meshes.along(*DATA), plan
        ranks = torch.tensor(self.axis.ranks).view(plan.shape)
        self.mesh = mesh = device_mesh(ranks, meshes.lines(plan.shape, "operators"))
        self.counts: Counter[Moved] = Counter()
        self.rows: tuple[Placement, ...] = (Shard(0),) * mesh.ndim
        self.whole: tuple[Placement, ...] = (Replicate(),) * mesh.ndim
        self.parts: tuple[Placement, ...] = (Partial(),) * mesh.ndim
        self._collectives: dict[Any, tuple[str, ...]] = {}

    def placements(self, dims: Sequence[tuple[int, ...]]) -> list[Placement]:
        """Of a tensor whose dims are cut along these of the mesh."""
        found: list[Placement] = [*self.whole]
        for dim, own in enumerate(dims):
            for at in own:
                found[at] = Shard(dim)
        return found

    def of_rows(self, rows: Tensor) -> DTensor:
        """A tensor of which each rank has its rows."""
        if not rows.ndim:
            return self.of_whole(rows, [])
        return DTensor.from_local(rows, self.mesh, self.rows)

    def of_whole(self, whole: Tensor, dims: Sequence[tuple[int, ...]]) -> DTensor:
        """A tensor that all ranks have; its gradients are parts of a sum over the ranks, of which each has what it made.

        Nothing moves, also not in the backward: the slice that a rank takes has zeros around its gradient.
        """
        coordinate, placements = self.mesh.get_coordinate(), self.placements(dims)
        for dim, own in enumerate(dims):
            for at in own:
                whole = whole.chunk(self.mesh.size(at), dim)[coordinate[at]]
        grads = [Partial() if each.is_replicate() else each for each in placements]
        return DTensor.from_local(whole, self.mesh, placements, grad_placements=grads)

    def move(self, x: DTensor, placements: Sequence[Placement], where: str) -> DTensor:
        """`x` with other placements; its gradient takes the same way back."""
        return x if tuple(placements) == x.placements else _Moving.apply(x, tuple(placements), self, where)

    def rows_of(self, x: DTensor, where: str) -> Tensor:
        """This rank's rows; of a single number, that."""
        if not x.ndim:
            return self.move(x, self.whole, where).to_local(grad_placements=self.parts)
        if len(x) % self.axis.size:
            raise ValueError(
                f"zero.shard: {where} gives {tuple(x.shape)}, whose rows {self.axis.size} ranks do not divide among "
                "them; give what comes next a strategy, too"
            )
        return self.move(x, self.rows, where).to_local()

    def gathered(self, rows: Tensor) -> Tensor:
        """The rows of all ranks, of which each may make a loss of its own: gradients add up."""
        return self.move(self.of_rows(rows), self.whole, "full_batch").to_local(grad_placements=self.parts)

    def redistribute(self, x: DTensor, placements: Sequence[Placement], where: str, backward: bool) -> DTensor:
        """Without a graph; logged the first time, and counted."""
        key = (x.placements, tuple(placements), tuple(x.shape), where, backward)
        leaves = x.to_local().nbytes * (self.axis.size - 1) // self.axis.size
        collective = self.axis.watchdog.begin("redistribution", where, leaves, self.axis.ranks, attends=True)
        call = _Call(lambda: x.redistribute(placements=placements))
        if key in self._collectives:
            self.axis.watchdog.wait((call,), collective)
        else:
            with CommDebugMode() as seen:
                self.axis.watchdog.wait((call,), collective)
            found = {str(op).split(".")[-1]: count for op, count in seen.get_comm_counts().items()}
            words = [word for name, word in _WORDS.items() for _ in range(found.get(name, 0))]
            self._collectives[key] = tuple(words)
            way = f"{_text(x.placements)} -> {_text(placements)}{' in the backward' * backward}"
            rank_zero(logging.INFO, "zero.shard: %s: %s by %s", where, way, " and ".join(words) or "no message")
        self.counts[Moved(where, backward, self._collectives[key])] += 1
        return call.result


class _Call:
    """Stands for a message where a collective of torch's waits for itself."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call

    def wait(self) -> None:
        self.result = self._call()


class _Moving(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: DTensor, placements: Any, mesh: OperatorMesh, where: str) -> DTensor:
        ctx.way = mesh, where, [Replicate() if each.is_partial() else each for each in x.placements]
        return mesh.redistribute(x, placements, where, False)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[Any, ...]:
        mesh, where, placements = ctx.way
        moved = grad if tuple(placements) == grad.placements else mesh.redistribute(grad, placements, where, True)
        return moved, None, None, None


class Placed(DTensor):
    """What an operator gave. Other code of the model finds this rank's rows of it, and operators take it as it lies."""

    mesh_of_operators: OperatorMesh
    where: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Any function, of the rows."""
        if func in _OF_ANY:
            return super().__torch_function__(func, types, args, kwargs or {})
        args, kwargs = tree_map_only(Placed, lambda each: each.plain(), (args, kwargs or {}))
        return func(*args, **kwargs)

    def plain(self) -> Tensor:
        """This rank's rows, which are fetched once for all that want them."""
        made = self.__dict__.setdefault("_rows", {})
        if torch.is_grad_enabled() not in made:
            made[torch.is_grad_enabled()] = self.mesh_of_operators.rows_of(with_class(self, DTensor), self.where)
        return made[torch.is_grad_enabled()]


# What is asked of a tensor wherever it lies: also by hooks of engines, which must not move it.
_OF_ANY = {
    *(
        getattr(torch.Tensor, name).__get__
        for name in ("requires_grad", "grad_fn", "is_leaf", "dtype", "device", "layout")
    ),
    *(getattr(torch.Tensor, name).__get__ for name in ("grad", "_base", "_version", "ndim", "is_cuda", "is_meta")),
    *(torch.Tensor.register_hook, torch.Tensor.dim, torch.Tensor.is_floating_point, torch.Tensor.is_complex),
}


def text_of(x: Tensor) -> str:
    """The mesh, the placements, the local and the whole shape of a tensor."""
    if not isinstance(x, DTensor):
        return f"plain, {tuple(x.shape)}: what this rank has of its rows, or a whole parameter"
    with without_torch_function():
        shape, mesh, placements = tuple(x.shape), tuple(x.device_mesh.shape), x.placements
    local = local_shape(x)
    # MindSpore counts the dims of the device matrix from the right, and says -1 for one that is not cut.
    cuts = [
        [len(mesh) - 1 - at for at, each in enumerate(placements) if each == Shard(dim)] for dim in range(len(shape))
    ]
    matrix = [own[0] if len(own) == 1 else tuple(own) or -1 for own in cuts]
    return f"mesh {mesh}, placements {_text(placements)}, local {local} of {shape}; tensor map {tuple(matrix)}"


def _text(placements: Sequence[Placement]) -> str:
    said = [
        f"cut {each.dim}" if isinstance(each, Shard) else "whole" if each.is_replicate() else "partial"
        for each in placements
    ]
    return f"({', '.join(said)})"
