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
from matrix_models import Base, Extra, FrozenMiddle, Tied
from models import WIDTH, Net, config, make_net, step
from oracle import backward
from stages import check
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.checkpoint import checkpoint

import zero


class Shared(Base):
    """The same module registered under two names, nested in another."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].inner = self.blocks[0].up

    def forward(self, x: torch.Tensor, rank: int) -> Any:
        x = self.blocks[2](self.blocks[1](self.blocks[0](x)))
        return self.head(x).square().mean() + self.blocks[2].inner(x).mean()


class Unused(Base):
    """A block that no rank uses, and a parameter of the root that none does."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Parameter(torch.ones(5))

    def forward(self, x: torch.Tensor, rank: int) -> Any:
        return self.head(self.blocks[2](self.blocks[0](x))).square().mean()


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
        return self.head(self.blocks[2](x)).square().mean()


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


class Structured(Base):
    """Blocks that return a dict, a tuple and a dataclass; the loss uses several of the tensors."""

    def __init__(self) -> None:
        super().__init__()
        for block, kind in zip(self.blocks, (dict, tuple, Output), strict=True):
            block.register_forward_hook(wrap_output(kind))

    def forward(self, x: torch.Tensor, rank: int) -> Any:
        first = self.blocks[0](x)
        second = self.blocks[1](first["hidden"])
        third = self.blocks[2](second[0] + second[1])
        loss = self.head(third.features[0]).square().mean() + first["side"].mean() + third.loss
        return Output(loss, third.features)


def wrap_output(kind: type) -> Callable[..., Any]:
    def hook(module: nn.Module, args: Any, output: torch.Tensor) -> Any:
        if kind is dict:
            return {"hidden": output, "side": output * 2}
        if kind is tuple:
            return output, output.sin()
        return Output(output.mean(), [output])

    return hook


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
        x = self.blocks[0](x)
        x = checkpoint(self.blocks[1], x, use_reentrant=True)
        x = checkpoint(self.blocks[2], x, use_reentrant=False)
        return self.head(x).square().mean()


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


CASES = [Shared, Unused, OneRankOnly, Tiny, Structured, Stashed, Checkpointed, Objects, Written]


def loss_of(output: Any) -> torch.Tensor:
    return output.loss if isinstance(output, Output) else output


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


def two_forwards(engine: Any, x: torch.Tensor, rank: int, factor: float) -> torch.Tensor:
    """One loss out of two forwards."""
    loss = (loss_of(engine(x[:1], rank)) + loss_of(engine(x[1:], rank))) / 2
    engine.backward(loss)
    return loss.detach()


def retained(engine: Any, x: torch.Tensor, rank: int, factor: float) -> torch.Tensor:
    """One graph, run twice."""
    loss = loss_of(engine(x, rank)) / 2
    engine.backward(loss, retain_graph=True)
    engine.backward(loss)
    return loss.detach()


def with_evaluation(engine: Any, x: torch.Tensor, rank: int, factor: float) -> torch.Tensor:
    """A forward under no_grad in eval mode before each training forward."""
    engine.eval()
    with torch.no_grad():
        engine(x, rank)
    engine.train()
    return by_engine(engine, x, rank, factor)


LOOPS = [two_backwards, two_forwards, retained, with_evaluation]


@pytest.mark.parametrize("kind", CASES, ids=lambda kind: kind.__name__)
def test_model(pool, kind):
    check(pool, kind, by_engine, plain=one_backward)


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_loop(pool, loop):
    # Splitting a batch in two rounds each half's mean: as much as one more rounding of the gradient.
    check(pool, Tied, loop, plain=one_backward)


@pytest.mark.parametrize("kind", [OneRankOnly, *longer(Unused, Shared, FrozenMiddle)], ids=lambda kind: kind.__name__)
def test_model_with_accumulation(pool, kind):
    check(pool, kind, two_backwards, accumulation=3, plain=one_backward)


def test_accumulation_divides_once_however_backward_is_called(pool):
    check(pool, Structured, one_backward, accumulation=2)


def buffers(rank: int) -> dict[str, torch.Tensor]:
    """Of all kinds; those of other ranks than 0 hold something else."""
    found = {
        "transposed": torch.arange(6.0).view(2, 3).t(),
        "expanded": torch.arange(4).expand(300, -1),  # much more to send than there is
        "strided": torch.arange(10.0)[::3],
        "number": torch.tensor(7),
        "empty": torch.zeros(0, 3),
        **{str(dtype): torch.arange(3.0).to(dtype) for dtype in (torch.bool, torch.uint16, torch.float8_e4m3fn)},
        "complex": torch.full((2,), 1 + 2j),
    }
    for name, value in found.items() if rank else ():
        (value[0] if name == "expanded" else value).zero_()
    return found


def adopted(stage: int) -> dict[str, torch.Tensor]:
    model = nn.Linear(2, 2)
    for name, value in buffers(dist.get_rank()).items():
        model.register_buffer(name.replace(".", "_"), value)
    zero.initialize(model=model, config=config(stage, 2))[0].destroy()
    return {name: value.clone() for name, value in model.named_buffers()}


def test_buffers_of_any_stride_and_dtype_are_those_of_rank_0(pool):
    wanted = buffers(0)
    for found in pool.run(2, adopted, 3):
        assert all(torch.equal(found[name.replace(".", "_")], value) for name, value in wanted.items())


class Nothing(nn.Module):
    """A block whose parameters have no elements, and are read."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in {"rows": (0, WIDTH), "cols": (WIDTH, 0), "stack": (3, 0, 2), "bias": (0,)}.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + sum(param.sum() for param in self.parameters())


class WithoutElements(Net):
    """A Net with such parameters in a block, and with a block of no others."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].norm = nn.Sequential(self.blocks[1].norm, Nothing())
        self.blocks.append(Nothing())


OPTIMIZERS = {
    "NorMuon": ("Muon", {"lr": 1e-2, "beta2": 0.9}),
    "Muon, one by one": ("Muon", {"lr": 1e-2, "ns_method": "standard"}),
    **{kind: (kind, {"lr": 1e-2}) for kind in ("Lamb", "Lion", "SGD", "Adagrad", "RMSprop")},
}


def with_and_without(section: tuple[str, dict[str, Any]], stages: tuple[int, ...], folder: str) -> list[str]:
    """Names of parameters that two steps, with a resume between them, leave otherwise than without such parameters."""
    kind, params = section
    found = []
    for stage in stages:
        trained = []
        for net in (WithoutElements(), make_net()):
            if isinstance(net, WithoutElements):
                vector_to_parameters(parameters_to_vector(make_net().parameters()), net.parameters())
            settings = config(stage, 2, optimizer={"type": kind, "params": params}, gradient_clipping=1.0)
            engine, *_ = zero.initialize(model=net, config=settings)
            step(engine, 0)
            engine.save_checkpoint(f"{folder}/{type(net).__name__}{stage}")
            engine.load_checkpoint(f"{folder}/{type(net).__name__}{stage}")
            step(engine, 1)
            engine.destroy()
            trained.append([(name, param) for name, param in net.named_parameters() if param.numel()])
        pairs = zip(*trained, strict=True)
        found += [f"{name} at {stage}" for (name, value), (_, wanted) in pairs if not value.equal(wanted)]
    return found


@pytest.mark.parametrize(("name", "stages"), [("NorMuon", (0, 3)), *longer(*((name, range(4)) for name in OPTIMIZERS))])
def test_parameters_without_elements_are_left_alone(pool, name, stages, tmp_path):
    assert pool.run(2, with_and_without, OPTIMIZERS[name], tuple(stages), str(tmp_path)) == [[]] * 2
