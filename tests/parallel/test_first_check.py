"""The promise: what a model takes from other positions than by attention is named before the first step, at no cost.

A short part of the first batch runs whole and on pieces, and nothing of the model or of the run is changed by it.
"""

from __future__ import annotations

import random
import re
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from marks import longer
from sharing import ROWS, SIZES, VOCABULARY, Lines, build, inputs, needs_transformers, settings
from torch import nn
from transformer_models import NO_DROPOUT, tiny

import zero
from zero.utils import safe_get_full_fp32_param

pytestmark = pytest.mark.ranks(2)


def theirs(kind: str) -> Any:
    sizes = SIZES | {"vocab_size": VOCABULARY, "max_position_embeddings": 66, "pad_token_id": 0}
    if kind == "esm":
        more = {"position_embedding_type": "rotary", "token_dropout": True, "mask_token_id": 3}
        return tiny("EsmForMaskedLM", **sizes, **NO_DROPOUT, **more)
    if kind == "mobilebert":
        more = {"embedding_size": 16, "trigram_input": True, "intra_bottleneck_size": 32, "true_hidden_size": 32}
        return tiny("MobileBertForMaskedLM", **sizes, **NO_DROPOUT, **more)
    return tiny("MixtralForCausalLM", **sizes, num_local_experts=4, num_experts_per_tok=2, num_key_value_heads=4)


def raised(engine: Any, given: dict[str, torch.Tensor]) -> str:
    """What the first forward raises: the same on both ranks, again and again."""
    texts: list[Any] = [None, None]
    for _ in range(2):
        with pytest.raises(RuntimeError) as error:
            engine(**given)
    dist.all_gather_object(texts, str(error.value))
    assert texts[0] == texts[1]
    return texts[0]


@needs_transformers
@pytest.mark.parametrize("mode", ["ring", *longer("ulysses")])
def test_what_is_taken_from_other_positions_is_named(mode: str) -> None:
    """A share of masked tokens that scales a row, neighbours in an embedding, a loss of routers."""
    given = inputs(0, "plain")
    given["input_ids"][0, 5:9] = 3  # masks
    for kind, text in [
        ("esm", r"EsmForMaskedLM computes .* 'loss' is .*module whose output differs is 'esm.embeddings', EsmEmbed"),
        ("mobilebert", "The first module whose output differs is 'mobilebert.embeddings"),
        ("mixtral", "'loss' is|'aux_loss' is .* of the whole. No output before it differs: leave it out"),
    ]:
        model = theirs(kind)
        if kind == "mixtral":
            forward = model.forward
            model.forward = lambda *args, **more: forward(*args, **more, output_router_logits=True)  # noqa: B023
        engine, *_ = zero.initialize(model=model, config=settings(0, 2, mode))
        assert re.search(text, raised(engine, given)), kind
        engine.destroy()


@needs_transformers
def test_a_loss_function_that_shifts_by_itself_is_named() -> None:
    def shifting(logits: Any, labels: Any, vocab_size: int, **more: Any) -> Any:
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    def told(logits: Any, labels: Any, vocab_size: int, shift_labels: Any = None, **more: Any) -> Any:
        labels = nn.functional.pad(labels[:, 1:], (0, 1), value=-100) if shift_labels is None else shift_labels
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    model, given = build("llama"), inputs(0, "plain")
    wanted = model(**given).loss.item()
    model.loss_function = shifting
    engine, *_ = zero.initialize(model=model, config=settings(1, 2, "ring"))
    with pytest.raises(
        ValueError, match="whether the loss_function of LlamaForCausalLM shifts its labels is not known"
    ):
        engine(**given)
    model.loss_function = told
    assert abs(engine(**given).loss.item() - wanted) < 1e-6
    engine.destroy()
    model.loss_function = shifting
    named = settings(1, 2, "ring", zero={"context": {"mode": "ring", "cut": ["input_ids", "labels"]}})
    engine, *_ = zero.initialize(model=model, config=named)
    assert "A loss that shifts labels by itself has none at the border" in raised(engine, given)
    engine.destroy()


class Marked(Lines):
    """The mean over `marks`, which the engine is not told of; all the forward changes is in `state`."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.seen, self.state = 0, [], nn.Module()
        self.register_buffer("mean", torch.zeros(()))
        self.norm = nn.BatchNorm1d(VOCABULARY, affine=False)

    def forward(self, tokens: Any, targets: Any, marks: Any = None, position_ids: Any = None) -> Any:  # type: ignore[override]
        self.calls += 1
        self.seen.append(tokens.shape)
        self.cached = tokens
        self.mean += 1
        random.random(), torch.rand(1)
        logits = super().forward(tokens, None, position_ids).flatten(0, 1)
        if self.training:
            self.norm(logits.detach().float())
        each = nn.functional.cross_entropy(logits, targets.flatten(), reduction="none")
        return each.mean() if marks is None else (each * marks.flatten()).sum() / marks.sum()


def tokens_of(length: int, rows: int = ROWS) -> dict[str, torch.Tensor]:
    tokens = torch.randint(VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(1))
    return {"tokens": tokens, "targets": tokens.roll(-1, 1)}


@pytest.mark.parametrize("stage", [0, *longer(1, 2), 3])
def test_nothing_is_changed_by_it(stage: int) -> None:
    """Neither the model nor random numbers, nor the losses, the micro-batches and the order of what is gathered."""
    found = []
    for check in (False, True):
        made = settings(stage, 2, "ring", zero={"context": {"mode": "ring", "check": check}})
        made["zero"]["recompute"] = {"modules": ["head"]}
        torch.manual_seed(3), random.seed(3)
        model, runs = Marked(), []
        model.register_forward_hook(lambda *_: runs.append(torch.is_grad_enabled()))  # noqa: B023
        engine, *_ = zero.initialize(model=model, config=made)
        losses = []
        for _ in range(3):
            losses.append(engine(**tokens_of(32)))
            engine.backward(losses[-1])
            engine.step()
        assert runs == [False, False, False] * check + [True] * 3
        buffers = {name: buffer.tolist() for name, buffer in model.named_buffers()}
        order = engine._training._sharded.prefetcher.forecast.order
        counters = (
            model.calls,
            model.seen,
            model.cached.tolist(),
            model.training,
            engine.micro_steps,
            engine.global_steps,
        )
        weights = [safe_get_full_fp32_param(param).tolist() for param in model.parameters()]
        drawn = random.random(), torch.rand(1).item()
        found.append(([each.item() for each in losses], buffers, order, counters, weights, drawn))
        engine.destroy()
    assert found[0] == found[1]


@pytest.mark.parametrize("mode", ["ulysses", *longer("ring")])
def test_marks_are_found_wherever_they_begin(mode: str) -> None:
    """Behind a long prompt, nowhere yet, and with one row; a loss that is right passes; so does one that is wanted."""
    for rows, first in [(ROWS, 500), (ROWS, 0), (1, 0), (1, 570)]:
        given = tokens_of(600, rows)
        given["tokens"], given["marks"] = given["tokens"], (torch.arange(600) >= first).expand(rows, -1)
        model = Marked()
        model.place = nn.Embedding(600, 16)
        engine, *_ = zero.initialize(model=model, config=settings(0, 2, mode))
        assert "'loss' is" in raised(engine, given)
        engine.destroy()
    engine, *_ = zero.initialize(model=Marked(), config=settings(0, 2, mode))
    with torch.no_grad():
        engine(**tokens_of(32))
    text = raised(
        engine, tokens_of(32) | {"marks": torch.ones(ROWS, 32)}
    )  # what was tried without gradients is no step
    assert "taken for the mean over targets >= 0" in text
    engine.destroy()
    engine, *_ = zero.initialize(
        model=Marked(), config=settings(0, 2, mode, zero={"context": {"mode": mode, "check": False}})
    )
    assert torch.isfinite(engine(**tokens_of(32), marks=torch.ones(ROWS, 32)))
    engine.destroy()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("stage", [*longer(0, 2), 3])
def test_ranks_without_a_micro_batch_follow(stage: int) -> None:
    """Two of four ranks have none in the first step; and are told where the comparison fails."""
    made = settings(stage, 2, "ulysses") | {"managed_gradient_accumulation": False}
    made.pop("gradient_accumulation_steps", None)
    idle = dist.get_rank() > 1
    for marked in (False, True):
        engine, *_ = zero.initialize(model=Marked(), config=made)
        more = {"marks": torch.ones(ROWS, 32)} if marked else {}
        expected = pytest.raises(RuntimeError, match="taken for the mean over targets") if marked else nullcontext()
        with expected:
            for number in range(2):
                if number or not idle:
                    engine.backward(engine(**tokens_of(32), **more))
                engine.step()
        assert len(engine.module.seen) == (2, 1)[idle] * (not marked), "the comparison leaves no trace"
        engine.destroy()


@pytest.mark.parametrize("mode", ["ring", *longer("ulysses")])
@pytest.mark.parametrize(
    "section",
    [{"bf16": {"enabled": True}}, *longer({"fp16": {"enabled": True}}, {"torch_autocast": {"enabled": True}})],
)
def test_rounding_is_told_from_a_difference(section: dict[str, Any], mode: str) -> None:
    """In 16 bits, of which a result has other ones each time that it is put together in another order."""
    for seed in range(8):
        engine, *_ = zero.initialize(model=Marked(), config=settings(3, 2, mode) | section)
        torch.manual_seed(seed)
        tokens = torch.randint(VOCABULARY, (ROWS, 64))
        engine(tokens, tokens.roll(-1, 1))
        engine.destroy()
    engine, *_ = zero.initialize(model=Marked(), config=settings(3, 2, mode) | section)
    raised(engine, tokens_of(64) | {"marks": torch.arange(64).expand(ROWS, -1) < 9})
    engine.destroy()
