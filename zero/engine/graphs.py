"""CUDA graphs of a micro-batch: its forward and its backward, by `torch.cuda.make_graphed_callables`.

At stages 0 to 2 parameters stay where they are, so what was captured once can be run again. What the host decides stays
outside: the loss scale, gradients that land and travel, the step. There is a graph for each class of inputs, that is,
of shapes, dtypes and values that are no tensors, and of such attributes of the modules; what cannot be captured, or
does more in Python than compute, as hooks do, runs as it is, and is warned of.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from zero.core.hooks import tensors_in
from zero.core.sharded_module import ShardedModule
from zero.log import log_once, rank_zero

LIMIT = 4  # classes of inputs that get a graph: each keeps gradients and outputs of its own
_TENSOR = object()
_PLAIN = (bool, int, float, str)
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


class GraphedModule:
    """Calls the module of an engine, by graphs where it trains."""

    def __init__(self, sharded: ShardedModule) -> None:
        self._sharded = sharded
        self._module = sharded.module
        self._children = dict(sharded.module.named_modules())
        children = [(name, vars(child)) for name, child in self._children.items()]
        self._plain = [(name, of, key) for name, of in children for key, value in of.items() if type(value) in _PLAIN]
        self._captured: list[Any] = []  # how parameters and buffers were at the captures
        self._graphs: dict[Any, _Graph | None] = {}  # by class of inputs; None: cannot be captured
        self._pool: Any = None  # the memory of all graphs, of which one runs at a time
        self._runs = 0
        self._round = -1  # the backwards that had ended at the last run

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the module returns for these arguments.

        A graph has room for one micro-batch: where another forward comes before the backward, it runs as it is.
        """
        graph, tensors = None, ()
        if self._module.training and torch.is_grad_enabled():
            graph, tensors = self._graph((args, kwargs))
        if graph is None:
            return self._module(*args, **kwargs)
        self._round, self._runs = self._sharded.reducer.rounds, self._runs + 1
        check = functools.partial(self._check, self._runs)
        # Copies, as the next run overwrites what the graph returns.
        outputs = [output.clone() for output in graph.run(*tensors)]
        for output in outputs:
            if output.requires_grad:
                output.register_hook(check)
        return graph.returned.whole(outputs)

    def _check(self, run: int, grad: torch.Tensor) -> None:
        if run != self._runs or self._sharded.reducer.rounds != self._round:
            raise RuntimeError(
                "a CUDA graph has room for one forward and its one backward, and another of either came before this "
                "backward; leave out graph_harvesting to run backward twice, or after later forwards"
            )

    def _graph(self, value: Any) -> tuple[_Graph | None, Sequence[torch.Tensor]]:
        """The graph for these arguments, if there is one, and their tensors."""
        if self._sharded.reducer.rounds == self._round:
            return _as_it_is("the backward of another has not come yet"), ()
        for unit in self._sharded.units:
            unit.ensure_gathered()  # after updates that run beside the loop, which a graph does not wait for
        if (hooked := self._hooked()) is not None:
            return _as_it_is(f"module '{hooked}' has hooks, which a graph would leave out"), ()
        captured = self._places()
        if captured != self._captured:
            self._captured, self._graphs = captured, {}
        try:
            inputs = _Parts.of(value)
            kind = *inputs.kind, *self._values()
            known = kind in self._graphs
        except TypeError as error:
            return _as_it_is(f"the arguments are not plain: {error}"), ()
        if not known and len(self._graphs) == LIMIT:
            what = "their inputs, or attributes of modules,"
            return _as_it_is(f"{what} are of other shapes or values than those of the first {LIMIT} kinds"), ()
        if not known:
            self._graphs[kind] = self._capture(inputs)
        return self._graphs[kind], inputs.tensors

    def _hooked(self) -> str | None:
        """The name of a module with hooks that are not ours."""
        for name, child in self._children.items():
            for hook in chain(*(vars(child)[kind].values() for kind in _HOOKS)):
                if not str(getattr(hook, "__module__", "")).startswith("zero."):
                    return name
        return None

    def _places(self) -> list[Any]:
        """Of the module's tensors, as a graph takes them for granted."""
        found: list[Any] = []
        for child in self._children.values():
            tensors = (*child._parameters.values(), *child._buffers.values())
            found += [(each.data_ptr(), each.requires_grad) for each in tensors if each is not None]
        return found

    def _values(self) -> list[Any]:
        """Of attributes that a forward may read, such as the probability of a dropout."""
        return [of.get(key) for _, of, key in self._plain]

    def _capture(self, inputs: _Parts) -> _Graph | None:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        before = self._values()
        try:
            with self._sharded.world.watchdog.at_rest():
                graph = _captured(self._module, inputs, self._sharded.device, self._pool)
        except Exception as error:  # whatever a model does that a graph cannot hold, the run goes on
            self._restore(before)
            return _as_it_is(f"the model cannot be captured: {type(error).__name__}: {error}")
        changed = self._restore(before)
        return graph if not changed else _as_it_is(f"the forward changes {changed}, which a graph would leave out")

    def _restore(self, before: list[Any]) -> str:
        """Set attributes to what they were before a capture; which one its forwards have changed, if any."""
        changed = ""
        for (name, of, key), value in zip(self._plain, before, strict=True):
            if [of.get(key)] != [value]:  # in a list what is the same object is equal, though it be a NaN
                of[key], changed = value, f"'{key}' of module '{name}'"
        return changed


def graphed(sharded: ShardedModule) -> Callable[..., Any]:
    """What is called for a forward of the module; the module itself where its device has no CUDA graphs."""
    device = sharded.device
    if device.type == "cuda":
        return GraphedModule(sharded)
    rank_zero(logging.WARNING, "graph_harvesting: there are no CUDA graphs on device '%s'; it changes nothing", device)
    return sharded.module


class _Parts(NamedTuple):
    """Arguments, or what is returned: its tensors, and all leaves with `_TENSOR` in their places."""

    tensors: list[torch.Tensor]
    leaves: list[Any]
    structure: TreeSpec

    @classmethod
    def of(cls, value: Any) -> _Parts:
        """Raises TypeError for tensors inside of an object that torch's pytrees do not know."""
        leaves, structure = tree_flatten(value)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        rest = [_TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        for leaf in rest:
            if next(tensors_in(leaf), None) is not None:
                raise TypeError(f"there are tensors inside of a {type(leaf).__name__}")
        return cls(tensors, rest, structure)

    def whole(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The same with other tensors."""
        left = iter(tensors)
        return tree_unflatten([next(left) if leaf is _TENSOR else leaf for leaf in self.leaves], self.structure)

    @property
    def kind(self) -> tuple[Any, ...]:
        """Equal for two of one class; cannot be hashed where a leaf cannot."""
        tensors = [(each.shape, each.dtype, each.device, each.requires_grad) for each in self.tensors]
        return self.structure, *((type(leaf), leaf) for leaf in self.leaves), *tensors


class _Flat(nn.Module):
    """A module as torch captures it, of tensors alone.

    returned: what it returned the last time.
    """

    returned: _Parts

    def __init__(self, module: nn.Module, inputs: _Parts) -> None:
        super().__init__()
        self.module = module
        self._inputs = inputs._replace(tensors=[])

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Tensors in, tensors out."""
        args, kwargs = self._inputs.whole(tensors)
        self.returned = _Parts.of(self.module(*args, **kwargs))
        return tuple(self.returned.tensors)


class _Graph(NamedTuple):
    """A captured forward and backward: `run` maps the tensors of the arguments to those of `returned`."""

    run: Callable[..., Sequence[torch.Tensor]]
    returned: _Parts


def _captured(module: nn.Module, inputs: _Parts, device: torch.device, pool: Any) -> _Graph:
    """Run the module some times on copies of the inputs, and capture it; the module is as before."""
    flat = _Flat(module, inputs)
    samples = tuple(each.detach().clone().requires_grad_(each.requires_grad) for each in inputs.tensors)
    before = [(child, name, buffer, buffer.clone()) for child, name, buffer in _buffers(module)]
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.cuda.make_graphed_callables(flat, samples, pool=pool, allow_unused_input=True)
        moved = [name for child, name, buffer, _ in before if child._buffers[name] is not buffer]
        if moved:
            raise RuntimeError(f"its forward puts another tensor in the place of the buffer '{moved[0]}'")
    finally:
        for child, name, buffer, values in before:
            child._buffers[name] = buffer
            with torch.no_grad():
                buffer.copy_(values)
    flat.returned.tensors.clear()  # of the capture's memory
    return _Graph(flat.forward, flat.returned)


def _buffers(module: nn.Module) -> list[tuple[nn.Module, str, torch.Tensor]]:
    owners = [(child, name, buffer) for child in module.modules() for name, buffer in child._buffers.items()]
    return [(child, name, buffer) for child, name, buffer in owners if buffer is not None]


def _as_it_is(why: str) -> None:
    log_once(logging.WARNING, f"graph_harvesting: micro-batches run without a CUDA graph where {why}")
