"""While a model is built: every parameter is sharded once its module is complete, and comes back when code asks.

Torch tells of every parameter and every module that is registered. A parameter is open, which means plain, from
its registration. It is closed when its module is registered in a parent, for it is complete then, and at the
latest when another module registers a parameter. A closed parameter that is read or written inside the block is
opened again, and what was open in other modules is closed. So about one module's own parameters are whole at a
time, as long as no views of more are kept.

Closing takes rank 0's values, since what was written cannot be told cheaply. It needs all ranks, so which
parameters are closed must not depend on the rank: rank 0 says which of its own are still referred to by
somebody, as in `one.weight.data.copy_(other.weight.data)`, and those stay open everywhere.
"""

from __future__ import annotations

import contextvars
import gc
import itertools
import weakref
from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.utils.hooks import RemovableHandle

from zero.core import comm
from zero.core.comm import local_device
from zero.core.conversion import guard
from zero.core.init.deferred_param import DeferredParam, ShardStorage, manageable
from zero.core.mesh import Mesh
from zero.core.owner import owner_of
from zero.core.quantized_params import format_of, is_pending
from zero.core.refusals import sharing
from zero.memory.available import Freed
from zero.plan.grid import DENSE, UnitAxes

# What is open where: threads that build models of their own are left alone.
_running: contextvars.ContextVar[Builder | None] = contextvars.ContextVar("zero_builder", default=None)
_REGISTER = nn.Module.register_parameter


def running() -> Builder | None:
    """The builder whose block is open on this thread."""
    return _running.get()


def _open_for_reader(param: DeferredParam) -> bool:
    """Open a parameter that is read inside a block, perhaps a later one than its own; False outside of any."""
    builder = running()
    if builder is not None:
        builder.reopen(param)
    return builder is not None


class Builder:
    """Cuts what is built between `start` and `finish`; with a world of one rank it only rounds at the end.

    storage: where shards are kept until an engine takes them;
    dtype:   what floating-point parameters are rounded to at the end; None: they stay as they were built.
    """

    def __init__(self, mesh_of: Callable[[UnitAxes], Mesh], storage: ShardStorage, dtype: torch.dtype | None) -> None:
        """`mesh_of`: gives the mesh of parameters with those axes."""
        self._mesh_of, self._mesh = mesh_of, mesh_of(DENSE)
        self._storage = storage
        self._dtype = dtype
        self._open: list[DeferredParam] = []
        self._numbers = itertools.count()
        self._deferred: weakref.WeakSet[DeferredParam] = weakref.WeakSet()
        # By number and not by id: an id is used again, at another time on every rank.
        self._homes: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        self._children: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._handles: list[RemovableHandle] = []
        self._token: contextvars.Token | None = None
        self._freed = Freed()

    def start(self) -> None:
        """Begin to follow what is registered on this thread."""
        self._token = _running.set(self)
        self._handles = [
            register_module_parameter_registration_hook(self._registered),
            register_module_module_registration_hook(self._completed),
        ]

    def finish(self, failed: bool) -> None:
        """Stop following, and cut what is open; a collective unless the block `failed`, when nothing is sent."""
        for handle in self._handles:
            handle.remove()
        _running.reset(self._token)
        if failed:
            self._make_plain()
            return
        if any(owner_of(param) is None and manageable(param) for _, _, param in self._present()):
            gc.collect()  # all ranks must find the same
            for module, name, param in self._present():
                self._take(param, name, self._homes[module])
        self._name_all()
        self._quantize()
        self._settle()

    def convert(self, module: nn.Module) -> None:
        """Cut every parameter of a finished module; a collective."""
        for name, param in module.named_parameters():
            self._take(param, name, self._home(module))
            self._close(lambda home: True)
        guard(module.modules())
        if running() is not self:
            self._settle()

    def reopen(self, deferred: DeferredParam) -> None:
        """Give a closed parameter its values to work on, until another is given its own; a collective."""
        if deferred not in self._deferred:  # of a block before this one
            deferred.origin = next(self._numbers)
            self._deferred.add(deferred)
        self._close(lambda other: other != deferred.origin)
        deferred.open()
        self._open.append(deferred)

    def _registered(self, module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if running() is self and param is not None and owner_of(param) is None:
            home = self._home(module)
            self._close(lambda other: other != home)
            # Else it was replaced by a function that may put another parameter here, as Accelerate's
            # init_empty_weights does.
            if nn.Module.register_parameter is _REGISTER:
                self._take(param, f"{type(module).__name__}.{name}", home)

    def _completed(self, module: nn.Module, name: str, child: nn.Module | None) -> None:
        if running() is not self or child is None:
            return
        self._children.add(child)
        for below in child.modules():
            for key, param in below._parameters.items():  # copies of modules register nothing themselves
                if param is not None:
                    self._take(param, f"{type(below).__name__}.{key}", self._home(below))
        self._home(module)  # a root is known by what is registered in it
        complete = {self._home(below) for below in child.modules()}
        self._close(lambda home: home in complete)

    def _take(self, param: nn.Parameter, name: str, home: int) -> None:
        """Follow this parameter from now on, unless it is followed already or cannot be."""
        if owner_of(param) is not None or not manageable(param):
            return
        deferred = DeferredParam(param, name, next(self._numbers), self._mesh_of, home)
        deferred.on_read = _open_for_reader
        self._deferred.add(deferred)
        self._open.append(deferred)

    def _close(self, of: Callable[[int], bool]) -> None:
        """Close the open parameters of these modules, but for those that a reader holds or that rank 0 refers to."""
        self._open = [deferred for deferred in self._open if deferred.params]  # an engine may have taken some over
        ready = [deferred for deferred in self._open if of(deferred.origin) and not deferred.holds]
        if not ready or self._mesh.data.size == 1:
            return
        busy = torch.tensor([deferred.aliased for deferred in ready], dtype=torch.uint8, device="cpu")
        if self._mesh.shard.native:
            busy = busy.to(local_device())
        comm.broadcast(busy, 0, self._mesh.shard)
        self._cut(deferred for deferred, kept in zip(ready, busy.tolist(), strict=True) if not kept)

    def _cut(self, params: Iterable[DeferredParam]) -> None:
        done = set()
        for deferred in params:
            done.add(deferred)
            param = deferred.params[0]
            if manageable(param):
                deferred.close(self._storage)
                self._freed.add(0 if param.is_cuda else param.nbytes)
            else:
                deferred.make_plain()  # its data was replaced by something else
        self._open = [deferred for deferred in self._open if deferred not in done]

    def _settle(self) -> None:
        """Close everything, round it, and forget it; also what nothing else refers to any more."""
        if self._mesh.data.size > 1:
            self._cut([deferred for deferred in self._open if deferred.params])
            for deferred in self._deferred:
                deferred.finish(self._dtype, local_device(), self._storage)
            guard(self._homes)
        else:
            for deferred in list(self._deferred):
                for param in deferred.params:
                    if self._dtype is not None and param.is_floating_point() and format_of(param) is None:
                        param.data = param.data.to(self._dtype)
            self._make_plain()
        self._deferred.clear()

    def _quantize(self) -> None:
        """Quantise what code has left for its `to(device)`, one parameter at a time."""
        roots = [module for module in self._homes if module not in self._children]
        for param in [param for root in roots for param in root.parameters() if is_pending(param)]:
            owner = owner_of(param)
            if owner is None or owner.unit not in self._deferred:
                continue
            if not owner.unit.opened:
                owner.unit.open()
            if self._dtype is not None:
                param.data = param.data.to(self._dtype)
            param.to(local_device())
            if self._mesh.data.size > 1:
                self._cut([owner.unit])

    def _make_plain(self) -> None:
        """Make what is open plain again."""
        for deferred in self._open:
            deferred.make_plain()
        self._open = []

    def _name_all(self) -> None:
        """Give parameters the names that they have in the outermost modules that were built here.

        Raises ValueError for two that share memory, which shards would part.
        """
        for root in [module for module in self._homes if module not in self._children]:
            for name, param in root.named_parameters():
                owner = owner_of(param)
                if owner is not None and owner.unit in self._deferred:
                    owner.unit.rename(name)
            if refused := sharing(root.named_parameters()):
                self._make_plain()
                raise ValueError(f"zero.Init: {refused[0]}")

    def _present(self) -> list[tuple[nn.Module, str, nn.Parameter]]:
        """Module, name and parameter of what was built, also of what was put there without being registered."""
        slots = ((module, *slot) for module in list(self._homes) for slot in module._parameters.items())
        return [(module, name, param) for module, name, param in slots if param is not None]

    def _home(self, module: nn.Module) -> int:
        if module not in self._homes:
            self._homes[module] = next(self._numbers)
        return self._homes[module]
