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
from zero.core.torch_private import version_of, without_torch_function
from zero.log import rank_zero
from zero.parallel.operators.strategy import Cuts
from zero.parallel.operators.torch_private import device_mesh, local_of, local_shape, with_class
from zero.plan.grid import DATA

_WORDS = {  # of torch's functional collectives
    "all_gather_into_tensor": "all-gather",
    "all_reduce": "all-reduce",
    "all_to_all_single": "all-to-all",
    "reduce_scatter_tensor": "reduce-scatter",
}


class Moved(NamedTuple):
    """A redistribution: of a tensor of which operator, in the backward or not, and its collectives."""

    where: str
    backward: bool
    collectives: tuple[str, ...]


class OperatorMesh:
    """The ranks that operators are cut over, and what moves on them; counts: how often each redistribution was done."""

    def __init__(self, meshes: Meshes, shape: tuple[int, ...]) -> None:
        """Collective: groups of ranks are made along each dim."""
        self.axis = meshes.along(*DATA)
        self.mesh = device_mesh(torch.tensor(self.axis.ranks).view(shape), meshes.lines(shape, "operators"))
        self.uncut = False  # operators are what they are without a strategy
        self.counts: Counter[Moved] = Counter()
        self._seen: dict[Any, tuple[str, ...]] = {}

    def placements(self, cuts: Cuts) -> list[Placement]:
        """Of a tensor whose dims are cut so."""
        dims = {at: dim for dim, own in enumerate(cuts) for at in own}
        return [Shard(dims[at]) if at in dims else Replicate() for at in range(self.mesh.ndim)]

    def of_rows(self, rows: Tensor) -> DTensor:
        """A tensor of which each rank has its rows."""
        return DTensor.from_local(rows, self.mesh, [Shard(0)] * self.mesh.ndim)

    def of_whole(self, whole: Tensor, cuts: Cuts) -> DTensor:
        """A tensor that all ranks have. Of its gradient each has a part of the sum, as the engine that adds them wants.

        Nothing moves, in the backward neither: around the slice that a rank takes, its gradient is zero.
        """
        for dim, own in enumerate(cuts):
            for at in own:
                whole = whole.chunk(self.mesh.size(at), dim)[self.mesh.get_local_rank(at)]
        placements = self.placements(cuts)
        parts = [Partial() if each.is_replicate() else each for each in placements]
        return DTensor.from_local(whole, self.mesh, placements, grad_placements=parts)

    def move(self, x: DTensor, placements: Sequence[Placement], where: str) -> DTensor:
        """`x` with other placements; its gradient takes the way back."""
        return x if tuple(placements) == x.placements else _Moving.apply(x, tuple(placements), self, where)

    def rows_of(self, x: DTensor, where: str) -> Tensor:
        """This rank's rows; of a single number, that."""
        if not x.ndim:
            return self.whole_of(x, where)
        if len(x) % self.axis.size:
            raise ValueError(
                f"zero.shard: '{where}' gives {tuple(x.shape)}, of which {self.axis.size} ranks have not equally many "
                "rows, as what has no strategy wants; give what comes next one"
            )
        return local_of(self.move(x, [Shard(0)] * self.mesh.ndim, f"rows of {where}"))

    def whole_of(self, x: DTensor, where: str) -> Tensor:
        """All of it. Each rank makes a loss of its own of it, and the gradients add up."""
        whole = self.move(x, [Replicate()] * self.mesh.ndim, f"all of {where}")
        return local_of(whole, [Partial()] * self.mesh.ndim)

    def redistribute(self, x: DTensor, placements: Sequence[Placement], where: str, backward: bool) -> DTensor:
        """Without a graph; logged the first time, and counted."""
        key = (where, backward, x.placements, tuple(placements))
        leaves = x.to_local().nbytes * (self.axis.size - 1) // self.axis.size
        collective = self.axis.watchdog.begin("redistribution", where, leaves, self.axis.ranks, attends=True)
        call = _Call(lambda: x.redistribute(placements=placements))
        if key not in self._seen:
            with CommDebugMode() as seen:
                self.axis.watchdog.wait((call,), collective)
            counts = {str(op).split(".")[-1]: count for op, count in seen.get_comm_counts().items()}
            self._seen[key] = tuple(word for name, word in _WORDS.items() for _ in range(counts.get(name, 0)))
            way = f"{_text(x.placements)} -> {_text(placements)}{' in the backward' * backward}"
            rank_zero(logging.INFO, "zero.shard: %s: %s by %s", where, way, ", ".join(self._seen[key]) or "no message")
        else:
            self.axis.watchdog.wait((call,), collective)
        self.counts[Moved(where, backward, self._seen[key])] += 1
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
        ctx.way = mesh, where, tuple(Replicate() if each.is_partial() else each for each in x.placements)
        return mesh.redistribute(x, placements, where, False)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[Any, ...]:
        mesh, where, placements = ctx.way
        moved = grad if placements == grad.placements else mesh.redistribute(grad, placements, where, True)
        return moved, None, None, None


class Placed(DTensor):
    """What an operator gave. Other code of the model finds this rank's rows of it, and operators take it as it lies."""

    mesh_of_operators: OperatorMesh
    where: str
    rows: tuple[Tensor, int] | None = None  # and their version

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Any function, of the rows."""
        if func in _OF_ANY:
            return super().__torch_function__(func, types, args, kwargs or {})
        args, kwargs = tree_map_only(Placed, lambda each: each.plain(), (args, kwargs or {}))
        return func(*args, **kwargs)

    def plain(self) -> Tensor:
        """This rank's rows, which are fetched once for all that want them, and may be written into."""
        if self.rows is None:
            with torch.set_grad_enabled(self.requires_grad):
                rows = self.mesh_of_operators.rows_of(with_class(self, DTensor), self.where)
            self.rows = rows, version_of(rows)
        return self.rows[0]

    def as_it_lies(self) -> DTensor:
        """For operators; if something has written into the rows, these."""
        if self.rows is not None and version_of(self.rows[0]) != self.rows[1]:
            return self.mesh_of_operators.of_rows(self.rows[0])
        return with_class(self, DTensor)


# What is asked of a tensor wherever it lies, also by hooks of engines, which must not move it.
_NAMES = ["requires_grad", "grad_fn", "is_leaf", "grad", "dtype", "device", "layout", "ndim", "is_cuda", "is_meta"]
_OF_ANY = {
    *(getattr(torch.Tensor, name).__get__ for name in _NAMES),
    *(torch.Tensor.register_hook, torch.Tensor.retain_grad),
}


def text_of(x: Tensor) -> str:
    """The mesh, the placements, the local and the whole shape of a tensor."""
    with without_torch_function():
        if not isinstance(x, DTensor):
            return f"plain {tuple(x.shape)}: the rows of this rank, or what it has of a parameter"
        shape, mesh, placements = tuple(x.shape), tuple(x.device_mesh.shape), x.placements
        # MindSpore counts the dims of the device matrix from the right, and says -1 for a dim that is not cut.
        last = len(mesh) - 1
        cuts = [[last - at for at, each in enumerate(placements) if each == Shard(dim)] for dim in range(x.ndim)]
        matrix = tuple(own[0] if len(own) == 1 else tuple(own) or -1 for own in cuts)
        local = local_shape(x)
    return f"mesh {mesh}, placements {_text(placements)}, local {local} of {shape}; tensor map {matrix}"


def _text(placements: Sequence[Placement]) -> str:
    words = {Shard: lambda each: f"cut {each.dim}", Replicate: lambda _: "whole"}
    return f"({', '.join(words.get(type(each), lambda _: 'partial')(each) for each in placements)})"
