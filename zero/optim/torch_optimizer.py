"""An optimizer class of `torch.optim`, or a similar one, run on the shards of units."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import nn

from zero.core.unit import Unit
from zero.kernels.moments import Moment
from zero.optim.shard_optimizer import Group, Kept, ShardOptimizer, ShardStates
from zero.plan.formats import Formats
from zero.plan.layout import Fragment, Span


class TorchShardOptimizer(ShardOptimizer):
    """An optimizer class of `torch.optim` on fp32 shards: one instance per unit, with the unit's group.

    Such a class checks its arguments only at construction, and makes its state in the first step.

    kind, params: the class, and the arguments of its constructor.
    """

    factor_on_device = False

    def __init__(self, kind: type[torch.optim.Optimizer], params: dict[str, Any]) -> None:
        self.kind, self.params = kind, params
        # Constructed once on a temporary parameter, so that a bad argument fails here.
        self.defaults = dict(kind([nn.Parameter(torch.zeros(1))], **params).defaults)
        self.states = TorchStates(kind, params)

    def update(self, unit: Unit, grad: torch.Tensor, group: Group, factor: float, threads: int | None = None) -> None:
        """One step of the torch optimizer on the unit's shard, with torch's own threads; see `ShardOptimizer`."""
        leaf, inner = self.states.instance(unit, group)
        leaf.grad = grad.to(leaf.dtype).mul_(factor)
        inner.step()
        leaf.grad = None
        unit.shard.master.publish()


class TorchStates(ShardStates):
    """The state of these instances."""

    foreseen = False

    def __init__(self, kind: type[torch.optim.Optimizer], params: dict[str, Any]) -> None:
        self._kind = kind
        self.sized = kind.__module__.split(".")[0] == "torch"
        self.formats = Formats()  # assumes as many states as Adam: the true number is known only after the first step
        self._params = params
        self._inner: dict[int, tuple[nn.Parameter, torch.optim.Optimizer]] = {}

    def nbytes(self, unit: Unit, group: Group) -> int:
        """See `ShardStates.nbytes`; of a class of torch's, before the first step, what the step will allocate."""
        if unit.index in self._inner or not self.sized:
            return sum(tensor.nbytes for _, _, tensor in self.tensors(unit))
        made, numel = self._trial(unit.shard.placement.update_device, group), unit.shard.master.tensor.numel()
        tensors = [value for value in made.values() if isinstance(value, torch.Tensor)]
        return sum(each.nbytes // 3 * numel if each.shape == (3,) else each.nbytes for each in tensors)

    def tensors(self, unit: Unit) -> Iterator[tuple[str, Span, torch.Tensor]]:
        if unit.index in self._inner:
            leaf, inner = self._inner[unit.index]
            for name, value in inner.state[leaf].items():
                if isinstance(value, torch.Tensor):
                    yield name, Span(0, leaf.numel()), value

    def keys(self, unit: Unit, group: Group) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """See `ShardStates.keys`; from a step of the class on three temporary elements."""
        state = self._trial(unit.shard.placement.update_device, group)
        wide = tuple(key for key, value in state.items() if isinstance(value, torch.Tensor) and value.shape == (3,))
        return wide, tuple(key for key in state if key not in wide)

    def _trial(self, device: torch.device, group: Group) -> dict[str, Any]:
        """The state of the class after a step on three temporary elements."""
        leaf, trial = self._made(torch.zeros(3, device=device), group)
        leaf.grad = torch.zeros_like(leaf)
        trial.step()
        return {key: value for key, value in trial.state[leaf].items() if value is not None}

    def number(self, unit: Unit, group: Group, key: str) -> float:
        unit.shard.settle()
        value = self._state(unit, group).get(key, 0)
        value = value.item() if isinstance(value, torch.Tensor) else value
        return int(value) if key == "step" else value

    def set_number(self, unit: Unit, group: Group, key: str, value: float) -> None:
        unit.shard.settle()
        state = self._state(unit, group)
        if isinstance(state.get(key), torch.Tensor):
            state[key].fill_(value)
        else:
            state[key] = int(value) if key == "step" else value

    def read(self, unit: Unit, group: Group, key: str, part: Fragment) -> torch.Tensor:
        unit.shard.settle()
        kept = self._state(unit, group).get(key)
        if kept is None:  # made in the first step, from zeros; making it now could change that step
            return torch.zeros(part.numel, device=unit.shard.placement.update_device)
        return kept.narrow(0, part.at, part.numel).to(torch.float32, copy=True)

    def write(self, unit: Unit, group: Group, key: str, part: Fragment, values: torch.Tensor) -> None:
        unit.shard.settle()
        state = self._state(unit, group)
        if state.get(key) is None:
            state[key] = torch.zeros_like(unit.shard.master.tensor)
        state[key].narrow(0, part.at, part.numel).copy_(values)

    def kept(self, unit: Unit, group: Group, part: Fragment, make: Collection[str] = ()) -> dict[str, Kept]:
        leaf, inner = self.instance(unit, group) if make else self._inner.get(unit.index, (None, None))
        state = inner.state[leaf] if inner is not None else {}
        if make and not state:
            state.update(self._first(unit.shard.master.tensor, group))
        for key in make:
            if state.get(key) is None:
                state[key] = torch.zeros_like(unit.shard.master.tensor)
        shape = unit.shard.master.tensor.shape
        wide = {key: value for key, value in state.items() if isinstance(value, torch.Tensor) and value.shape == shape}
        return {key: Kept(Moment(value.narrow(0, part.at, part.numel)), True) for key, value in wide.items()}

    def restart(self, unit: Unit, group: Group, part: Fragment | None = None) -> None:
        if part is None:
            self._inner.pop(unit.index, None)
            return
        if kept := self.kept(unit, group, part):
            first = self._first(torch.zeros(3, device=unit.shard.placement.update_device), group)
            for key, (moment, _) in kept.items():
                value = first.get(key)
                moment.values.copy_(value[:1].expand(part.numel)) if value is not None else moment.values.zero_()

    def forget(self) -> None:
        self._inner.clear()

    def instance(self, unit: Unit, group: Group) -> tuple[nn.Parameter, torch.optim.Optimizer]:
        """The unit's optimizer and the parameter that it updates, with the current hyperparameters."""
        if unit.index not in self._inner:
            self._inner[unit.index] = self._made(unit.shard.master.tensor, group)
        leaf, inner = self._inner[unit.index]
        inner.param_groups[0].update(_hyperparameters(group))
        return leaf, inner

    def _made(self, values: torch.Tensor, group: Group) -> tuple[nn.Parameter, torch.optim.Optimizer]:
        leaf = nn.Parameter(values)
        inner = self._kind([leaf], **self._params)
        inner.param_groups[0].update(_hyperparameters(group))
        return leaf, inner

    def _state(self, unit: Unit, group: Group) -> dict[str, Any]:
        """The unit's optimizer state; before the first step, the initial state of torch's classes.

        Raises RuntimeError for a class that is not torch's and has no state yet.
        """
        leaf, inner = self.instance(unit, group)
        if inner.state.get(leaf):
            return inner.state[leaf]
        begun = self._begun(leaf, inner)
        if begun is None:
            raise RuntimeError(f"{self._kind.__name__} makes its state in its first step; read or write it after that")
        return begun

    def _begun(self, leaf: nn.Parameter, inner: torch.optim.Optimizer) -> dict[str, Any] | None:
        """Make `inner` create its initial state; None for a class that is not torch's."""
        begin = getattr(inner, "_init_group", None)
        if begin is None or not self.sized:
            return None
        leaf.grad = torch.zeros_like(leaf)
        # All arguments but the group are lists that the class fills; only the state that it creates matters.
        begin(inner.param_groups[0], *([] for _ in list(inspect.signature(begin).parameters)[1:]))
        leaf.grad = None
        return inner.state[leaf]

    def _first(self, values: torch.Tensor, group: Group) -> dict[str, Any]:
        """The initial state for `values` [n]; zeros for the states of a class that is not torch's."""
        begun = self._begun(*self._made(values, group))
        if begun is not None:
            return begun
        trial = self._trial(values.device, group)
        wide = {key for key, value in trial.items() if isinstance(value, torch.Tensor) and value.shape == (3,)}
        return {key: torch.zeros_like(values) if key in wide else value for key, value in trial.items()}


def _hyperparameters(group: Group) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}
