"""Ties a module's forward and backward to the prefetcher; only where parameters are resharded between uses."""

from __future__ import annotations

import dataclasses
import functools
import logging
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from zero.core.leaf import z3_leaf_module
from zero.core.prefetcher import Call, ParamPrefetcher, in_backward
from zero.core.torch_private import hook_first, pre_hooks, view_base
from zero.core.unit import Unit
from zero.log import rank_zero

# Objects within objects that are looked into: a mixture of independent distributions of a family is four.
_DEPTH = 4
_NOT_LOOKED_INTO = (nn.Module, type, types.ModuleType, types.FunctionType, types.MethodType)


class FrozenUnits:
    """The frozen units that are anchored at one module, and the trained ones that are read inside it.

    A trained unit is released when its last gradient lands. A frozen one has none, so each call of the module is
    followed instead: open from the first gradient of its outputs until the gradients of all its inputs are there. If
    that cannot be told (no input needs a gradient, or trained parameters inside the module still wait for theirs), the
    unit stays until the end of the backward.
    """

    def __init__(self, frozen: Sequence[Unit], trained: Sequence[Unit], prefetcher: ParamPrefetcher) -> None:
        self._frozen = frozen
        self._trained = trained
        self._prefetcher = prefetcher
        self._open = 0  # calls of the module that the running backward is inside of
        self._backward = -1  # the number of the backward that `_open` counts for

    def follow(self, inputs: Any) -> Callable[[], None] | None:
        """Follow one call by its inputs; returns what to call when the gradient of an output is there.

        None where the end of the call cannot be seen from them.
        """
        tensors = [tensor for tensor in tensors_in(inputs) if tensor.requires_grad]
        # A hook on a leaf would outlive the call, so a call with one is not followed.
        if not tensors or any(tensor.grad_fn is None for tensor in tensors):
            return None
        count, backward, waiting = len(tensors), -1, 0  # no hook may hold the tensors themselves

        def reached() -> None:
            nonlocal backward, waiting
            if backward != self._prefetcher.backwards:  # the first output; a graph may be run again
                backward, waiting = self._prefetcher.backwards, count
                if self._backward != backward:
                    self._backward, self._open = backward, 0
                self._open += 1

        def passed_on(grad: torch.Tensor) -> None:
            nonlocal waiting
            if backward == self._prefetcher.backwards:  # else it came round the module, not through it
                waiting -= 1
                if waiting:
                    return
                self._open -= 1
                # The backward left a call: release what no other open call reads.
                if self._open == 0 and all(unit.gradients.complete for unit in self._trained):
                    for unit in self._frozen:
                        self._prefetcher.done(unit)

        for tensor in tensors:
            tensor.register_hook(passed_on)
        return reached


def attach(
    module: nn.Module,
    units: Sequence[Unit],
    frozen: FrozenUnits | None,
    prefetcher: ParamPrefetcher,
    begin_backward: Callable[[], None],
) -> list[RemovableHandle]:
    """Hook a module that reads `units`, of which some may be `frozen`; returns the handles that undo it.

    Both the module at which a unit is anchored and every module that owns one of its parameters are hooked:
    the first keeps the unit through a whole block, the others let tied weights, modules called on their
    own, and losses taken from the middle of a block find their parameters. A module that owns none but has some below
    it is hooked only for calls from outside of any forward, in which it may read those.
    """
    # A copy of the module must neither take the engine along nor ask it for parameters.
    before, after, method = _forward_hooks(units, frozen, prefetcher, begin_backward)
    return [
        module.register_forward_pre_hook(ForwardPreHook(before, method), prepend=True, with_kwargs=True),
        module.register_forward_hook(OwnHook(after), always_call=True),
    ]


class OwnHook:
    """Calls `hook` on the module that it was registered on, and does nothing on a copy of that module.

    It is never compiled, even if the user compiles the module: a compiler cannot follow parameters that come and go.

    A copy has whole parameters of its own. With the hooks it would gather those of the original, which needs all
    ranks, and an averaged copy that one rank evaluates would wait for ever.
    """

    def __init__(self, hook: Callable[..., Any]) -> None:
        self._hook = hook

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Pass the call on."""
        if not torch.compiler.is_compiling():
            return self._hook(*args, **kwargs)
        # Made at each call: what is stored in the middle of a forward, a compiler may store too early or not at all.
        return torch.compiler.disable(self._hook)(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        """A hook that does nothing, for copies and saved files; used by `copy.deepcopy` and by `torch.save`."""
        return OwnHook, (nothing,)


def nothing(*args: Any, **kwargs: Any) -> None:
    """The hook of a copy."""


class ForwardPreHook(OwnHook):
    """The hook before a forward. `method(fn, args, kwargs)` calls a method of the module as a forward is called."""

    def __init__(self, hook: Callable[..., None], method: Callable[..., Any]) -> None:
        super().__init__(hook)
        self.method = method


def register_forward_method(module: nn.Module, method_name: str) -> None:
    """Have a method of `module` run as its forward does: what it reads is gathered, and released when it ends.

    For methods that are called outside of a forward and read parameters by themselves, such as `get_image_features`
    of models that see. Before or after `zero.initialize`; where no parameter is resharded, and a second time, it
    changes nothing. Where parameters are resharded, all ranks must call the method. Raises TypeError for what is no
    module and AttributeError for a method that it does not have.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"register_forward_method(module=...): got {type(module).__name__}, wanted an nn.Module")
    method = getattr(module, method_name)
    if getattr(method, "func", None) is not as_forward:
        made = functools.partial(as_forward, module, method)
        setattr(module, method_name, functools.update_wrapper(made, method))


def as_forward(module: nn.Module, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call a method of `module`, or of the one that it belongs to, as its forward is called."""
    for hook in pre_hooks(getattr(method, "__self__", module)):
        if isinstance(hook, ForwardPreHook):
            return hook.method(method, args, kwargs)
    return method(*args, **kwargs)


def uncalled_leaves(model: nn.Module, anchors: Collection[str]) -> Callable[[], None]:
    """A function to call after the first backward: it warns of the leaves among `anchors` that were not called.

    All below such a leaf is gathered when it is entered, which never happens: ranks may diverge as without a leaf.
    """
    handles: dict[str, RemovableHandle] = {}

    def called(name: str) -> None:
        if name in handles:
            handles.pop(name).remove()

    for name, module in model.named_modules():
        if name in anchors and z3_leaf_module(module):
            handles[name] = module.register_forward_pre_hook(OwnHook(lambda *_, name=name: called(name)))

    def warn() -> None:
        if handles:
            rank_zero(
                logging.WARNING,
                "leaf modules that were not called in the first forward: %s; what is inside is not gathered as one. "
                "Name the module whose forward runs it",
                ", ".join(repr(name) for name in handles),
            )
        for name in list(handles):
            called(name)

    return warn


def tensors_in(value: Any, depth: int = _DEPTH, seen: set[int] | None = None) -> Iterator[torch.Tensor]:
    """Every tensor inside nested tuples, lists, sets, mappings, dataclasses (so also a `ModelOutput`), other objects.

    An object, such as a distribution or a cache of keys and values, is looked into for its attributes; modules are not.
    """
    seen, items = set() if seen is None else seen, ()
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        items = value.values()
    elif isinstance(value, (tuple, list, set, frozenset)):
        items = value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):  # it may have slots
        items = (getattr(value, field.name, None) for field in dataclasses.fields(value))
    elif depth and hasattr(value, "__dict__") and not isinstance(value, _NOT_LOOKED_INTO) and id(value) not in seen:
        seen.add(id(value))
        depth, items = depth - 1, list(vars(value).values())
    for item in items:
        yield from tensors_in(item, depth, seen)


def _forward_hooks(
    units: Sequence[Unit],
    frozen: FrozenUnits | None,
    prefetcher: ParamPrefetcher,
    begin_backward: Callable[[], None],
) -> tuple[Callable[..., None], Callable[..., None], Callable[..., Any]]:
    calls: list[Call | None] = []  # of this module, those that are in their forward

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        if not units and prefetcher.inside:
            calls.append(None)  # whatever it reads belongs to the module that has called it
            return
        followed = frozen is not None and torch.is_grad_enabled() and not in_backward()
        call = prefetcher.enter(units)
        call.tell_frozen = frozen.follow((args, kwargs)) if followed else None
        calls.append(call)

    def after(module: nn.Module, args: Any, output: Any) -> None:
        if not calls:
            return  # its parameters could not be gathered, so it has not run
        call = calls.pop()
        if call is not None:
            end(call, output)

    def method(fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        call, output = prefetcher.enter_method(), None
        try:
            output = fn(*args, **kwargs)
        finally:
            end(call, output)
        return output

    def end(call: Call, output: Any) -> None:
        tensors = list(tensors_in(output))
        prefetcher.leave(call, tensors)
        if torch.is_grad_enabled():
            for tensor in tensors:
                # Where the caller changes a view in place, backward goes to its base, past the view itself.
                for hooked in (tensor, view_base(tensor)):
                    # A leaf would keep the hook for ever; it has no backward of ours behind it either.
                    if hooked is not None and hooked.grad_fn is not None:
                        # A module may hand on a tensor as it came, on some ranks only. Backward reaches the module
                        # that ran last first; in the order of registration such a rank would gather in an order of
                        # its own, and ranks would wait for each other.
                        hook_first(hooked, lambda grad: reached(call))

    def reached(call: Call) -> None:
        # The first gradient to come into the module: its backward is about to read the parameters.
        begin_backward()
        prefetcher.reach(call.units)
        if call.tell_frozen is not None:
            call.tell_frozen()

    return before, after, method


# Reading order, 5 of 9; next: zero/core/gradients.py, how the gradient of a unit is collected, sent and summed.
