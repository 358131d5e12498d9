"""CUDA graphs on a processor: what is captured are the operators with the memory that they worked on.

As a CUDA graph does, a replay runs them on the same addresses, whatever tensors are there meanwhile, and nothing of the
Python around them. What a capture computes counts for nothing: floating-point results are NaN until the first replay.
What the host reads cannot be captured. What this cannot see: streams, the memory that captures share, generators.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

READS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero", "aten::equal")


def _there(value: Any) -> Any:
    """The same with tensors that stay at their addresses."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor.detach(), value)


class FakeGraph:
    """Stands for torch.cuda.CUDAGraph."""

    made: list[FakeGraph]  # all of a test

    def __init__(self) -> None:
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self.replays = 0
        self.made.append(self)

    def replay(self) -> None:
        self.replays += 1
        with torch.no_grad():
            for func, args, kwargs, out in self.calls:
                found = func(*args, **kwargs)
                for there, values in zip(_tensors(out), _tensors(found), strict=True):
                    if there.data_ptr() != values.data_ptr():  # else it is a view, or was written in place
                        there.copy_(values)


def _tensors(value: Any) -> list[torch.Tensor]:
    return [each for each in (value if isinstance(value, (tuple, list)) else [value]) if torch.is_tensor(each)]


class FakeCapture(TorchDispatchMode):
    """Stands for torch.cuda.graph."""

    def __init__(self, graph: FakeGraph, pool: Any = None) -> None:
        super().__init__()
        self._graph = graph
        self._made: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.name().startswith(READS):
            raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing ({func})")
        out = func(*args, **kwargs)
        given = {each.untyped_storage().data_ptr() for each in tree_leaves((args, kwargs)) if torch.is_tensor(each)}
        for each in _tensors(out):
            if each.is_floating_point() and each.untyped_storage().data_ptr() not in given:
                self._made.append(each.detach())
        self._graph.calls.append((func, _there(args), _there(kwargs), _there(out)))
        return out

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for tensor in self._made:
            tensor.fill_(float("nan"))


def fake_graphs(patch: pytest.MonkeyPatch) -> list[FakeGraph]:
    """From here on torch captures such graphs; returns all that will be made."""
    made: list[FakeGraph] = []
    patch.setattr(FakeGraph, "made", made, raising=False)
    patch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    patch.setattr(torch.cuda, "graph", FakeCapture)
    patch.setattr(torch.cuda, "synchronize", lambda: None)
    patch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    patch.setattr(torch.cuda, "Stream", object)
    patch.setattr(torch.cuda, "graph_pool_handle", object)
    return made
