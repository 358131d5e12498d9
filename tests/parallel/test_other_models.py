"""The promise: models that count or turn positions in ways of their own share sequences as one process would."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from marks import longer
from ranks import listening
from sharing import build, check, inputs, needs_transformers, settings
from torch import nn

import zero
from zero.config.sections import Context
from zero.core.world import world_of_one
from zero.parallel import ring
from zero.parallel.huggingface import SharedModel
from zero.parallel.shared import SharedSequences

pytestmark = needs_transformers


@pytest.mark.ranks(2)
@pytest.mark.parametrize("mode", ["ring", "ulysses"])
@pytest.mark.parametrize(
    ("kind", "form"),
    [
        ("roberta", "padded"),
        ("opt", "left"),
        ("longrope", "plain"),
        *longer(
            ("roberta", "plain"),
            ("opt", "plain"),
            ("gpt2", "left"),
            ("dynamic", "plain"),
            ("latent", "packed"),
            ("latent", "left"),
            ("seed", "plain"),
            ("both ways", "padded"),
        ),
    ],
)
def test_its_numbers_are_those_of_one_process(kind: str, form: str, mode: str) -> None:
    check(kind, 2, mode, 1, form, {})


@pytest.mark.ranks(2)
def test_documents_that_one_process_does_not_see_are_said() -> None:
    """With a cache, or beside a mask, it looks for no packed rows."""
    batch = inputs(0, "packed")
    masked = {**batch, "attention_mask": torch.ones_like(batch["input_ids"])}
    for use_cache, given, wanted in [(False, batch, 0), (True, batch, 1), (False, masked, 1)]:
        with listening() as said:
            model = build("llama")
            model.config.use_cache = use_cache
            engine, *_ = zero.initialize(model=model, config=settings(1, 2, "ring"))
            engine(**given), engine(**given)
            engine.destroy()
        told = [line for line in said if "inside of documents; in one process that of LlamaForCausalLM would" in line]
        assert len(told) == wanted * (dist.get_rank() == 0)


def test_masks_that_are_not_shared_are_named() -> None:
    from transformers import masking_utils as masks

    causal, window = masks.causal_mask_function, masks.sliding_window_causal_mask_function(4)
    model = SharedModel(nn.Identity(), lambda: False)
    packed = masks.packed_sequence_compatibility_function(window, torch.zeros(1, 4), torch.zeros(1, 4))
    for known in (causal, window, packed, masks.bidirectional_mask_function):
        model.asks_mask(known, None)
    for other, name in [
        (masks.or_masks(causal, lambda *places: True), "or_masks, test_masks_that_are_not_shared_are_named"),
        (masks.chunked_causal_mask_function(4, torch.zeros(1)), "chunked_overlay"),
        (masks.sliding_window_bidirectional_mask_function(4), "sliding_window_bidirectional_overlay"),
    ]:
        with pytest.raises(ValueError, match=f"got a mask made by {name}; wanted one that is causal or"):
            model.asks_mask(other, None)


@pytest.mark.ranks(2)
def test_attention_that_is_not_of_its_mask_is_named() -> None:
    engine, *_ = zero.initialize(model=build("llama"), config=settings(1, 2, "ring"))
    for layer in engine.module.model.layers:
        layer.self_attn.is_causal = False
    with pytest.raises(ValueError, match="LlamaAttention has is_causal=False, and a mask was asked for that is causal"):
        engine(**inputs(0, "plain"))
    engine.module.config.is_causal = False  # so are the masks of each forward from now on
    engine(**inputs(0, "plain"))
    engine.destroy()


@pytest.mark.ranks(2)
def test_what_was_on_its_way_when_attention_failed_is_not_taken_for_what_comes_later(monkeypatch: Any) -> None:
    engine, *_ = zero.initialize(model=build("llama"), config=settings(1, 2, "ring"))
    wanted = engine(**inputs(1, "plain")).loss.item()
    right = ring._forward
    for number in (0, 2):  # its calls that come before
        calls = itertools.count()
        monkeypatch.setattr(ring, "_forward", lambda *given: 1 / 0 if next(calls) == number else right(*given))  # noqa: B023
        with pytest.raises(ZeroDivisionError):
            engine(**inputs(0, "plain"))
        monkeypatch.undo()
        assert engine(**inputs(1, "plain")).loss.item() == wanted
    engine.destroy()
    engine, *_ = zero.initialize(model=build("llama"), config=settings(1, 2, "ulysses"))
    assert abs(engine(**inputs(1, "plain")).loss.item() - wanted) < 1e-6
    engine.destroy()


def test_batches_that_come_cut_are_refused_where_positions_do_not_count_from_0() -> None:
    with pytest.raises(
        ValueError, match="OPTForCausalLM counts positions by tokens or a mask, and batches that come cut"
    ):
        SharedSequences(build("opt"), world_of_one().point(), Context(), cuts=False, training_only=True)
