"""The promise: what would compute something else on pieces of sequences is named before the first step."""

from __future__ import annotations

import functools
import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from marks import needs
from ranks import listening
from sharing import LENGTH, ROWS, VOCABULARY, Lines, build, inputs, needs_transformers, settings
from torch import nn

import zero

pytestmark = pytest.mark.ranks(2)


class Convolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mixer = nn.Conv1d(4, 4, 3)

    def forward(self, tokens: torch.Tensor, position_ids: Any = None) -> torch.Tensor:
        return tokens


class Counting(Lines):
    """It counts positions by itself."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(tokens)


class GatedDeltaNet(Convolved):
    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.weight = nn.Parameter(torch.zeros(4))


def test_models_that_cannot_are_named_before_the_first_step() -> None:
    refused = [
        (Convolved(), r"'mixer', a Conv1d, convolves along the sequence"),
        (GatedDeltaNet(), r"a GatedDeltaNet, carries a state along the sequence"),
        (nn.LSTM(4, 4), r"an? LSTM, carries a state"),
        (Counting(), r"Counting.forward takes no position_ids, so each rank would count"),
    ]
    for model, text in refused:
        with pytest.raises(ValueError, match=text):
            zero.initialize(model=model, config=settings(1, 2, "ring"))
    for made, text in [
        ({"sequence_parallel_size": 3}, "sequence_parallel_size: got 3, wanted a divisor of world size 2: 1, 2"),
        ({"zero": {"context": {"mode": "stripes"}}}, "zero.context.mode: got 'stripes'"),
    ]:
        with pytest.raises(zero.ConfigError, match=text):
            zero.initialize(model=Lines(), config=settings(1, 2, "ring") | made)


@needs_transformers
def test_models_of_transformers_that_cannot_are_named() -> None:
    import transformers as hf

    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": VOCABULARY}
    classes = hf.BertForSequenceClassification(hf.BertConfig(**sizes, intermediate_size=48))
    own = {"d_model": 32, "d_ff": 48, "d_kv": 8, "num_layers": 1, "num_heads": 4, "vocab_size": VOCABULARY}
    gpt2 = {"n_layer": 1, "n_embd": 32, "n_head": 4, "n_positions": 64, "vocab_size": VOCABULARY}
    for model, text in [
        (
            hf.FalconForCausalLM(hf.FalconConfig(**sizes)),
            r"of FalconForCausalLM is its own, and not of transformers' reg",
        ),
        (
            hf.GPT2DoubleHeadsModel(hf.GPT2Config(**gpt2)),
            r"GPT2DoubleHeadsModel takes mc_token_ids, places in whole seq",
        ),
        (hf.T5ForConditionalGeneration(hf.T5Config(**own)), r"has an encoder and a decoder: two sequences"),
        (classes, r"has the loss 'ForSequenceClassification', which is of whole sequences"),
        (build("llama", output_attentions=True, attn_implementation="eager"), r"config has output_attentions"),
    ]:
        with pytest.raises(ValueError, match=text):
            zero.initialize(model=model, config=settings(1, 2, "ring"))
    engine, *_ = zero.initialize(model=build("llama", attention_dropout=0.1), config=settings(1, 2, "ring"))
    batch = inputs(0, "plain")
    with pytest.raises(ValueError, match=r"dropout 0.1 inside of it; set it to 0 in the model's config"):
        engine(**batch)
    engine.eval()
    assert torch.isfinite(engine(**batch).loss)
    for name, value in [("output_attentions", True), ("output_router_logits", True), ("logits_to_keep", 8)]:
        with pytest.raises(ValueError, match=f"{name} needs .*; leave it out"):
            engine(**batch, **{name: value})
    assert torch.isfinite(engine(**batch, logits_to_keep=0, output_router_logits=False).loss)
    for layer in engine.module.model.layers:
        layer.self_attn.forward = functools.partial(layer.self_attn.forward, indices=torch.zeros(1))
    with pytest.raises(ValueError, match="attention over a shared sequence: got indices, which it does not compute"):
        engine(**batch)
    for layer in engine.module.model.layers:
        del layer.self_attn.forward
    with pytest.raises(ValueError, match=r"got attention_mask of 4 dimensions; wanted \[rows, length\]"):
        engine(**batch, attention_mask=torch.ones(ROWS, 1, LENGTH, LENGTH))
    hole = torch.where(torch.arange(LENGTH) // 5 == 2, 0, 1).expand(ROWS, -1)
    with pytest.raises(ValueError, match="attention_mask of row 0 has padding before position 15, inside a document"):
        engine(**batch, attention_mask=hole)
    with pytest.raises(ValueError, match="no multiple of 4, and no argument of integers is called labels"):
        engine(input_ids=batch["input_ids"])
    for rows, borders in [(2, [0, LENGTH]), (1, [0, 7, 5, LENGTH]), (1, [0, LENGTH + 1]), (1, [1, LENGTH])]:
        made = {name: value[:rows] for name, value in batch.items()} | {"cu_seq_lens_q": torch.tensor(borders)}
        with pytest.raises(ValueError, match=rf"got cu_seq_lens_q \[{borders[0]}, .* with {rows} rows of 30; wanted"):
            engine(**made)
    engine.destroy()


@needs_transformers
@needs("peft")
def test_virtual_tokens_are_named() -> None:
    import peft

    for kind in (peft.PromptTuningConfig, peft.PrefixTuningConfig):
        model = peft.get_peft_model(build("llama"), kind(task_type="CAUSAL_LM", num_virtual_tokens=4))
        with pytest.raises(
            ValueError, match=f"{kind.__name__[:6].upper()}_TUNING puts virtual tokens in front of each"
        ):
            zero.initialize(model=model, config=settings(1, 2, "ring"))


def test_ranks_that_were_given_different_samples_are_named() -> None:
    engine, *_ = zero.initialize(model=Lines(), config=settings(1, 2, "ring"))
    tokens = torch.full((ROWS, 8), dist.get_rank())
    with pytest.raises(ValueError, match=r"without a tensor \[rows, length, ...\] that has elements"):
        engine(tokens[:, :0], tokens)
    with pytest.raises(RuntimeError, match=r"ranks 0, 1 share one sequence, and 1 were given another batch than 0"):
        engine(tokens, tokens)
    engine.destroy()


def test_a_model_whose_attention_stays_on_its_piece_is_named() -> None:
    class Deaf(Lines):
        def forward(self, tokens: torch.Tensor, targets: Any = None, position_ids: Any = None) -> torch.Tensor:
            return nn.functional.cross_entropy(self.head(self.embed(tokens)).flatten(0, 1), targets.flatten())

    engine, *_ = zero.initialize(model=Deaf(), config=settings(1, 2, "ring"))
    tokens = torch.zeros(ROWS, 8, dtype=torch.long)
    with pytest.raises(RuntimeError, match=r"no attention of Deaf has seen the whole sequence; let it call zero\.att"):
        engine(tokens, tokens)
    engine.destroy()


def test_numbers_that_a_loss_leaves_out_are_asked_for_by_name() -> None:
    class Own(Lines):
        def forward(self, tokens: torch.Tensor, y: torch.Tensor, position_ids: Any = None) -> torch.Tensor:
            return super().forward(tokens, y, position_ids)

    engine, *_ = zero.initialize(model=Own(), config=settings(1, 2, "ring"))
    tokens = torch.ones(ROWS, 8, dtype=torch.long)
    engine(tokens, tokens)
    with pytest.raises(
        ValueError, match="y has negative numbers; where they say what the loss leaves out, call it lab"
    ):
        engine(tokens, torch.where(torch.arange(8) < 3, -100, tokens))
    engine.destroy()


@needs_transformers
def test_a_model_that_shifts_labels_by_itself_or_tells_no_window_is_named() -> None:
    import transformers as hf

    class Shifting(hf.LlamaForCausalLM):
        def forward(self, input_ids: Any, labels: Any = None, position_ids: Any = None, **more: Any) -> Any:
            logits = self.lm_head(self.model(input_ids, position_ids=position_ids, **more).last_hidden_state)
            return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    model, batch = build("llama"), inputs(0, "plain")
    model.__class__ = Shifting
    engine, *_ = zero.initialize(model=model, config=settings(1, 2, "ring"))
    with pytest.raises(
        ValueError, match="whether Shifting shifts its labels is not known; let it take shift_labels, call the arg"
    ):
        engine(**batch)
    engine.destroy()
    engine, *_ = zero.initialize(model=build("llama", sliding_window=4), config=settings(1, 2, "ring"))
    with pytest.raises(RuntimeError, match="has layers with a sliding window, and its attention is not told of it"):
        engine(**batch)
    engine.destroy()


@pytest.mark.parametrize(("mode", "what"), [("ring", "keys and values"), ("ulysses", "heads of attention")])
def test_a_rank_that_waits_for_attention_of_one_that_raised_is_told_why(mode, what) -> None:
    engine, *_ = zero.initialize(model=Lines(), config=settings(1, 2, mode))
    tokens = torch.ones(ROWS, 8, dtype=torch.long)
    engine(tokens, tokens)
    own = dist.get_rank() == 1
    if own:
        engine.module.mix.register_forward_pre_hook(refuse)
    with pytest.raises(ValueError if own else RuntimeError, match="bad batch") as error:
        engine.backward(engine(tokens, tokens))
    assert own or ("rank 1 raised ValueError" in str(error.value) and what in str(error.value))
    engine.destroy()


def refuse(module: Any, args: Any) -> None:
    raise ValueError("bad batch")


@needs_transformers
def test_the_plan_beside_reality_sees_pieces() -> None:
    with listening(logging.INFO) as said:
        engine, *_ = zero.initialize(model=build("llama"), config=settings(1, 2, "ring", zero={"plan": True}))
        for number in range(3):
            engine.backward(engine(**inputs(number, "packed")).loss)
            engine.step()
        engine.destroy()
    told = [line for line in said if line.startswith("plan and reality of step 3")]
    assert len(told) == (dist.get_rank() == 0)
    assert not [line for line in said if "not planned" in line]
