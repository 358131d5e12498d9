"""One small adapter per way to train the same model: ours at four stages, and the peers that torch ships."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

import zero
from zero.core.comm import local_device

sys.path.append(str(Path(__file__).parents[1] / "examples" / "gpt"))
import model as gpt

ADAMW: dict[str, Any] = {"lr": 2e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.01}


@dataclass(frozen=True)
class Setup:
    """What every variant trains: the model's sizes, the batch per rank, and the dtype that computes."""

    width: int
    layers: int
    heads: int
    vocab: int
    context: int
    batch: int
    bf16: bool

    def model(self) -> gpt.GPT:
        """The same weights at every call and on every rank, drawn where they stay."""
        gpt.VOCAB = self.vocab  # bytes make too small a table for the usual proportions
        torch.manual_seed(0)
        meta = torch.get_default_device().type == "meta"
        with torch.device("meta" if meta else local_device()):
            made = gpt.GPT(gpt.Shape(self.width, self.layers, self.heads, self.context))
        for name, buffer in made.named_buffers():
            # Rotary tables in fp32 would turn bf16 queries into fp32 ones, which attention refuses.
            setattr(made, name, buffer.to(self.dtype))
        return made

    def data(self, step: int, rank: int) -> tuple[Tensor, Tensor]:
        """Token and target ids [batch, context]: counting by some stride, so that there is something to learn."""
        generator = torch.Generator().manual_seed(step * 1000 + rank)
        start = torch.randint(self.vocab, (self.batch, 1), generator=generator)
        stride = torch.randint(1, 9, (self.batch, 1), generator=generator)
        tokens = (start + stride * torch.arange(self.context + 1)) % self.vocab
        tokens = tokens.to(local_device())
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.bf16 else torch.float32


class Variant:
    """A model in training; `step` ends with no gradient left."""

    note = ""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        raise NotImplementedError

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        raise NotImplementedError

    def nbytes(self) -> int:
        """Bytes of model state alive on this rank: parameters, gradients and their buckets, optimizer."""
        raise NotImplementedError


class Zero(Variant):
    """Ours, from a JSON as a user would write it."""

    def __init__(self, setup: Setup, stage: int) -> None:
        config = {
            "train_micro_batch_size_per_gpu": setup.batch,
            "steps_per_print": 10**9,
            "optimizer": {"type": "AdamW", "params": {**ADAMW, "betas": list(ADAMW["betas"])}},
            "gradient_clipping": 0,  # on by default, as in DeepSpeed, and not in the peers
            "bf16": {"enabled": setup.bf16},
            "zero_optimization": {"stage": stage},
        }
        self.engine, *_ = zero.initialize(model=setup.model(), config=config)
        self.note = "fp32 masters and moments" if setup.bf16 else ""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.engine(x, y)

    def backward(self, loss: Tensor) -> None:
        self.engine.backward(loss)

    def step(self) -> None:
        self.engine.step()

    def nbytes(self) -> int:
        return self.engine.state_nbytes().total


class Torch(Variant):
    """A module and an optimizer of torch; alone, that is with no word between the ranks: the floor."""

    def __init__(self, setup: Setup) -> None:
        self.module: nn.Module = self.wrap(setup)
        self.optimizer = self.make_optimizer()

    def wrap(self, setup: Setup) -> nn.Module:
        # torch has no fp32 masters outside FSDP2: parameters, gradients and both moments are all bf16.
        self.note = "pure bf16, no masters" if setup.bf16 else ""
        return setup.model().to(setup.dtype)

    def make_optimizer(self) -> Any:
        return AdamW(self.module.parameters(), fused=True, **ADAMW)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.module(x, y)

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def nbytes(self) -> int:
        return storage_nbytes([*self.parts(), *self.states(self.optimizer)])

    def parts(self) -> Iterable[Tensor]:
        """Parameters and gradients."""
        for param in self.module.parameters():
            yield param
            if param.grad is not None:
                yield param.grad

    def states(self, optimizer: torch.optim.Optimizer) -> Iterable[Tensor]:
        for entry in optimizer.state.values():
            yield from (value for value in entry.values() if isinstance(value, Tensor))


class DDP(Torch):
    """Replicas whose gradients live in DDP's buckets, which saves it the copy it would keep by default."""

    def wrap(self, setup: Setup) -> nn.Module:
        return DistributedDataParallel(super().wrap(setup), gradient_as_bucket_view=True)

    def nbytes(self) -> int:
        # The buckets outlive zero_grad but are out of Python's sight: ask for tensors of their sizes.
        buckets = self.module.reducer._get_zeros_like_grad_buckets()
        tensors = [*self.module.parameters(), *self.states(self.optimizer)]
        return storage_nbytes(tensors) + sum(bucket.buffer().nbytes for bucket in buckets)


class DDPWithZeroRedundancy(DDP):
    """DDP whose optimizer state is cut over the ranks, by whole parameters: torch's stage 1."""

    def make_optimizer(self) -> Any:
        return ZeroRedundancyOptimizer(
            self.module.parameters(), AdamW, parameters_as_bucket_view=True, fused=True, **ADAMW
        )

    def states(self, optimizer: Any) -> Iterable[Tensor]:
        return super().states(optimizer.optim)


class FSDP2(Torch):
    """`fully_shard` on each block and the root, resharding after the forward as is its default: torch's stage 3."""

    def wrap(self, setup: Setup) -> nn.Module:
        self.note = "fp32 masters and moments, fp32 reduction" if setup.bf16 else ""
        model = setup.model()
        mesh = init_device_mesh(local_device().type, (dist.get_world_size(),))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        options: dict[str, Any] = {"mesh": mesh, **({"mp_policy": policy} if setup.bf16 else {})}
        for block in model.blocks:
            fully_shard(block, **options)
        fully_shard(model, **options)
        return model

    def nbytes(self) -> int:
        return storage_nbytes([*self.parts(), *self.states(self.optimizer), *self.gathered()])

    def gathered(self) -> Iterable[Tensor]:
        """Full parameters, which FSDP2 keeps between uses with a storage of size 0; private, but else unseen."""
        for module in (*self.module.blocks, self.module):
            for param in module._get_fsdp_state()._fsdp_param_group.fsdp_params:
                yield from param.all_gather_outputs


def storage_nbytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of all storages under `tensors`, each counted once; of DTensors, what lies on this rank."""
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    storages = [tensor.untyped_storage() for tensor in local]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def make(name: str, setup: Setup) -> Variant:
    """The variant of this name; collective, apart from `alone`."""
    if name.startswith("zero"):
        return Zero(setup, int(name.removeprefix("zero")))
    return {"alone": Torch, "ddp": DDP, "ddp+zero1": DDPWithZeroRedundancy, "fsdp2": FSDP2}[name](setup)


TITLES = {
    "alone": "no communication + AdamW(fused)",
    "ddp": "DDP + AdamW(fused)",
    "ddp+zero1": "DDP + ZeroRedundancyOptimizer",
    "fsdp2": "FSDP2 per block + AdamW(fused)",
    "zero0": "zero stage 0",
    "zero1": "zero stage 1",
    "zero2": "zero stage 2",
    "zero3": "zero stage 3",
}
PEERS = {"zero0": "ddp", "zero1": "ddp+zero1", "zero2": "ddp+zero1", "zero3": "fsdp2"}
