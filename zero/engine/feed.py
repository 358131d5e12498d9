"""Micro-batches for a schedule: taken from an iterator, cut in pieces, and compared between the ranks of a replica."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from zlib import crc32

import torch
from torch.utils.data import default_collate

from zero.config import Config
from zero.core.agree import agree, digest_of
from zero.core.hooks import tensors_in
from zero.core.sharded_module import ShardedModule
from zero.core.tensors import map_leaves
from zero.parallel.pipeline.build import Pipelined
from zero.parallel.pipeline.messages import encode
from zero.parallel.pipeline.stage import Batch
from zero.watchdog.hang_report import ranks_text

_TARGETS = ("labels", "label", "targets", "target")
_SAMPLE = 64  # elements of each tensor that are compared


class Feed:
    """Gives the ranks of a replica the same micro-batches.

    batch_fn: changes what comes from the iterator, or None; iterator: taken from where a call brings none.
    """

    def __init__(self, sharded: ShardedModule, pipelined: Pipelined, needs_data: bool) -> None:
        self.batch_fn: Callable[[Any], Any] | None = None
        self.iterator: Iterator[Any] | None = None
        self._sharded, self._pipelined, self._needs_data = sharded, pipelined, needs_data

    def take(self, caller: str, data_iter: Iterator[Any] | None, count: int, config: Config) -> list[Batch]:
        """The micro-batches of `count` batches; collective.

        RuntimeError on all ranks where an iterator ends too early or raises, or ranks of a replica have other samples.
        """
        source = self.iterator if data_iter is None else data_iter
        found: list[Batch] | None = None
        failure: Exception | None = None
        if source is not None:
            try:
                found = self._taken(source, count, config.pipeline.split_size)
            except Exception as error:  # whatever a dataset raises
                failure = error
        elif self._needs_data:
            failure = RuntimeError(
                f"{caller}() without data, which the first and the last stage need, and of a model of transformers all "
                "of them: give it an iterator, or training_data= to initialize()"
            )
        mine = found and [[each.share, len(each.args), [*each.kwargs], each.key, each.digest] for each in found]
        said = agree(failure or mine, self._sharded.world, f"{caller}()")
        self._compare(caller, said)
        if found is not None:
            return found
        replica = self._sharded.meshes.grid.ranks("pp", self._sharded.world.rank)
        known = next(said[rank] for rank in replica if said[rank])
        rows = enumerate(known)
        return [
            Batch(at, (None,) * args, dict.fromkeys(names), None, share, key)
            for at, (share, args, names, key, _) in rows
        ]

    def _taken(self, source: Iterator[Any], count: int, split_size: int | None) -> list[Batch]:
        found: list[Batch] = []
        source = iter(source)
        for number in range(count):
            try:
                batch = next(source)
            except StopIteration:
                raise RuntimeError(
                    f"the iterator ended after {number} of {count} micro-batches; repeat the data, as "
                    "zero.data.RepeatingLoader does, or take fewer micro-batches a step"
                ) from None
            batch = batch if self.batch_fn is None else self.batch_fn(batch)
            values = parts_of(batch, self._pipelined.one_input, self._pipelined.loss_fn is not None)
            for share, piece in _pieces(values, split_size):
                found.append(self._batch(len(found), *piece, share))
                self._pipelined.divided.prepare(found[-1])  # raises what a stage will say, before anything is sent
        return found

    def _batch(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any, share: float) -> Batch:
        device = self._sharded.device
        forms: list[torch.Tensor] = []
        with contextlib.suppress(TypeError):  # a value of another class is of no form that is told
            forms.append(encode([list(args), kwargs], []))
        digest = 0
        for tensor in tensors_in((args, kwargs, target)):
            if tensor.device.type == "cpu" or not number:
                flat = tensor.detach().reshape(-1)
                sample = flat[:: max(1, flat.numel() // _SAMPLE)][:_SAMPLE].cpu().contiguous()
                digest = crc32(sample.view(torch.uint8).numpy().tobytes() if sample.numel() else b"", digest)

        def here(leaf: Any) -> Any:
            return leaf.to(device, non_blocking=True) if isinstance(leaf, torch.Tensor) else leaf

        args, kwargs, target = map_leaves((args, kwargs, target), here)
        return Batch(number, args, kwargs, target, share, digest_of(forms), digest)

    def _compare(self, caller: str, said: Sequence[Any]) -> None:
        """Raise RuntimeError, on all ranks, where those of one replica were given other samples."""
        for ranks in self._sharded.meshes.grid.lists("pp"):
            with_data = [rank for rank in ranks if said[rank]]
            for rank in with_data[1:]:
                rows = itertools.zip_longest(said[with_data[0]], said[rank])
                number = next((at for at, (one, other) in enumerate(rows) if one != other), None)
                if number is not None:
                    raise RuntimeError(
                        f"{caller}(): {ranks_text([with_data[0], rank])} have stages of one replica, and were given "
                        f"different samples, in micro-batch {number} first; ranks along pp take the same batches: "
                        "training_data= or engine.deepspeed_io() deals them so, or shard by engine.dp_world_size and "
                        "engine.get_data_parallel_rank()"
                    )
        counts = {rank: len(each) for rank, each in enumerate(said) if each}
        if len(set(counts.values())) > 1:
            raise RuntimeError(f"{caller}(): ranks were given different numbers of micro-batches: {counts}")


def parts_of(batch: Any, one_input: bool, has_loss: bool) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """The arguments of the model, positional and by name, and the target.

    one_input: the model takes one value, which may be a tuple; else a tuple is its arguments. has_loss: a function
    takes the target, not the model.
    """
    if isinstance(batch, Mapping):
        named = dict(batch)
        target = next((named.pop(name) for name in _TARGETS if name in named), None) if has_loss else None
        return (), named, target
    target = None
    if isinstance(batch, (tuple, list)) and len(batch) == 2 and (has_loss or one_input):
        batch, target = batch
    if isinstance(batch, Mapping):
        return (), dict(batch), target
    many = isinstance(batch, (tuple, list)) and not one_input
    return (tuple(batch) if many else (batch,)), {}, target


def first_batch(config: Config, data: Any, collate_fn: Callable[..., Any] | None) -> Any:
    """The batch on which layers are timed, where the configuration asks for that and there are data; else None."""
    if data is None or config.pipeline.partition != "time":
        return None
    count = min(config.train_micro_batch_size_per_gpu, len(data))
    return (collate_fn or default_collate)([data[number] for number in range(count)])


def _pieces(values: Any, size: int | None) -> Iterator[tuple[float, Any]]:
    """The values cut along their first dimension, each with its share of all; whole where no size is said."""
    tensors = [each for each in tensors_in(values) if each.ndim]
    if size is None or not tensors:
        yield 1.0, values
        return
    count = len(tensors[0])
    for start in range(0, count, size):

        def piece(leaf: Any, start: int = start) -> Any:
            cut = isinstance(leaf, torch.Tensor) and leaf.ndim and len(leaf) == count
            return leaf[start : start + size] if cut else leaf

        yield min(size, count - start) / count, map_leaves(values, piece)
