"""A small LightningModule, its data, and runs of Lightning's Trainer on the ranks of the pool."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import lightning
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import zero
from zero.lightning import ZeroStrategy

WIDTH = 16


class Net(lightning.LightningModule):
    """Three blocks; `losses` are those of this rank's micro-batches. late: blocks are built in `configure_model`."""

    def __init__(self, dropout: float = 0.0, late: bool = False, make: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.blocks: Any = None
        self.dropout, self.make, self.losses = dropout, make or adamw, []
        if not late:
            self.configure_model()

    def configure_model(self) -> None:
        if self.blocks is None:
            torch.manual_seed(5)
            parts = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(self.dropout)) for _ in range(3)]
            self.blocks, self.head = nn.ModuleList(parts), nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss = nn.functional.mse_loss(self(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val", nn.functional.mse_loss(self(batch[0]), batch[1]), sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch: Any, index: int) -> torch.Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        return self.make(self.parameters())


def adamw(params: Any) -> Any:
    """AdamW, and a schedule that moves at every step."""
    optimizer = torch.optim.AdamW(params, lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Resumable(DataLoader):
    """A loader that goes on inside of a pass, as `state_dict` says."""

    at = start = 0

    def __iter__(self) -> Iterator[Any]:
        start, self.start = self.start, 0
        return self._rest(super().__iter__(), start)

    def _rest(self, batches: Iterator[Any], start: int) -> Iterator[Any]:
        for index, batch in enumerate(batches):
            if index >= start:
                self.at = (index + 1) % len(self)
                yield batch

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["at"]


def data(kind: type[DataLoader] = DataLoader, shuffle: bool = False) -> DataLoader:
    """32 samples in batches of 4: four batches on each of two ranks, eight on one."""
    generator = torch.Generator().manual_seed(3)
    values = TensorDataset(torch.randn(32, WIDTH, generator=generator), torch.randn(32, 1, generator=generator))
    return kind(values, batch_size=4, shuffle=shuffle)


def trainer(strategy: Any, **options: Any) -> lightning.Trainer:
    """On the ranks there are, without bars and logs. strategy: a stage, or what Trainer takes."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    strategy = ZeroStrategy(strategy) if isinstance(strategy, int) else strategy
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    common = {"accelerator": "cpu", "devices": dist.get_world_size(), "max_epochs": 2}
    return lightning.Trainer(strategy=strategy, **{**quiet, **common, **options})


def seeded(**options: Any) -> Net:
    """A net that is the same on all ranks; afterwards each rank draws other random numbers."""
    net = Net(**options)
    torch.manual_seed(11 + dist.get_rank())
    return net


def weights(net: Net) -> list[torch.Tensor]:
    with zero.GatheredParameters(list(net.parameters())):
        return [param.detach().clone() for param in net.parameters()]
