"""The loader that an engine makes of a dataset, as its configuration says."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils.data import Dataset, DistributedSampler, IterableDataset

from zero.config import Config
from zero.data import Loader

ROUTES = ("train", "eval", "predict")
"""DeepSpeed's words for what a loader is used for; only "train" shuffles."""


def make_loader(
    settings: Config,
    device: torch.device,
    rank: int,
    dataset: Dataset,
    batch_size: int | None = None,
    route: str = "train",
    pin_memory: bool = True,
    data_sampler: Iterable[int] | None = None,
    collate_fn: Callable[..., Any] | None = None,
    num_local_io_workers: int | None = None,
) -> Loader:
    """See `Engine.deepspeed_io`; `rank`: of `settings.world_size` data-parallel ones.

    Raises ValueError for what no loader can be made of.
    """
    if route not in ROUTES:
        raise ValueError(f"deepspeed_io(route=...): got {route!r}, wanted one of {', '.join(map(repr, ROUTES))}")
    world_size = settings.world_size
    if route != "train" and data_sampler is None and not isinstance(dataset, IterableDataset):
        data_sampler = DistributedSampler(dataset, world_size, rank, shuffle=False)
    # Under the tree, a step must consist of the same micro-batches whatever the number of ranks.
    together = settings.zero.reduce == "tree" and route == "train" and data_sampler is None
    return Loader(
        dataset,
        batch_size=settings.train_micro_batch_size_per_gpu if batch_size is None else batch_size,
        rank=rank,
        world_size=world_size,
        collate_fn=collate_fn,
        drop_last=settings.dataloader_drop_last,
        sampler=data_sampler,
        num_workers=num_local_io_workers or 0,
        pin_memory=pin_memory and device.type == "cuda",
        together=world_size * settings.gradient_accumulation_steps if together else None,
    )
