"""The promise: a loss inside the model weighs what it counts, whatever that is: loss and gradients of one process.

What it counts is told by the model or by the JSON. Where it is not, the check before the first step finds it.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from marks import longer
from sharing import LENGTH, ROWS, VOCABULARY, Lines, settings
from torch.nn.functional import cross_entropy

import zero
from zero.utils import safe_get_full_grad

MODES = ("ring", "ulysses")
LOSSES = ["bool", "int", "float", "weights", "empty", "z", "ignored", "classes", "sum", "dict"]


class Weighed(Lines):
    """A loss of one kind; `told`: it says what it counts where no argument does."""

    def __init__(self, kind: str, told: bool = True) -> None:
        super().__init__()
        self.kind, self.told = kind, told
        self.register_buffer("classes", torch.linspace(0.01, 0.05, VOCABULARY))

    def forward(self, tokens: Any, targets: Any, loss_mask: Any, position_ids: Any = None) -> Any:  # type: ignore[override]
        logits, wanted = super().forward(tokens, None, position_ids).flatten(0, 1), targets.flatten()
        if self.kind == "sum":
            return cross_entropy(logits, wanted, reduction="sum")
        if self.kind in ("ignored", "classes"):
            options = {"ignore_index": 0} if self.kind == "ignored" else {"weight": self.classes}
            count = (wanted != 0).sum() if self.kind == "ignored" else self.classes[wanted.relu()][wanted >= 0].sum()
            loss = cross_entropy(logits, wanted, **options)
            return (loss, count) if self.told else loss
        each = cross_entropy(logits, wanted, reduction="none")
        if self.kind == "z":
            each = each + 0.1 * logits.logsumexp(1) ** 2
        loss = (each * loss_mask.flatten()).sum() / loss_mask.sum()
        return {"logits": logits, "loss": loss} if self.kind == "dict" else loss


def batch(kind: str, number: int) -> dict[str, torch.Tensor]:
    """Prompts of different lengths do not count; with "empty", no position of the first piece in either mode does."""
    draw = torch.Generator().manual_seed(100 + number)
    length = 32 if kind == "ignored" else LENGTH
    tokens = torch.randint(1, VOCABULARY, (ROWS, length), generator=draw)
    counts = torch.arange(length) >= torch.tensor([[3 + number], [11]])
    if kind == "empty":
        counts = (torch.arange(length) >= 16) & (torch.arange(length) < 24)
        counts = counts.expand(ROWS, -1)
    targets = tokens.roll(-1, 1)
    if kind in ("ignored", "classes", "sum"):
        targets = torch.where(counts, targets, 0 if kind == "ignored" else -100)
    mask = {"bool": counts, "int": counts.long(), "weights": counts * torch.rand(ROWS, length, generator=draw) / 30}
    return {"tokens": tokens, "targets": targets, "loss_mask": mask.get(kind, counts.float())}


def told(kind: str, stage: int, mode: str) -> dict[str, Any]:
    made = settings(stage, 2, mode)
    if kind == "sum":
        made["zero"]["context"] |= {"reduction": "sum"}
    elif kind not in ("ignored", "classes"):
        made["zero"]["context"] |= {"count": "loss_mask"}
    return made


def loss_of(output: Any) -> torch.Tensor:
    output = output["loss"] if isinstance(output, dict) else output
    return output[0] if isinstance(output, tuple) else output


def check(kind: str, stage: int, mode: str) -> None:
    """Two steps beside one process."""
    model = Weighed(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = zero.initialize(model=Weighed(kind), config=told(kind, stage, mode))
    for number in range(2):
        optimizer.zero_grad()
        wanted, found = model(**batch(kind, number)), engine(**batch(kind, number))
        loss_of(wanted).backward()
        engine.backward(loss_of(found))
        size = max(1.0, loss_of(wanted).item())  # a sum is as large as what it sums
        assert abs(loss_of(found) - loss_of(wanted)) <= 1e-6 * size, (kind, stage, mode)
        for name, param in engine.module.named_parameters():
            apart = (safe_get_full_grad(param) - dict(model.named_parameters())[name].grad).abs().max()
            assert apart <= 1e-6 * (size if kind == "sum" else 1), (kind, stage, mode, name)
        if isinstance(wanted, tuple):
            assert found[1].dtype == wanted[1].dtype
            assert abs(found[1] - wanted[1]) <= 1e-6 * wanted[1]
        engine.step()
        optimizer.step()
    engine.destroy()


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("stage", "mode"),
    [(0, "ulysses"), (3, "ring"), *longer((0, "ring"), (3, "ulysses"), *itertools.product((1, 2), MODES))],
)
def test_it_is_that_of_one_process(stage: int, mode: str) -> None:
    for kind in LOSSES:
        check(kind, stage, mode)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("mode", MODES)
def test_what_it_counts_is_asked_for_before_the_first_step(mode: str) -> None:
    for kind in LOSSES:
        engine, *_ = zero.initialize(model=Weighed(kind, False), config=settings(3, 2, mode))
        before = torch.get_rng_state()
        with pytest.raises(RuntimeError, match=r"(?s)Weighed computes something else .*'loss' is .*\(loss, count\)"):
            engine(**batch(kind, 0))
        assert torch.equal(before, torch.get_rng_state()), kind
        engine.destroy()
