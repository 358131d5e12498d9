"""The promise: models of Hugging Face's `transformers` train as they are, with equal losses on every stage.

They are built from a configuration, so nothing is downloaded. They are called with keywords, the loss is read off the
object that they return, and they generate text between steps while their parameters are cut.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from marks import longer, needs
from models import config
from oracle import Training, backward, near
from scenario import Model, Record, differences, scenario
from transformer_models import GPT2, tiny

import zero
from zero import log

pytestmark = needs("transformers")

STEPS = 6
VOCABULARY = 64
KINDS = (pytest.param("gpt2", marks=pytest.mark.long), "llama", "mixtral")


TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
SIZES = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "max_position_embeddings": 32}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", {**GPT2, "n_positions": 32}),
    "llama": ("LlamaForCausalLM", SIZES),
    "bloom": ("BloomForCausalLM", {"hidden_size": 32, "n_layer": 2, "n_head": 4, "hidden_dropout": 0}),
    "mixtral": ("MixtralForCausalLM", {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2}),
}


def build(kind: str, checkpointing: bool = False) -> Any:
    """Two layers of width 32, seeded: tied embeddings, grouped queries, four experts."""
    name, own = MODELS[kind]
    model = tiny(name, vocab_size=VOCABULARY, **own, **TOKENS)
    if checkpointing:
        model.gradient_checkpointing_enable()
    return model


def batch(step: int, rank: int) -> torch.Tensor:
    """Tokens [2, 8] in runs that count up, another run on every rank."""
    generator = torch.Generator().manual_seed(step % 5)
    start = torch.randint(3, VOCABULARY - 8, (2, 2), generator=generator)[rank % 2]
    return start[:, None] + torch.arange(8)


def tokens(number: int, rank: int) -> tuple[torch.Tensor]:
    return (batch(number, rank),)


def by_keywords(engine: Any, number: int, inputs: Any) -> torch.Tensor:
    loss = engine(input_ids=inputs[0], labels=inputs[0]).loss
    engine.backward(loss)
    return loss


def is_tied(engine: Any) -> bool:
    return engine.module.get_input_embeddings().weight is engine.module.get_output_embeddings().weight


def trained(pool: Any, kind: str, stage: int, checkpointing: bool = False, **more: Any) -> list[Record]:
    model = Model(functools.partial(build, kind, checkpointing), tokens)
    more = {"loop": by_keywords, "keep": is_tied, "gradient_clipping": 1.0, **more}
    return scenario(pool, model, stage, steps=STEPS, **more)


def micro(model: Any, number: int, rank: int, world: int, factor: float) -> torch.Tensor:
    tokens = batch(number, rank)
    return backward(model(input_ids=tokens, labels=tokens).loss, factor)


def assert_same(found: list[Record], wanted: list[Record]) -> None:
    assert [differences(*pair, "losses", "weights") for pair in zip(found, wanted, strict=True)] == [[]] * 2


@pytest.mark.parametrize("kind", KINDS)
def test_all_stages_have_equal_losses(pool, kind):
    one, two = first = trained(pool, kind, 0)
    assert one.losses[-1] < one.losses[0], "nothing was learnt"
    assert one.losses != two.losses, "ranks saw the same data"
    for stage in (1, 2, 3) if kind == "llama" else (3,):
        found = trained(pool, kind, stage)
        assert_same(found, first)
        assert found[0].seen == [kind == "gpt2"], "tied embeddings"


def test_a_model_agrees_with_plain_torch(pool):
    training = Training(2, STEPS, clipping=1.0, build=lambda: build("gpt2"), micro=micro)
    one, two = trained(pool, "gpt2", 3)
    assert near(one.weights, training, losses=list(zip(one.losses, two.losses, strict=True)))


def test_gradient_checkpointing_changes_no_bit(pool):
    assert_same(trained(pool, "llama", 3, checkpointing=True), trained(pool, "llama", 0, checkpointing=True))


@pytest.mark.parametrize(("kind", "block"), [("llama", "LlamaDecoderLayer"), *longer(("bloom", "BloomBlock"))])
def test_recomputation_changes_no_bit_though_the_model_keeps_a_cache(pool, kind, block):
    """With a key-value cache, which models have by default: without recomputation, then with."""
    ways = [(0, {"every": 2}), (3, {}), (3, {"policy": "selective"}), (3, {"policy": "auto", "budget": "20 KB"})]
    base = trained(pool, kind, 0)
    for stage, way in ways:
        assert_same(trained(pool, kind, stage, zero={"recompute": {"modules": [block], **way}}), base)


def test_a_filled_cache_is_refused_and_an_empty_one_warned_of(caplog):
    log._said.cache_clear()
    model, tokens = build("llama"), batch(0, 0)
    more = {"zero": {"recompute": {"modules": ["LlamaDecoderLayer"]}}}
    engine, *_ = zero.initialize(model=model, config=config(0, 1, **more))
    with torch.no_grad():
        filled = engine(input_ids=tokens).past_key_values
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="zero"):
        assert engine(input_ids=tokens).past_key_values.get_seq_length() == 0
        engine(input_ids=tokens)
    assert [record.getMessage().partition(" that")[0] for record in caplog.records] == ["a LlamaDecoderLayer"]
    with pytest.raises(
        ValueError, match="a LlamaDecoderLayer that is recomputed is given a key-value cache that is fi"
    ):
        engine(input_ids=tokens, past_key_values=filled)
    engine.destroy()


def texts(engine: Any, number: int) -> list[list[int]]:
    """Of another length on every rank."""
    length = 3 + 2 * engine.global_rank
    given = {"input_ids": batch(number, engine.global_rank)[:, :-5], "do_sample": False}
    engine.eval()
    made = engine.generate(**given, max_new_tokens=length, min_new_tokens=length)
    engine.train()
    return made.tolist()


def test_generation_between_steps_sees_the_current_weights(pool):
    whole, cut = (trained(pool, "llama", stage, watch=texts) for stage in (0, 3))
    assert_same(cut, whole)
    assert [record.seen for record in cut] == [record.seen for record in whole]
    assert len(cut[0].seen[0][0]) + 2 == len(cut[1].seen[0][0]), "ranks made texts of the same length"
    assert cut[0].seen[0] != cut[0].seen[5], "nothing was learnt between two texts of the same batch"


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [2, 3])
def test_saving_as_hugging_face_does_works_and_resizing_says_when(stage, tmp_path):
    import transformers as hf

    engine, *_ = zero.initialize(model=build("gpt2"), config=config(stage, 2))
    given = tokens(0, dist.get_rank())
    by_keywords(engine, 0, given)
    engine.step()
    state = {name: value.clone() for name, value in engine.module_state_dict().items()}
    if engine.global_rank == 0:
        engine.module.save_pretrained(tmp_path, state_dict=dict(state))
        read = hf.GPT2LMHeadModel.from_pretrained(tmp_path).state_dict()
        assert all(torch.equal(value, state[name]) for name, value in read.items())
    if stage == 3 and engine.global_rank == 0:
        with pytest.raises(RuntimeError, match=r"engine.module_state_dict\(\) has the weights whole"):
            engine.module.save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match=r"(?i)resize.*before initialize\(\)|before initialize\(\).*resize"):
        with zero.GatheredParameters(engine.module.parameters()):
            engine.module.resize_token_embeddings(VOCABULARY + 8, mean_resizing=False)
        by_keywords(engine, 0, given)
        engine.step()
