"""The promise: models of Hugging Face's `transformers` train as they are, with equal losses on every stage.

They are built from a configuration, so nothing is downloaded. They are called with keywords, the loss is read off the
object that they return, and they generate text between steps while their parameters are cut.
"""

from __future__ import annotations

import importlib.util
import itertools
import logging
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from marks import longer
from models import config
from oracle import Training, backward, near

import zero
from zero import log

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed (it needs Python 3.11)"
)

STEPS = 8
VOCABULARY = 64
KINDS = (pytest.param("gpt2", marks=pytest.mark.long), "llama", "mixtral")
OPTIMIZER = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}


def build(kind: str) -> Any:
    """Two layers of width 32, seeded: tied embeddings, grouped queries, four experts, pictures."""
    os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1", TRANSFORMERS_VERBOSITY="error")
    import transformers as hf

    torch.manual_seed(5)
    if kind == "gpt2":
        sizes = {"n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 32, "vocab_size": VOCABULARY}
        return hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, **TOKENS, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))
    sizes = {
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32,
        "vocab_size": VOCABULARY,
    }
    if kind == "llama":
        return hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, **TOKENS))
    if kind == "bloom":
        sizes = {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": VOCABULARY, "hidden_dropout": 0}
        return hf.BloomForCausalLM(hf.BloomConfig(**sizes, **TOKENS))
    if kind == "blip2":
        small = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
        text = {"hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4, **TOKENS}
        made = hf.Blip2Config(
            vision_config={**small, "image_size": 8, "patch_size": 4},
            qformer_config={**small, "encoder_hidden_size": 16, "vocab_size": VOCABULARY},
            text_config=hf.OPTConfig(**text, vocab_size=VOCABULARY, word_embed_proj_dim=32, dropout=0),
            num_query_tokens=SEES,
            image_token_index=IMAGE,
        )
        return hf.Blip2ForConditionalGeneration(made)
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    return hf.MixtralForCausalLM(hf.MixtralConfig(**sizes, **experts, **TOKENS))


SEES, IMAGE = 4, 63  # tokens for one picture, and which
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def batch(step: int, rank: int) -> torch.Tensor:
    """Tokens [2, 8] in runs that count up, another run on every rank."""
    generator = torch.Generator().manual_seed(step % 5)
    start = torch.randint(3, VOCABULARY - 8, (2, 2), generator=generator)[rank % 2]
    return start[:, None] + torch.arange(8)


def train(kind: str, stage: int, checkpointing: bool, recompute: dict[str, Any] | None = None) -> dict[str, Any]:
    model, rank, world = build(kind), dist.get_rank(), dist.get_world_size()
    if checkpointing:
        model.gradient_checkpointing_enable()
    more = {"zero": {"recompute": recompute}} if recompute else {}
    settings = config(stage, world, optimizer=OPTIMIZER, gradient_clipping=1.0, **more)
    engine, *_ = zero.initialize(model=model, config=settings)
    losses = []
    for step in range(STEPS):
        tokens = batch(step, rank)
        output = engine(input_ids=tokens, labels=tokens)
        engine.backward(output.loss)
        engine.step()
        losses.append(output.loss.item())
    found = {"losses": losses, "tied": model.get_input_embeddings().weight is model.get_output_embeddings().weight}
    engine.destroy()
    return {**found, "params": {name: param.detach() for name, param in model.named_parameters()}}


def train_all(kind: str, checkpointing: bool, stages: list[int]) -> list[dict[str, Any]]:
    return [train(kind, stage, checkpointing) for stage in stages]


def micro(model: Any, number: int, rank: int, world: int, factor: float) -> torch.Tensor:
    tokens = batch(number, rank)
    return backward(model(input_ids=tokens, labels=tokens).loss, factor)


def assert_equal(found: dict[str, Any], first: dict[str, Any], what: str) -> None:
    assert found["losses"] == first["losses"], f"{what}: other losses than stage 0"
    for name, value in first["params"].items():
        assert torch.equal(found["params"][name], value), f"{what}: '{name}' differs from stage 0"


@pytest.mark.parametrize("kind", KINDS)
def test_all_stages_have_equal_losses(pool, kind):
    ranks = pool.run(2, train_all, kind, False, [0, 1, 2, 3])
    for stages in ranks:
        for stage, found in enumerate(stages):
            assert_equal(found, stages[0], f"stage {stage}")
        assert stages[0]["losses"][-1] < stages[0]["losses"][0], "nothing was learnt"
        assert stages[3]["tied"] is (kind == "gpt2")
    assert ranks[0][0]["losses"] != ranks[1][0]["losses"], "ranks saw the same data"


def test_a_model_agrees_with_plain_torch(pool):
    training = Training(2, STEPS, clipping=1.0, build=lambda: build("gpt2"), micro=micro)
    ours = pool.run(2, train_all, "gpt2", False, [3])
    losses = zip(*(rank[0]["losses"] for rank in ours), strict=True)
    assert near(ours[0][0]["params"], training, losses=list(losses))


def test_gradient_checkpointing_changes_no_bit(pool):
    for stages in pool.run(2, train_all, "llama", True, [0, 3]):
        assert_equal(stages[1], stages[0], "stage 3 with checkpointing")


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("kind", "block"), [("llama", "LlamaDecoderLayer"), *longer(("bloom", "BloomBlock"))])
def test_recomputation_changes_no_bit_though_the_model_keeps_a_cache(kind, block):
    """With a key-value cache, which models have by default: without recomputation, then with."""
    ways = [{}, {"every": 2}, {"policy": "selective"}, {"policy": "auto", "budget": "20 KB"}]
    base = train(kind, 0, False)
    for stage, way in itertools.product((0, 3), ways):
        assert_equal(train(kind, stage, False, {"modules": [block], **way}), base, "recomputed")


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


def generate(kind: str, stage: int) -> list[Any]:
    """Losses, and texts of different lengths that ranks make between steps; what a forward method sees in pictures."""
    model, rank, world = build(kind), dist.get_rank(), dist.get_world_size()
    engine, *_ = zero.initialize(model=model, config=config(stage, world, optimizer=OPTIMIZER))
    found: list[Any] = []
    given: dict[str, Any] = {}
    if kind == "blip2":
        zero.register_forward_method(model, "get_image_features")
        given["pixel_values"] = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(rank))
    for step in range(3):
        tokens = torch.cat([torch.full((2, len(given) * SEES), IMAGE), batch(step, rank)], dim=1)
        loss = engine(input_ids=tokens, labels=tokens, **given).loss
        engine.backward(loss)
        engine.step()
        engine.eval()
        length = {"max_new_tokens": 3 + 2 * rank, "min_new_tokens": 3 + 2 * rank}
        made = engine.generate(input_ids=tokens[:, :-5], **given, **length, do_sample=False)
        if given:
            found.append(model.get_image_features(**given).pooler_output.sum().item())
        engine.train()
        found += [loss.item(), made.tolist()]
    engine.destroy()
    model.eval()
    assert model.generate(input_ids=tokens[:, :-5], **given, **length, do_sample=False).tolist() == made.tolist()
    return found


def generate_all(kind: str) -> list[list[Any]]:
    return [generate(kind, stage) for stage in (0, 3)]


@pytest.mark.parametrize("kind", ["llama", "blip2"])
def test_generation_between_steps_sees_the_current_weights(pool, kind):
    one, two = pool.run(2, generate_all, kind)
    for whole, cut in (one, two):
        assert cut == whole
    assert len(one[1][-1][0]) + 2 == len(two[1][-1][0]), "ranks made texts of the same length"


def saved_and_resized(stage: int, folder: str) -> list[Any]:
    """Whether what `save_pretrained` writes is the model; what resizing after `initialize` is answered with."""
    import transformers as hf

    engine, *_ = zero.initialize(model=build("gpt2"), config=config(stage, 2, optimizer=OPTIMIZER))
    tokens, found = batch(0, dist.get_rank()), []
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    engine.step()
    state = {name: value.clone() for name, value in engine.module_state_dict().items()}
    engine.module.save_pretrained(folder, state_dict=dict(state), is_main_process=engine.global_rank == 0)
    if engine.global_rank == 0:
        read = hf.GPT2LMHeadModel.from_pretrained(folder).state_dict()
        found.append(all(torch.equal(value, state[name]) for name, value in read.items()))

    def resize() -> None:
        with zero.GatheredParameters(engine.module.parameters()):
            engine.module.resize_token_embeddings(VOCABULARY + 8, mean_resizing=False)
        if stage < 3:
            engine.backward(engine(input_ids=tokens, labels=tokens).loss)
            engine.step()

    for wrong in (resize, *([lambda: engine.module.save_pretrained(folder)] if stage == 3 else [])):
        try:
            wrong()
            found.append("nothing")
        except RuntimeError as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize("stage", [2, 3])
def test_saving_as_hugging_face_does_works_and_resizing_says_when(pool, stage, tmp_path):
    (good, *said), *_ = pool.run(2, saved_and_resized, stage, str(tmp_path))
    assert good
    assert "resize" in said[0].lower() and "before initialize()" in said[0], said[0]
    assert stage == 2 or "engine.module_state_dict() has the weights whole" in said[1]
