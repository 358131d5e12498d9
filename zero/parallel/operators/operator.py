"""An operator whose tensors are cut as a strategy says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_any, tree_leaves, tree_map_only

from zero.core.replaced_forward import ReplacedForward
from zero.core.torch_private import version_of, without_torch_function
from zero.parallel.operators.faults import fault_of
from zero.parallel.operators.placed import OperatorMesh, Placed
from zero.parallel.operators.strategy import Placing, Strategy
from zero.parallel.operators.torch_private import no_implicit_moves, with_class

_KNOWN = "torch computes this wrong: "
_NO_RULE = (  # in what DTensor says
    *("mplicit redistribution", "sharding strategy", "hybrid sharding", "StridedShard", "without redistribution"),
    *("mixed torch.Tensor and DTensor", "placement changes", "harding propagation failed", _KNOWN),
)


class Cutter:
    """Calls functions on tensors that are cut by one strategy."""

    def __init__(self, mesh: OperatorMesh, strategy: Strategy, placing: Placing) -> None:
        self._mesh, self._strategy, self._placing = mesh, strategy, placing

    def __call__(self, call: Callable[..., Any], own: Sequence[nn.Parameter], args: Any, kwargs: Any) -> Any:
        """`call(*args, **kwargs)` of a module with the parameters `own`; its results are `Placed`. Never compiled."""
        if self._mesh.uncut:
            return call(*args, **kwargs)
        run = torch.compiler.disable(self._call) if torch.compiler.is_compiling() else self._call
        return run(call, own, args, kwargs)

    def _call(self, call: Callable[..., Any], own: Sequence[nn.Parameter], args: Any, kwargs: Any) -> Any:
        mesh, name, inputs = self._mesh, self._strategy.name, self._strategy.inputs
        count = sum(isinstance(each, Tensor) for each in tree_leaves((args, kwargs)))
        if not count <= len(inputs) <= count + len(own):
            raise ValueError(
                f"zero.shard: '{name}' is called with {count} tensors, has {len(own)} parameters, and its strategy "
                f"{inputs} is of {len(inputs)}; say the pieces of each, None for one that is whole"
            )
        cuts = iter(zip(self._placing.inputs, inputs, strict=True))
        args, kwargs = tree_map_only(Tensor, lambda x: self._enter(x, *next(cuts)), (args, kwargs))
        given = [(each, version_of(each)) for each in tree_leaves((args, kwargs)) if isinstance(each, DTensor)]
        with _Inside(mesh, {id(param): self._fitting(param, *each) for param, each in zip(own, cuts, strict=False)}):
            try:
                state = _random_state()
                with no_implicit_moves():
                    out = call(*args, **kwargs)
            except (AssertionError, RuntimeError, NotImplementedError, ValueError) as error:
                if not any(word in str(error) for word in _NO_RULE):
                    if type(error) is RuntimeError:
                        raise RuntimeError(f"zero.shard: '{name}', of this rank's pieces: {error}") from error
                    raise
                raise self._no_rule(str(error).partition(" on DeviceMesh")[0]) from error
        if not torch.equal(state, _random_state()):
            raise ValueError(
                f"zero.shard: '{name}' draws random numbers, which are others on each rank, also for what they have in "
                "common; leave what draws them without a strategy"
            )
        if any(version_of(each) != version for each, version in given):
            raise ValueError(
                f"zero.shard: '{name}' writes into what it is given, which the rest of the model would not see; have "
                "it make a new tensor, as with inplace=False"
            )
        return tree_map_only(DTensor, self._leave, out)

    def _no_rule(self, why: str) -> ValueError:
        return ValueError(
            f"zero.shard: '{self._strategy.name}': DTensor has no rule by which ranks compute this of their pieces "
            f"alone; cut other dims, or leave it without a strategy: {why}"
        )

    def _enter(self, x: Tensor, cuts: Any, pieces: Any) -> DTensor:
        cuts = self._fitting(x, cuts, pieces)
        if not isinstance(x, DTensor):
            if pieces is None or not x.ndim or isinstance(x, nn.Parameter):
                return self._mesh.of_whole(x, cuts)
            x = self._mesh.of_rows(x)
        return self._mesh.move(_inside(x), self._mesh.placements(cuts), f"into {self._strategy.name}")

    def _leave(self, x: DTensor) -> Placed:
        x = _inside(x)  # of an operator inside
        if not all(isinstance(each, Shard | Replicate | Partial) for each in x.placements):
            raise self._no_rule(f"it gives pieces that are no slices, {x.placements}")
        if self._placing.output is not None:
            cuts = self._fitting(x, self._placing.output, self._strategy.output)
            x = self._mesh.move(x, self._mesh.placements(cuts), f"out of {self._strategy.name}")
        found = with_class(x, Placed)
        found.mesh_of_operators, found.where = self._mesh, self._strategy.name
        return found

    def _fitting(self, x: Tensor, cuts: Any, pieces: Any) -> Any:
        """The cuts; ValueError where the pieces are not those of a tensor of this shape, of the rows of all ranks."""
        with without_torch_function():
            rows = 1 if isinstance(x, DTensor | nn.Parameter) else self._mesh.axis.size
            shape = tuple(size * (1 if at else rows) for at, size in enumerate(x.shape))
        if pieces is not None and (len(shape) != len(pieces) or any(map(int.__mod__, shape, pieces))):
            raise ValueError(f"zero.shard: '{self._strategy.name}': {pieces} does not divide a tensor of shape {shape}")
        return cuts or []


def _inside(x: DTensor) -> DTensor:
    return x.as_it_lies() if isinstance(x, Placed) else x


def _random_state() -> Tensor:
    return torch.cuda.get_rng_state() if torch.cuda.is_initialized() else torch.get_rng_state()


class CutForward(ReplacedForward):
    """The forward of one module, whose tensors and own parameters are cut."""

    def __init__(self, module: nn.Module, cutter: Cutter) -> None:
        super().__init__(module)
        self._cutter = cutter

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As the module's own forward."""
        own = [each for each in self.module._parameters.values() if each is not None]
        return self._cutter(self.plain, own, args, kwargs)


class CutFunction:
    """A function whose tensors are cut where an engine trains the module that has it; else, and in copies, itself."""

    def __init__(self, function: Callable[..., Any], strategy: Strategy) -> None:
        self.function, self.strategy = function, strategy
        self.cutter: Cutter | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As the function."""
        if self.cutter is not None:
            return self.cutter(self.function, [], args, kwargs)
        if any(isinstance(each, Placed) for each in tree_leaves((args, kwargs))):
            raise ValueError(
                f"zero.shard: '{self.strategy.name}' is no attribute of a module, where engines look for it"
            )
        return self.function(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return CutFunction, (self.function, self.strategy)


class _Inside(TorchFunctionMode):
    """Inside of an operator all tensors are on the mesh: parameters as they are cut, masks and constants whole."""

    def __init__(self, mesh: OperatorMesh, cuts: dict[int, Any]) -> None:
        super().__init__()
        self._mesh, self._cuts = mesh, cuts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = args, kwargs or {}
        if tree_any(lambda each: isinstance(each, DTensor) or id(each) in self._cuts, given):
            given = tree_map_only(Tensor, self._enter, given)
            if (fault := fault_of(func, *given)) is not None:
                raise NotImplementedError(f"{_KNOWN}{fault}")
        return func(*given[0], **given[1])

    def _enter(self, x: Tensor) -> Tensor:
        if isinstance(x, DTensor):
            return _inside(x)
        return self._mesh.of_whole(x, self._cuts.get(id(x), []))
