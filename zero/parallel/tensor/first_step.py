"""Comparisons over tensor-parallel ranks before the first update: the batch, blocks, and gradients of what is whole.

A block whose layers are cut is compared with the same one with whole features between its layers. What stands between
two layers must do to the features of one rank as it does to all of them. Names of layers do not tell: a softmax over
features does not, nor does code that counts heads itself. For the comparison each layer is cut as it is; what it gives
is put together, and what it takes is cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from zero.core import comm
from zero.core.agree import agree
from zero.core.comm import Axis
from zero.core.hooks import tensors_in
from zero.core.owner import axes_of, cut_of
from zero.core.tensors import map_leaves
from zero.parallel.pipeline.partition import in_eval
from zero.parallel.tensor.forward import Scope, values_said
from zero.parallel.tensor.plan import TensorPlan

ERRORS = {
    torch.float64: 1e-9,
    torch.float32: 1e-3,
}  # that may part equal sums, whose order a device chooses; 16 bits: 0.1


class FirstStep:
    """Watches the first backward: which gradients, and the `loss`, are the same on all ranks along the axis."""

    def __init__(self, model: nn.Module, plan: TensorPlan, axis: Axis) -> None:
        self.axis = axis
        self.loss: Tensor | None = None
        self._sums = {name: place.said for name, place in plan.places.items() if place.cut is None}
        cut = {name for name, place in plan.places.items() if place.cut is not None}
        self._seen: dict[str, Tensor] = {}
        self._errors: dict[str, float] = {}
        self._handles: list[RemovableHandle] = []
        for name, param in model.named_parameters():
            summed = name not in plan.places and "tp" in axes_of(param).sums  # as what experts have in common
            if name not in cut and cut_of(param) is None and param.requires_grad and not summed:
                self._errors[name] = 0.0
                self._handles.append(param.register_hook(self._watch(name)))

    def _watch(self, name: str) -> Any:
        def seen(grad: Tensor) -> None:
            if name not in self._seen:
                values = grad.detach().reshape(-1).double()
                signs = 1 - 2 * (torch.arange(len(values), device=values.device) * 2654435761 % 4096 // 2048).double()
                self._seen[name] = torch.stack([values.square().sum(), (values * signs).sum()])
                self._errors[name] = ERRORS.get(grad.dtype, 0.1)

        return seen

    def close(self) -> None:
        """Watch nothing any more."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def compare(self) -> None:
        """Raise RuntimeError on all ranks along the axis where a gradient is not as the plan says; collective."""
        self.close()
        if not self._errors:
            return
        zeros = torch.zeros(2, dtype=torch.float64)
        loss = zeros if self.loss is None else self.loss.detach().double().expand(2)
        rows = torch.stack([each.cpu() for each in (loss, *(self._seen.get(name, zeros) for name in self._errors))])
        found = comm.gather_scalars(rows.flatten(), self.axis, "first gradients of layers").view(self.axis.size, -1, 2)
        losses, found = found[:, 0, 0], found[:, 1:]
        error = 0.0 if self.loss is None else ERRORS.get(self.loss.dtype, 0.1)
        if losses.max() - losses.min() > error * losses.abs().max():
            raise RuntimeError(
                f"tensor_parallel: the first loss is not the same on the {self.axis.size} ranks that cut the same "
                f"layers ({', '.join(f'{float(each):.6g}' for each in losses)}): it reads something of which each has "
                "a part, as with sequence_parallel what a block inside gives. Compute it of what the model returns"
            )
        errors = agree(dict(self._errors), self.axis)
        for at, name in enumerate(self._errors):
            squares, signed = found[:, at].unbind(1)
            norm, error = float(squares.max()) ** 0.5, max(each[name] for each in errors)
            apart = max(float(signed.max() - signed.min()), norm - float(squares.min()) ** 0.5)
            if self._sums.get(name) and norm and apart == 0:
                raise RuntimeError(
                    f"tensor_parallel: the plan says that ranks see different parts of what parameter '{name}' works "
                    "on, and its gradient is the same on all of them: their sum would be wrong. Say 'replicate' of it, "
                    "or leave it out of the plan"
                )
            if name not in self._sums and apart > error * norm:
                norms = ", ".join(f"{float(each) ** 0.5:.6g}" for each in squares)
                raise RuntimeError(
                    f"tensor_parallel: parameter '{name}' is whole on {self.axis.size} ranks, and its gradient is not "
                    f"the same on them (norms {norms}): ranks see different parts of what it works on, or different "
                    "batches. Say 'replicated_with_grad_allreduce' of its module in the plan, and gradients are summed"
                )


class FirstForward:
    """Compares one block, once: at its first forward, in eval and without gradients.

    name: of the module that has the layers; layers: their names; whole: attributes of modules, and what these say of
    all features; source: what says how the block is cut.
    """

    def __init__(
        self, name: str, layers: Sequence[str], whole: Sequence[tuple[nn.Module, str, Any]], source: str
    ) -> None:
        self._name, self._layers, self._whole, self._source = name, layers, whole, source

    def compare(self, scope: Scope, x: Any, args: Any, kwargs: dict[str, Any], name: str) -> bool:
        """Raise RuntimeError on all ranks of the axis where the block gives something else; collective.

        The inputs are those of the forward, the same on all these ranks. Returns whether they could be compared: text
        that is generated has a cache of keys and values, without which its forwards mean something else.
        """
        if not torch.is_grad_enabled() and any(_no_cache(each) is not each for each in (*args, *kwargs.values())):
            return False
        args, kwargs = tuple(map(_no_cache, args)), {key: _no_cache(value) for key, value in kwargs.items()}
        with torch.no_grad(), in_eval(scope.module), scope.aside():
            found = _first(scope.call(x, args, kwargs, name))
            with values_said(self._whole):
                scope.whole = True
                try:
                    wanted = _first(scope.call(x, args, kwargs, name))
                finally:
                    scope.whole = False
        if found is None or wanted is None:
            return True
        apart, error = float("inf"), ERRORS.get(wanted.dtype, 0.1)
        if found.shape == wanted.shape:
            found, wanted = (each.double().nan_to_num(0.0, 0.0, 0.0) for each in (found, wanted))
            apart = float((found - wanted).norm() / wanted.norm().clamp_min(1e-30))
        apart = max(agree(apart, scope.axis, name="first forward of layers"))
        if apart > error:
            kind = type(scope.module).__name__
            raise RuntimeError(
                f"tensor_parallel: '{self._name or kind}' ({kind}), whose layers {', '.join(self._layers)} are cut as "
                f"{self._source} says, gives something else on {scope.axis.size} ranks than whole: {apart:.2g} of it. "
                "What it does between these layers needs all features, or it counts heads by an attribute of its own. "
                "Say 'skip' of them in tensor_parallel.partition_config"
            )
        return True


def _first(output: Any) -> Tensor | None:
    first = output[0] if isinstance(output, (tuple, list)) and output else output
    return first if isinstance(first, Tensor) and first.is_floating_point() else None


def _no_cache(value: Any) -> Any:
    """None for a cache of keys and values, which each forward would lengthen."""
    return None if hasattr(value, "get_seq_length") else value


def compare_batch(inputs: Any, axis: Axis, where: str, or_else: str = "") -> None:
    """Raise RuntimeError on all ranks along the axis unless they have the same batch; collective.

    where: the key that wants it; or_else: what a script can do that does not want to give them the same.
    """
    mine = [[list(each.shape), str(each.dtype), *_digest(each)] for each in tensors_in(inputs)]
    every = agree(mine, axis, name="first batch")
    other = next((rank for rank, each in enumerate(every) if each != every[0]), None)
    if other is not None:
        raise RuntimeError(
            f"{where}: ranks {axis.ranks[0]} and {axis.ranks[other]} were given different batches; give all "
            f"{axis.size} the same one, as the engine's own loader does{or_else}"
        )


def broadcast_batch(inputs: Any, axis: Axis) -> Any:
    """The inputs with all tensors those of the first rank along the axis; collective."""
    shapes = agree([[list(each.shape), str(each.dtype)] for each in tensors_in(inputs)], axis, name="batch")[0]
    left: Iterator[Any] = iter(shapes)

    def send(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        shape, dtype = next(left, (None, None))
        if shape is None:
            raise RuntimeError("tensor_parallel.broadcast_batch: this rank's batch has more tensors than the first's")
        same = list(leaf.shape) == shape and str(leaf.dtype) == dtype
        values = (
            leaf if same else torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch.")), device=leaf.device)
        )
        values = values.clone() if same and axis.rank else values
        comm.broadcast(values, 0, axis, "batch")
        return values

    return map_leaves(inputs, send)


def _digest(values: Tensor) -> list[str]:
    flat = values.detach().reshape(-1).double()
    places = torch.arange(1, len(flat) + 1, device=flat.device, dtype=torch.float64)
    return [float(each).hex() for each in (flat.sum(), (flat * places.sin()).sum())]  # text: NaN is not itself
