"""The models of the matrix: each with one thing that engines get wrong, small, and written as users write them.

All take `(x, rank, step)`: float inputs [2, WIDTH], the rank, and the number of the micro-step; some can do without
the last. Inputs come in the dtype of the parameters. What decides (an expert, whether the encoder runs) is read off the
inputs' signs or the step, so that no rounding changes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from models import WIDTH, Block
from torch import nn


class Base(nn.Module):
    """Blocks and a head."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, 3)

    def body(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: torch.Tensor, rank: int, step: int = 0) -> Any:
        return loss_from(self.head(self.body(x)))


def loss_from(logits: torch.Tensor) -> torch.Tensor:
    """A loss in fp32, or in fp64 for logits of fp64."""
    return (logits if logits.dtype == torch.float64 else logits.float()).square().mean()


class LowRank(nn.Module):
    """A frozen linear layer with a trained correction of rank 2."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


class Adapter(Base):
    """Everything is frozen but low-rank corrections inside the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        for block in self.blocks:
            block.up = LowRank(block.up)
            block.down = LowRank(block.down)


class Tied(nn.Module):
    """Embedding and head are one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor, rank: int, step: int = 0) -> Any:
        x = self.embed((x > 0).long() * 3 + step % 7)
        for block in self.blocks:
            x = block(x)
        return loss_from(self.head(x))


class MixtureBlock(nn.Module):
    """Four experts in one block: 0 and 1 by the sign of the sample, 2 on rank 1 only, 3 never."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, 7), nn.Tanh(), nn.Linear(7, WIDTH)) for _ in "0123")

    def forward(self, x: torch.Tensor, sign: torch.Tensor, rank: int) -> torch.Tensor:
        hidden = self.norm(x)
        gates = self.router(hidden).softmax(-1)
        out = torch.zeros_like(x)
        for index, mask in enumerate((sign, ~sign)):
            if mask.any():  # without a sample the expert does not run at all
                out[mask] = self.experts[index](hidden[mask]) * gates[mask, index : index + 1]
        if rank == 1:
            out = out + self.experts[2](hidden) * gates[:, 2:3]
        return x + out


class Experts(Base):
    """A mixture of experts that ranks use differently and that leaves one unused."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1] = MixtureBlock()

    def forward(self, x: torch.Tensor, rank: int, step: int) -> Any:
        sign = x[:, 0] > 0
        x = self.blocks[1](self.blocks[0](x), sign, rank)
        return loss_from(self.head(self.blocks[2](x)))


class Mixture(nn.Module):
    """Experts of which each rank runs those that it is told to, in its own order; or none."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor, chosen: list[int]) -> torch.Tensor:
        for index in chosen:
            x = x + self.experts[index](x)
        return x


class RankExperts(Base):
    """Experts that would be blocks of their own; `UNITS` has them travel with the mixture, which all ranks run."""

    def __init__(self) -> None:
        super().__init__()
        self.mixture = Mixture()

    def forward(self, x: torch.Tensor, rank: int, step: int) -> Any:
        chosen = ([0], [1, 0])[rank % 2] if step % 2 else ([2, 1], [])[rank % 2]
        return loss_from(self.head(self.blocks[1](self.mixture(self.blocks[0](x), chosen))))


class SometimesEncoder(Base):
    """An encoder of two blocks that runs on every third step only."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(Block(), Block())

    def runs(self, rank: int, step: int) -> bool:
        return step % 3 == 1

    def forward(self, x: torch.Tensor, rank: int, step: int) -> Any:
        if self.runs(rank, step):
            x = x + self.encoder(x.flip(-1))
        return super().forward(x, rank, step)


class Encoder(nn.Module):
    """An encoder that is no list of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


class RankEncoder(SometimesEncoder):
    """An encoder that runs on some steps, and then on some ranks only."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder()

    def runs(self, rank: int, step: int) -> bool:
        return step % 3 == 1 and rank != 0


class Twice(Base):
    """Blocks that run several times in one forward."""

    def body(self, x: torch.Tensor) -> torch.Tensor:
        for index in (0, 1, 0, 2, 2):
            x = self.blocks[index](x)
        return x


class DictOutput(Base):
    """Returns loss and logits, as a library does; only the loss is used."""

    def forward(self, x: torch.Tensor, rank: int, step: int) -> Any:
        logits = self.head(self.body(x))
        return {"loss": loss_from(logits), "logits": logits}


class FrozenMiddle(Base):
    """The middle block and one matrix of the last are frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].requires_grad_(False)
        self.blocks[2].down.weight.requires_grad_(False)


class ListOutput(Base):
    """Returns the logits of every block as a list; the loss is made outside."""

    def forward(self, x: torch.Tensor, rank: int, step: int) -> Any:
        outputs = []
        for block in self.blocks:
            x = block(x)
            outputs.append(self.head(x))
        return outputs


class Extra(Block):
    """A block with a parameter that only rank 1 uses."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor, rank: int = 0) -> torch.Tensor:
        return super().forward(x * self.extra if rank == 1 else x)


class Case(NamedTuple):
    """A model, and the micro-batches of an optimizer step."""

    model: type[nn.Module]
    accumulation: int


CASES = {
    kind.__name__: Case(kind, accumulation)
    for kind, accumulation in (
        (Adapter, 1),
        (Tied, 1),
        (Experts, 2),
        (RankExperts, 1),
        (SometimesEncoder, 1),
        (RankEncoder, 2),
        (Twice, 1),
        (DictOutput, 4),
        (FrozenMiddle, 1),
        (ListOutput, 1),
    )
}


# Whatever ranks use differently must belong to a unit of a module that all of them run: classes for `zero.units`.
UNITS = {"RankExperts": ["Block", "Mixture"]}


def build(name: str) -> nn.Module:
    """The model of a case, seeded."""
    torch.manual_seed(3)
    return CASES[name].model()


def inputs(step: int, rank: int) -> torch.Tensor:
    """One rank's micro-batch [2, WIDTH], exact in every precision."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(2, WIDTH, generator=generator).bfloat16().float()


def loss_of(output: Any) -> torch.Tensor:
    """The loss in whatever a model of the matrix returned."""
    if isinstance(output, Mapping):
        return output["loss"]
    if isinstance(output, list):
        return sum(loss_from(logits) for logits in output)
    return getattr(output, "loss", output)
