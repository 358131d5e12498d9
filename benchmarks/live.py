"""Counts the bytes of tensors that live at a moment, and the most there were."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Inside the block: bytes of all storages that were made in it and still live.

    now:  bytes alive;
    peak: the most that were, since the block began or `restart`.

    Sees results of operations, each storage once with the size that it has then (those of parameters that are cut are
    emptied between uses), and not what a kernel needs for itself while it runs. Storages that operations find made
    before the block are not counted, nor are those of `known`.
    """

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.peak = 0
        self._storages: dict[int, weakref.ref[torch.UntypedStorage] | None] = {}  # by address; None is not counted
        for tensor in known:
            self._note(tensor, counted=False)

    @property
    def now(self) -> int:
        """Bytes that live at this moment."""
        storages = [each() for each in list(self._storages.values()) if each is not None]
        return sum(storage.nbytes() for storage in storages if storage is not None)

    def restart(self) -> None:
        """Look for the peak from here on."""
        self.peak = self.now

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, and count what storages it has made."""
        for each in tree_leaves((args, kwargs)):
            if isinstance(each, Tensor):
                self._note(each, counted=False)
        made = func(*args, **(kwargs or {}))
        for each in tree_leaves(made):
            if isinstance(each, Tensor):
                self._note(each, counted=True)
        self.peak = max(self.peak, self.now)
        return made

    def _note(self, tensor: Tensor, counted: bool) -> None:
        if isinstance(tensor, DTensor):
            tensor = tensor._local_tensor  # what it is made of is made out of sight
        if tensor.layout is not torch.strided or tensor.is_meta:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._storages:
            self._storages[key] = weakref.ref(storage) if counted else None
            weakref.finalize(storage, self._storages.pop, key).atexit = False
