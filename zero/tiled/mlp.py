"""MLPs in slices of the sequence: what such a module works with between its matrices never exists whole."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from zero.plan.patterns import outermost
from zero.recompute.call import recomputed
from zero.tiled.slices import token_slices


def tile_mlp(model: nn.Module, *modules: str, positions: int = 4096) -> nn.Module:
    """Run MLPs of `model` over slices of the sequence, each recomputed in the backward; returns the model.

    modules:   classes or patterns of paths, such as "LlamaMLP" or "layers.*.mlp"; none means `model` itself;
    positions: of each sequence in a slice; up to 15 more where fewer than 16 would be left.

    Such a module treats each position by itself, and maps one tensor [..., positions, features] to another. Other
    arguments are cut alike if they are tensors that begin with the same sizes; else they go to every slice.
    Gradients of weights are added up over slices, the last one first, in the dtype of the weight; all else has the bits
    of the whole where a matrix product adds up a slice in the order of the whole. Dropout draws slice by slice.
    A second call changes `positions`. Raises ValueError for names without a module, and for containers.
    """
    if isinstance(positions, bool) or not isinstance(positions, int) or positions < 1:
        raise ValueError(f"tile_mlp(positions=...): got {positions!r}; wanted a whole number from 1 on")
    kinds = [(name, type(module).__name__) for name, module in model.named_modules()]
    for name in outermost("tile_mlp", kinds, modules) if modules else [""]:
        module = model.get_submodule(name)
        if type(module).forward is nn.Module.forward and "forward" not in module.__dict__:
            raise ValueError(f"tile_mlp: '{name}' is a {type(module).__name__}, which has no forward; name what it has")
        forward = module.forward
        if getattr(forward, "func", None) is _in_slices:
            forward = forward.args[1]
        # A partial, not a closure, so that the model can still be copied and pickled.
        sliced = functools.partial(_in_slices, module, forward, positions)
        module.forward = functools.update_wrapper(sliced, forward, updated=())
    return model


def _in_slices(module: nn.Module, forward: Callable[..., Any], positions: int, /, *args: Any, **kwargs: Any) -> Tensor:
    leaves, structure = tree_flatten((args, kwargs))
    *before, whole = lead = leaves[0].shape[:-1]
    dim = len(before)
    sizes = [len(part) for part in token_slices(whole, positions)] or [0]
    cuts = [isinstance(each, Tensor) and each.shape[: dim + 1] == lead for each in leaves]
    # One split: a gradient of each slice of its own would be as large as the whole.
    parted = [each.split(sizes, dim) if cut else [each] * len(sizes) for each, cut in zip(leaves, cuts, strict=True)]
    parts = []
    for size, *inputs in zip(sizes, *parted, strict=True):
        # Many modules view their input as [tokens, features]. Only in a batch is this a copy, and kept in its place.
        near = [each.contiguous() if cut else each for each, cut in zip(inputs, cuts, strict=True)]
        part = recomputed(forward, *tree_unflatten(near, structure), module=module)
        if not isinstance(part, Tensor) or part.shape[: dim + 1] != (*before, size):
            found = tuple(part.shape) if isinstance(part, Tensor) else type(part).__name__
            raise ValueError(f"tile_mlp: a {type(module).__name__} returned {found}; wanted {(*before, size)} + (...)")
        parts.append(part)
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)
