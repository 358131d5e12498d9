"""The promise: awkward models train right on every stage, and nothing hangs.

Each case trains the same model on two ranks under every stage, and as the oracle in plain torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from marks import longer
from matrix_models import Base, Extra, FrozenMiddle, loss_from, loss_of
from models import WIDTH, Net, config, make_net
from oracle import backward
from scenario import Model, differences, run
from stages import check
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.checkpoint import checkpoint

import zero


class Nothing(nn.Module):
    """A block whose parameters have no elements, and are read."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in {"rows": (0, WIDTH), "cols": (WIDTH, 0), "stack": (3, 0, 2), "bias": (0,)}.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + sum(param.sum() for param in self.parameters())


class WithoutElements(Net):
    """The Net of `make_net` with such parameters in a block, and with a block of no others."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].norm = nn.Sequential(self.blocks[1].norm, Nothing())
        self.blocks.append(Nothing())
        vector_to_parameters(parameters_to_vector(make_net().parameters()), self.parameters())


OPTIMIZERS = {
    "NorMuon": ("Muon", {"lr": 1e-2, "beta2": 0.9}),
    "Muon, one by one": ("Muon", {"lr": 1e-2, "ns_method": "standard"}),
    **{kind: (kind, {"lr": 1e-2}) for kind in ("Lamb", "Lion", "SGD", "Adagrad", "RMSprop")},
}


class Shared(Base):
    """The same module registered under two names, nested in another."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].inner = self.blocks[0].up

    def forward(self, x: torch.Tensor, rank: int) -> Any:
        x = self.blocks[2](self.blocks[1](self.blocks[0](x)))
        return self.head(x).square().mean() + self.blocks[2].inner(x).mean()


class OneRankOnly(Base):
    """One parameter inside a block and one of the root that only rank 1 uses."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Parameter(torch.ones(WIDTH))
        self.blocks[1] = Extra()

    def forward(self, x: torch.Tensor, rank: int) -> Any:
        x = self.blocks[1](self.blocks[0](x), rank)
        if rank == 1:
            x = x * self.extra
        return loss_from(self.head(self.blocks[2](x)))


class Tiny(Base):
    """Parameters of 0 and of 1 element, and a block with fewer elements than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.none = nn.Parameter(torch.empty(0, 4))
        self.one = nn.Parameter(torch.tensor(0.5))
        gate = nn.Module()
        gate.scale = nn.Parameter(torch.ones(1))
        gate.forward = lambda x: x * gate.scale
        self.gates = nn.ModuleList([gate])

    def forward(self, x: torch.Tensor, rank: int) -> Any:
        x = self.gates[0](x * self.one) + self.none.sum()
        return super().forward(x, rank)


@dataclasses.dataclass
class Output:
    """What a library might return."""

    loss: torch.Tensor
    features: list[torch.Tensor]


WRAPS: list[Callable[[torch.Tensor], Any]] = [
    lambda output: {"hidden": output, "side": output * 2},
    lambda output: (output, output.sin()),
    lambda output: Output(output.mean(), [output]),
]


class Structured(Base):
    """Blocks that return a dict, a tuple and a dataclass; the loss uses several of the tensors."""

    def __init__(self) -> None:
        super().__init__()
        for block, wrap in zip(self.blocks, WRAPS, strict=True):
            block.register_forward_hook(lambda module, args, output, wrap=wrap: wrap(output))

    def forward(self, x: torch.Tensor, rank: int) -> Any:
        first = self.blocks[0](x)
        second = self.blocks[1](first["hidden"])
        third = self.blocks[2](second[0] + second[1])
        loss = self.head(third.features[0]).square().mean() + first["side"].mean() + third.loss
        return Output(loss, third.features)


class Stashed(Base):
    """A loss made from something that a submodule left behind instead of returning it."""

    def forward(self, x: torch.Tensor, rank: int) -> Any:
        seen = []
        handle = self.blocks[1].up.register_forward_hook(lambda module, args, output: seen.append(output))
        loss = super().forward(x, rank)
        handle.remove()
        return seen[0].square().mean() + loss


class Checkpointed(Base):
    """Every block recomputed in backward; the first with reentrant checkpointing."""

    def forward(self, x: torch.Tensor, rank: int) -> Any:
        x = checkpoint(self.blocks[1], self.blocks[0](x), use_reentrant=True)
        return loss_from(self.head(checkpoint(self.blocks[2], x, use_reentrant=False)))


class Direct(nn.Module):
    """Reads its weight itself, so that only its own output tells when backward comes to it."""

    def __init__(self, distribution: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.3 * torch.randn(WIDTH, WIDTH))
        self.distribution = distribution

    def forward(self, x: torch.Tensor) -> Any:
        found = nn.functional.linear(x, self.weight)
        scale = torch.ones(WIDTH, dtype=x.dtype)
        return torch.distributions.Normal(found, scale) if self.distribution else found.unsqueeze(0)[0]


class Objects(nn.Module):
    """A view that the caller changes in place, and a distribution, come out of modules."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Direct(index == 2) for index in range(3))

    def forward(self, x: torch.Tensor, rank: int) -> Any:
        for block in self.blocks[:2]:
            found = block(x)
            found += x
            x = found.tanh()
        return -self.blocks[2](x).log_prob(torch.ones_like(x)).mean()


class Written(Base):
    """The forward writes parameters, trained and frozen ones, in place and by another tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.signs = nn.ParameterList(nn.Parameter(torch.randn(WIDTH), requires_grad=False) for _ in range(2))

    def forward(self, x: torch.Tensor, rank: int) -> Any:
        with torch.no_grad():
            self.head.weight.clamp_(-0.1, 0.1)
            self.signs[0].sign_()
            self.signs[1].data = self.signs[1].sign()
        return super().forward((x + self.blocks[0].norm.bias) * self.signs[0] * self.signs[1][:], rank)


CASES = [Shared, Tiny, Structured, Stashed, Objects, Written, *longer(OneRankOnly, Checkpointed)]


def by_engine(engine: Any, x: torch.Tensor, rank: int, factor: float) -> torch.Tensor:
    loss = loss_of(engine(x, rank))
    engine.backward(loss)
    return loss.detach()


def one_backward(model: Any, x: torch.Tensor, rank: int, factor: float) -> torch.Tensor:
    return backward(loss_of(model(x, rank)), factor)


def two_backwards(engine: Any, x: torch.Tensor, rank: int, factor: float) -> torch.Tensor:
    """The loss in two halves, one backward each, before one step."""
    losses = [loss_of(engine(x[:1], rank)) / 2]
    engine.backward(losses[0])
    losses.append(loss_of(engine(x[1:], rank)) / 2)
    engine.backward(losses[1])
    return sum(losses).detach()


@pytest.mark.parametrize("kind", CASES, ids=lambda kind: kind.__name__)
def test_model(pool, kind):
    check(pool, kind, by_engine, plain=one_backward)


@pytest.mark.parametrize("kind", [OneRankOnly, *longer(Shared, FrozenMiddle)], ids=lambda kind: kind.__name__)
def test_model_with_accumulation(pool, kind):
    # Splitting a batch in two rounds each half's mean: as much as one more rounding of the gradient.
    check(pool, kind, two_backwards, accumulation=3, plain=one_backward)


def buffers() -> dict[str, torch.Tensor]:
    """Of all kinds."""
    return {
        "transposed": torch.arange(6.0).view(2, 3).t(),
        "expanded": torch.arange(4).expand(300, -1),  # much more to send than there is
        "strided": torch.arange(10.0)[::3],
        "number": torch.tensor(7),
        "empty": torch.zeros(0, 3),
        **{str(dtype)[6:]: torch.arange(3.0).to(dtype) for dtype in (torch.bool, torch.uint16, torch.float8_e4m3fn)},
        "complex": torch.full((2,), 1 + 2j),
    }


@pytest.mark.ranks(2)
def test_buffers_of_any_stride_and_dtype_are_those_of_rank_0():
    model = nn.Linear(2, 2)
    for name, value in buffers().items():
        model.register_buffer(name, value)
        if dist.get_rank():
            (value[0] if name == "expanded" else value).zero_()
    zero.initialize(model=model, config=config(3, 2))[0].destroy()
    assert all(torch.equal(model.get_buffer(name), value) for name, value in buffers().items())


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("name", "stages"), [("NorMuon", (0, 3)), *longer(*((name, range(4)) for name in OPTIMIZERS))])
def test_parameters_without_elements_are_left_alone(name, stages, tmp_path):
    """Two steps, with a resume between them, are those of a model without such parameters."""
    kind, params = OPTIMIZERS[name]
    more = {"optimizer": {"type": kind, "params": params}, "gradient_clipping": 1.0}
    for stage in stages:
        found = []
        for model in (Model(WithoutElements), Model(make_net)):
            folder = str(tmp_path / f"{model.make.__name__}{stage}")
            run(model, stage, 1, save=folder, **more)
            found.append(run(model, stage, 1, load=folder, first=1, **more))
        ours, plain = found
        ours.weights = {key.replace("norm.0", "norm"): value for key, value in ours.weights.items() if value.numel()}
        assert ours.weights.keys() == plain.weights.keys()
        assert not differences(ours, plain), stage
