"""The first forward of a block whose layers are cut, beside the same one with whole features between its layers.

What stands between two layers must do to the features of one rank as it does to all of them. Names of layers do not
tell: a softmax over features does not, nor does code that counts heads itself. For the comparison each layer is cut as
it is; what it gives is put together, and what it takes is cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zero.core.agree import agree
from zero.parallel.pipeline.partition import in_eval
from zero.parallel.tensor.first_step import ERRORS
from zero.parallel.tensor.forward import Scope, values_said


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
