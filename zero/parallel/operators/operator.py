"""An operator whose tensors are cut as a strategy says."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_any, tree_leaves, tree_map_only

from zero.core.replaced_forward import ReplacedForward
from zero.core.torch_private import without_torch_function
from zero.parallel.operators.placed import OperatorMesh, Placed
from zero.parallel.operators.strategy import Placing, Strategy
from zero.parallel.operators.torch_private import no_implicit_moves, with_class


class CutForward(ReplacedForward):
    """The forward of one module, whose tensors and own parameters are cut."""

    def __init__(self, module: nn.Module, strategy: Strategy, mesh: OperatorMesh) -> None:
        super().__init__(module)
        self._strategy, self._mesh, self._placing = strategy, mesh, mesh.plan.place(strategy)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As the module's own forward; never compiled, as its ranks wait for each other."""
        run = torch.compiler.disable(cut) if torch.compiler.is_compiling() else cut
        own = [each for each in self.module._parameters.values() if each is not None]
        return run(self._mesh, self._strategy, self._placing, self.plain, own, args, kwargs)


class CutFunction:
    """A function whose tensors are cut where an engine trains the module that has it as an attribute.

    Elsewhere, and in copies, it is the function itself.
    """

    def __init__(self, function: Callable[..., Any], strategy: Strategy) -> None:
        self.function, self.strategy = function, strategy
        self.mesh: OperatorMesh | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As the function."""
        mesh = self.mesh
        if mesh is None:
            leaves = tree_leaves((args, kwargs))
            mesh = next((each.mesh_of_operators for each in leaves if isinstance(each, Placed)), None)
        if mesh is None:
            return self.function(*args, **kwargs)
        run = torch.compiler.disable(cut) if torch.compiler.is_compiling() else cut
        return run(mesh, self.strategy, mesh.plan.place(self.strategy), self.function, [], args, kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return CutFunction, (self.function, self.strategy)


def cut(
    mesh: OperatorMesh,
    strategy: Strategy,
    placing: Placing,
    call: Callable[..., Any],
    own: Sequence[nn.Parameter],
    args: Any,
    kwargs: Any,
) -> Any:
    """`call` of tensors that are cut, with the parameters `own` behind them; its results are `Placed`."""
    name, count = strategy.name, sum(isinstance(each, Tensor) for each in tree_leaves((args, kwargs)))
    if len(strategy.inputs) not in range(count, count + len(own) + 1):
        raise ValueError(
            f"zero.shard: {name} is called with {count} tensors and has {len(own)} parameters, and its strategy "
            f"{strategy.inputs} is of {len(strategy.inputs)}; say the pieces of each, None for a whole one"
        )
    left = iter(zip(placing.inputs, strategy.inputs, strict=True))

    def enter(x: Tensor) -> DTensor:
        dims, pieces = next(left)
        _fits(name, x, pieces, mesh)
        if isinstance(x, Placed):
            x = with_class(x, DTensor)
        elif not isinstance(x, DTensor):
            if dims is None or isinstance(x, nn.Parameter):
                return mesh.of_whole(x, dims or [])
            x = mesh.of_rows(x)
        return mesh.move(x, mesh.placements(dims or []), name)

    args, kwargs = tree_map_only(Tensor, enter, (args, kwargs))
    dims = {}
    for param, (each, pieces) in zip(own, left, strict=False):
        _fits(name, param, pieces, mesh)
        dims[id(param)] = each or []
    with _explained(name), _Inside(mesh, dims), no_implicit_moves():
        out = call(*args, **kwargs)

    def leave(x: Tensor) -> Tensor:
        if not isinstance(x, DTensor):
            return x
        if placing.output is not None:
            _fits(name, x, strategy.output, mesh)
            x = mesh.move(x, mesh.placements(placing.output), name)
        found = with_class(x, Placed)
        found.mesh_of_operators, found.where = mesh, name
        return found

    return tree_map_only(Tensor, leave, out)


class _Inside(TorchFunctionMode):
    """Inside of an operator all tensors are on the mesh: whatever meets one there, parameters and masks, is whole."""

    def __init__(self, mesh: OperatorMesh, dims: dict[int, Any]) -> None:
        super().__init__()
        self._mesh, self._dims = mesh, dims

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = args, kwargs or {}
        if tree_any(lambda each: isinstance(each, DTensor) or id(each) in self._dims, given):
            args, kwargs = tree_map_only(Tensor, self._enter, given)
        return func(*args, **(kwargs or {}))

    def _enter(self, x: Tensor) -> Tensor:
        if isinstance(x, Placed):
            return with_class(x, DTensor)
        return x if isinstance(x, DTensor) else self._mesh.of_whole(x, self._dims.get(id(x), []))


@contextlib.contextmanager
def _explained(name: str) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, NotImplementedError) as error:
        if "mplicit redistribution" not in str(error) and "sharding strategy" not in str(error):
            raise
        raise ValueError(
            f"zero.shard: {name}: DTensor has no rule by which ranks could compute this on their pieces alone "
            f"({str(error).partition(' on DeviceMesh')[0]}); cut other dims, or leave it without a strategy"
        ) from error


def _fits(name: str, x: Tensor, pieces: tuple[int, ...] | None, mesh: OperatorMesh) -> None:
    """Raise ValueError where the pieces are not those of a tensor of this shape, of all rows."""
    if pieces is None:
        return
    with without_torch_function():
        rows = mesh.axis.size if x.ndim and not isinstance(x, DTensor | nn.Parameter) else 1
        shape = tuple(size * (1 if at else rows) for at, size in enumerate(x.shape))
    if len(shape) != len(pieces) or any(size % count for size, count in zip(shape, pieces, strict=False)):
        raise ValueError(f"zero.shard: {name}: the strategy {pieces} does not divide a tensor of shape {shape}")
