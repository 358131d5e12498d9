"""The promise: one call each tiles loss and MLPs of a model of Transformers, which trains as before, at every stage."""

from __future__ import annotations

import copy
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from models import batch
from scenario import Model, Record, differences, run
from torch import Tensor, nn
from transformer_models import tiny

import zero

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from live import LiveBytes

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
IGNORED = -100


def make(family: str = "Llama", head: str = "ForCausalLM", vocabulary: int = 17, **more: Any) -> Any:
    """A small model."""
    return tiny(f"{family}{head}", vocab_size=vocabulary, **SIZES, **more)


def rows(vocabulary: int = 17, length: int = 40) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, labels of which some count for nothing, and the same shifted."""
    torch.manual_seed(6)
    tokens = torch.randint(vocabulary, (2, length))
    labels = tokens.clone()
    labels[0, :7] = IGNORED
    return tokens, labels, nn.functional.pad(labels, (0, 1), value=IGNORED)[:, 1:].contiguous()


TOKENS, LABELS, SHIFTED = rows()


@pytest.mark.parametrize(
    "given",
    [
        {"labels": LABELS},
        {"labels": LABELS, "num_items_in_batch": 37},
        {"shift_labels": SHIFTED},
        {"labels": SHIFTED, "shift_labels": SHIFTED, "num_items_in_batch": torch.tensor(37)},
        {"labels": LABELS, "return_dict": False},
    ],
    ids=lambda given: "+".join(given),
)
@pytest.mark.parametrize("tied", [False, True])
def test_loss_and_gradients_are_those_of_whole_logits(given: dict[str, Any], tied: bool) -> None:
    model = make(tie_word_embeddings=tied).double()
    tiled = zero.tile_mlp(zero.tile_loss(copy.deepcopy(model)), "LlamaMLP", positions=16)
    found, logits = tiled(TOKENS, **given)[0], model(TOKENS).logits
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), SHIFTED.flatten(), reduction="sum")
    loss = loss / given.get("num_items_in_batch", (SHIFTED != IGNORED).sum())
    torch.testing.assert_close(found, loss, rtol=1e-13, atol=0)
    ours, theirs = (torch.autograd.grad(each, [*of.parameters()]) for each, of in ((found, tiled), (loss, model)))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


def test_without_labels_and_in_copies_all_is_as_before() -> None:
    model = make().eval()
    tiled = zero.tile_loss(copy.deepcopy(model))
    for each in (tiled, copy.deepcopy(tiled), pickle.loads(pickle.dumps(tiled))):
        assert torch.equal(each(TOKENS, labels=LABELS).loss, tiled(TOKENS, labels=LABELS).loss)
        assert each(TOKENS, labels=LABELS).logits is None
        assert torch.equal(each(TOKENS).logits, model(TOKENS).logits)
        assert torch.equal(each.loss_function(model(TOKENS).logits, LABELS, 17), model(TOKENS, labels=LABELS).loss)
    assert torch.equal(tiled.generate(TOKENS, max_new_tokens=3), model.generate(TOKENS, max_new_tokens=3))


def test_an_adapter_around_the_model() -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(make(), peft.LoraConfig(target_modules=["q_proj", "up_proj"]))
    plain = model(TOKENS, labels=LABELS).loss
    out = zero.tile_loss(model)(input_ids=TOKENS, labels=LABELS)
    assert out.logits is None
    torch.testing.assert_close(out.loss, plain)


def trained(stage: int, tied: bool, *calls: Any, **json: Any) -> Record:
    def build() -> nn.Module:
        model = make(tie_word_embeddings=tied)
        for call in calls:
            call(model)
        return model

    def step(engine: Any, number: int, inputs: Any) -> Tensor:
        engine.backward(loss := engine(input_ids=inputs[0], labels=inputs[0]).loss)
        return loss

    apart = 0 if "sequence_parallel_size" in json else 1000  # between the samples of ranks
    data = Model(build, lambda number, part: batch(apart * part + number, 2))
    return run(data, {"stage": stage, "cut": True, **json}, loop=step)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("stage", "tied"), [(0, True), (1, False), (2, True), (3, True), (3, False)])
def test_training_has_the_bits_of_plain_training(stage: int, tied: bool) -> None:
    """In one slice; more are in tests/recompute."""
    recompute = {"zero": {"recompute": {"modules": ["LlamaDecoderLayer"], "policy": "selective"}}}
    calls = zero.tile_loss, lambda model: zero.tile_mlp(model, "LlamaMLP")
    for more in ({}, recompute):
        assert differences(trained(stage, tied, *calls, **more), trained(stage, tied)) == []


@pytest.mark.ranks(2)
def test_ranks_that_share_a_sequence_train_so_too() -> None:
    """Each has `shift_labels` of its piece. The factor of its loss is no power of two, so gradients are rounded."""
    more = {"sequence_parallel_size": 2, "train_batch_size": 2}
    calls = zero.tile_loss, lambda model: zero.tile_mlp(model, "LlamaMLP")
    ours, theirs = trained(3, True, *calls, **more), trained(3, True, **more)
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-6)
    assert ours.norms == pytest.approx(theirs.norms, rel=1e-6)


def test_logits_are_never_whole() -> None:
    tokens, labels, _ = rows(4000, 1024)
    whole, peaks = 4 * tokens.numel() * 4000, []
    for change in (nn.Identity(), zero.tile_loss):
        model = change(make(vocabulary=4000))
        with LiveBytes([tokens, labels, *model.parameters()]) as live:
            model(tokens, labels=labels).loss.backward()
        peaks.append(live.peak)
    assert peaks[0] > 2 * whole, "the count of the plain one misses something"
    assert peaks[1] < whole


@pytest.mark.parametrize("family", ["Gemma2", "Granite", "Cohere"])
def test_a_model_that_computes_with_its_logits_says_so(family: str) -> None:
    model = zero.tile_loss(make(family))
    with pytest.raises(TypeError, match=r"unsupported operand type\(s\) for .: 'functools.partial' and 'float'"):
        model(TOKENS, labels=LABELS)
    assert model(TOKENS).logits.shape == (2, 40, 17)


def test_other_heads_and_losses_are_named() -> None:
    with pytest.raises(ValueError, match=r"a head Linear and <function ForMaskedLMLoss"):
        zero.tile_loss(make("Bert", "ForMaskedLM"))
    for other in (nn.Linear(2, 2), nn.Identity(), make(head="Model")):
        with pytest.raises(ValueError, match=r"tile_loss: got a head .* and None; wanted Linear and ForCausalLMLoss"):
            zero.tile_loss(other)
