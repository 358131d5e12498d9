"""Modules wait for what is still to come of parameters that they read, where these are not resharded."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from zero.core.hooks import OwnHook
from zero.core.released import Released, read_now
from zero.core.torch_private import before_compiling, before_messages, is_compiled
from zero.core.unit import Unit

_AWAITED: weakref.WeakSet[Unit] = weakref.WeakSet()  # of all engines
_NO_HOOKS = nn.TransformerEncoderLayer, torch.jit.ScriptModule


class WaitHook(OwnHook):
    """Has a module wait for units whose gather a step has left in flight.

    Unlike `OwnHook` it does not end what is compiled around it, nor runs in there, nor in a CUDA graph that is played
    again: units that are read in those come at the end of each step from then on.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        def wait(module: nn.Module, args: Any) -> None:
            on_gpu = units[0].buffer.full.is_cuda and torch.backends.cuda.is_built()
            if on_gpu and torch.cuda.is_current_stream_capturing():
                come_at_once(units)
            _wait_for(units)

        super().__init__(wait)
        self._compiled = torch.compiler.assume_constant_result(lambda: come_at_once(units))  # once, by the compiler

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """See `OwnHook`."""
        return self._compiled() if torch.compiler.is_compiling() else self._hook(*args, **kwargs)


def wait_hooks(module: nn.Module, trained: Sequence[Unit]) -> dict[nn.Module, Callable[[], list[RemovableHandle]]]:
    """What attaches the hooks of each module that may have to wait; says of each unit whether it is awaited.

    Torch's own calls, and messages, would notice by themselves; compiled code, and what works on addresses, would not.
    """
    before_messages(Released, read_now)
    # A hook would end what is compiled, scripts take none, and torch's encoder layer takes another path with one.
    fixed = [each for each in module.modules() if is_compiled(each) or isinstance(each, _NO_HOOKS)]
    unnoticed = {param for each in fixed for param in each.parameters()}
    awaited = []
    for unit in (unit for unit in trained if not unit.resharded):
        beside = unit.shard.placement.state_offloaded
        unit.late.awaited = not beside and unit.mesh.shard.size > 1 and unnoticed.isdisjoint(unit.params)
        awaited += [unit] if beside or unit.late.awaited else []
    _AWAITED.update(unit for unit in awaited if unit.late.awaited)
    wanted = {param: unit for unit in awaited for param in unit.params}
    found: dict[nn.Module, list[Unit]] = {}
    for unit in awaited:
        found.setdefault(module.get_submodule(unit.plan.anchor), []).append(unit)
    for child in module.modules():
        # Compiled code asks what its parameters are before anything in it runs.
        for param in child.parameters(recurse=is_compiled(child)):
            if param in wanted:
                found.setdefault(child, []).append(wanted[param])
    return {child: functools.partial(_attach, child, list(dict.fromkeys(read))) for child, read in found.items()}


def follow_compiler() -> None:
    """Have all come before torch's compiler, once it is loaded, compiles anything: its code reads without asking."""
    if "torch._dynamo" in sys.modules:
        before_compiling(_all_come)


def come_at_once(units: Iterable[Unit] = _AWAITED) -> None:
    """Have the values of these units be there now, and at the end of each step from now on."""
    units = list(units)
    for unit in units:
        unit.late.awaited = False
    _wait_for([unit for unit in units if unit.coming])


def _all_come(_: Any) -> None:
    come_at_once()


def _attach(module: nn.Module, units: Sequence[Unit]) -> list[RemovableHandle]:
    beside = [unit for unit in units if unit.shard.placement.state_offloaded]  # updated beside the loop
    gathered = [unit for unit in units if not unit.shard.placement.state_offloaded]
    hooks = [OwnHook(lambda module, args: _wait_for(beside))] if beside else []
    hooks += [WaitHook(gathered)] if gathered else []
    return [module.register_forward_pre_hook(hook, prepend=True) for hook in hooks]


def _wait_for(units: Sequence[Unit]) -> None:
    for unit in units:
        if not unit.readable:
            unit.ensure_gathered()  # what was sent to host memory refuses the read by itself
