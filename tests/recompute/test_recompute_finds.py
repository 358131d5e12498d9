"""The promise: a recomputation finds arguments, buffers, random numbers and kept results as its forward did."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from recomputing import all_same, result, settings
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import zero
from zero import checkpointing

WIDTH = 6


@torch.library.custom_op("zero_tests::attention", mutates_args=())
def attention(x: torch.Tensor, dropout_p: float) -> torch.Tensor:
    """Stands for a fused attention that drops some of its weights, as those of GPUs do."""
    return x * (torch.rand(x.shape) > dropout_p)


attention.register_autograd(
    lambda ctx, grad: (grad * (ctx.saved_tensors[0] != 0), None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output),
)


class Part(nn.Module):
    """What others have in common; `state` are tensors that parts hand on to each other."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        return x + self.down(torch.tanh(self.middle(self.up(x), state)))


class Statistics(Part):
    """Counts, and learns mean and deviation."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def middle(self, x: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        return self.norm(x)


class Estimates(Part):
    """Comes closer to the norm of a weight in each forward, and divides by it; has a buffer that is replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.utils.parametrizations.spectral_norm(self.up)
        self.register_buffer("scale", torch.ones(()))

    def middle(self, x: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        self.scale = self.scale * 0.9
        return x * self.scale


class Draws(Part):
    """Draws inside of attention, and afterwards."""

    def middle(self, x: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        return F.dropout(attention(x, 0.5), 0.5)


class Collects(Part):
    """Reads and changes what it was handed, a list in a dict, and a value there."""

    def middle(self, x: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        state["all"].append(torch.sin(x))
        state["last"] = x * state["last"]
        return state["last"] + sum(state["all"])


class GivesAway(Part):
    """Lets another module have, and change, what a product gave."""

    def middle(self, x: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        state["given"] = x
        return x * 2.0


class Changes(Part):
    """Changes in place what a product gave."""

    def middle(self, x: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        return x.mul_(2.0)


class Writes(Part):
    """Has a product write into memory of its own."""

    def middle(self, x: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        room = torch.zeros(x.shape)
        with torch.no_grad():
            torch.mm(x, self.down.weight, out=room)
        return x * 2.0 + room


class OfTorch(Part):
    """Is in torch's own checkpoint, with one of ours in it."""

    def forward(self, x: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        return checkpoint(super().forward, x, state, use_reentrant=False)

    def middle(self, x: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        return torch.sin(checkpointing.checkpoint(torch.tanh, x * 1.5))


class Net(nn.Module):
    """Two parts, the first of which runs twice."""

    def __init__(self, kind: type[Part]) -> None:
        super().__init__()
        one = kind()
        self.first, self.parts = nn.Linear(WIDTH, WIDTH), nn.ModuleList([one, kind(), one])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        state = {"all": [x], "last": x}
        for part in self.parts:
            x = part(x, state)
            if "given" in state:
                x = x + state.pop("given").mul_(0.5)
        return x.square().mean()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", [Statistics, Estimates, Draws, Collects, GivesAway, Changes, Writes, OfTorch])
def test_a_recomputation_finds_what_its_forward_found(kind):
    """Training, with buffers, has the same bits in full, selectively, and with inputs on the host."""
    found = []
    host = {"activation_checkpointing": {"cpu_checkpointing": True}}
    for section, rest in ({}, {}), ({}, {}), ({"policy": "selective"}, {}), ({}, host), (None, host):
        section = {"modules": [kind.__name__], **section} if found and section is not None else {}
        torch.manual_seed(5)
        engine = zero.initialize(model=Net(kind), config=settings(3, section, **rest))[0]
        torch.manual_seed(3)
        losses = []
        for _ in range(2):
            loss = engine(torch.randn(4, WIDTH))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        losses.append({name: buffer.tolist() for name, buffer in engine.module.named_buffers()})
        found.append(result(engine, losses))
    all_same(found)


def test_a_module_checkpointed_by_hand_counts_a_batch_once():
    norm, x = nn.BatchNorm1d(WIDTH), torch.randn(4, WIDTH, requires_grad=True)
    with torch.inference_mode():
        norm.register_buffer("table", torch.zeros(2))  # as evaluation may leave it behind
    y = checkpointing.checkpoint(norm, x)
    before = [buffer.clone() for buffer in norm.buffers()]
    for retain in (True, False):
        y.square().sum().backward(retain_graph=retain)
    assert all(torch.equal(buffer, kept) for buffer, kept in zip(norm.buffers(), before, strict=True))
    assert norm.num_batches_tracked == 1
