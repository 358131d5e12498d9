"""Model state moved to host memory between phases of a run, while something else needs the device."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from typing import Any

import torch

from zero.core.param_buffer import State, resizable
from zero.core.sharded_module import ShardedModule
from zero.log import rank_zero
from zero.optim.optimizer import ZeroOptimizer

STATES = ("optim_states", "hp_params", "lp_params", "lp_grads", "contiguous_grad_buffer")


class StateOffload:
    """Moves model state to host memory and back."""

    def __init__(self, sharded: ShardedModule, optimizer: ZeroOptimizer | None) -> None:
        self._sharded = sharded
        self._optimizer = optimizer
        # Storages of the device, resized to 0, and their bytes in host memory; views of the storages stay valid.
        self._moved: list[tuple[torch.UntypedStorage, torch.Tensor]] = []

    def offload_states(
        self,
        include: Collection[Any] | None = None,
        device: Any = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Copy model state to host memory and give the device's memory back, until `reload_states()`.

        include: which, by name or as an enum with such values; default all. "lp_params" are the parameters that the
        model computes with, "hp_params" their fp32 masters (in an fp32 run there are none beside the parameters),
        "optim_states" the moments, "lp_grads" gradients, "contiguous_grad_buffer" memory kept for them.
        `pin_memory` and `non_blocking` matter on a GPU only.

        What `offload_optimizer` keeps off the device stays where it is.

        Until the reload the engine's forward, backward and step, and `zero.utils`, raise RuntimeError. Does nothing
        while states are offloaded already. Raises ValueError for "nvme" and for unknown names, RuntimeError without
        an optimizer, with `offload_param`, or inside `GatheredParameters`.
        """
        kind = getattr(device, "value", str(device))
        if kind == "nvme":
            raise ValueError("NVMe offload is not supported for offloading states.")
        if kind == "none":
            rank_zero(logging.WARNING, "offload_states(device='none'): nothing is offloaded")
            return
        if kind != "cpu":
            raise ValueError(f"offload_states(device={device!r}): wanted 'cpu'")
        names = [getattr(each, "value", each) for each in (STATES if include is None else include)]
        unknown = [name for name in names if name not in STATES]
        if unknown:
            raise ValueError(f"offload_states(include=...): unknown {unknown}; known: {', '.join(STATES)}")
        if self._optimizer is None:
            raise RuntimeError("offload_states() needs an optimizer: give `optimizer` in the JSON or to initialize()")
        if any(unit.shard.placement.shard_offloaded for unit in self._sharded.units):
            raise RuntimeError(
                "offload_states(): the parameters rest off the device already; leave out "
                "zero_optimization.offload_param, or do without offload_states()"
            )
        if self._optimizer.away:
            return
        self._optimizer.settle()
        held = [unit.plan.name for unit in self._sharded.units if unit.holds]
        if held:
            raise RuntimeError(f"offload_states() while GatheredParameters holds {held} open; call it outside")
        self._sharded.recover()
        self._sharded.prefetcher.release_all()
        storages = {each.data_ptr(): each for each in self._storages(names) if each.nbytes() and resizable(each)}
        if "lp_params" in names:
            for unit in self._sharded.units:
                unit.offload()
        pinned = pin_memory and self._sharded.device.type == "cuda"
        self._optimizer.away = True
        for storage in storages.values():  # one by one: where memory ends, `reload_states` brings back what has left
            host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=pinned)
            host.copy_(_bytes(storage), non_blocking=non_blocking)  # on a GPU the current stream orders both
            storage.resize_(0)
            self._moved.append((storage, host))
        if self._sharded.device.type == "cuda":
            torch.cuda.empty_cache()  # else the memory stays with torch, and only torch may use it

    def reload_states(self, non_blocking: bool = False) -> None:
        """Bring back what `offload_states` took, bit by bit; does nothing when nothing is offloaded."""
        if self._optimizer is None or not self._optimizer.away:
            return
        while self._moved:
            storage, host = self._moved.pop()
            storage.resize_(host.numel())
            _bytes(storage).copy_(host, non_blocking=non_blocking)
        for unit in self._sharded.units:
            if unit.state is State.AWAY:
                unit.buffer.reload()
        self._optimizer.away = False

    def _storages(self, names: Collection[str]) -> Iterator[torch.UntypedStorage]:
        sharded = self._sharded
        for unit in sharded.units:
            if "lp_params" in names:
                yield unit.buffer.full.untyped_storage()
                yield unit.shard.values.untyped_storage()
        for unit in sharded.trained:
            if "lp_grads" in names and unit.gradients.flat is not None:
                yield unit.gradients.flat.untyped_storage()
            if unit.shard.placement.updated_on_host:
                continue
            master = unit.shard.master.tensor
            if "hp_params" in names and master is not unit.shard.values:
                yield master.untyped_storage()
            if "optim_states" in names:
                yield from (tensor.untyped_storage() for _, _, tensor in self._optimizer.states.tensors(unit))
            if "contiguous_grad_buffer" in names:
                unit.gradients.forget_memory()
            if "lp_grads" in names:
                yield from (tensor.untyped_storage() for tensor in unit.gradients.sum.parts())


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
