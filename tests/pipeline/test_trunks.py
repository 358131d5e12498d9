"""The promise: a model of transformers in stages trains as in one process, or is refused by name."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from adapters import with_lora
from closeness import allowed, error, twice
from marks import longer, needs
from pipelines import Found, compare, ended, json_of, stepped
from sharing import needs_transformers
from states import state_of, weights_of
from transformer_models import tiny

import zero

pytestmark = needs_transformers
needs_peft = needs("peft")
WORDS, ROWS, MICRO_BATCHES, STEPS = 40, 4, 3, 2
KINDS = {  # class, more of the configuration
    "llama": ("LlamaForCausalLM", {}),
    "qwen3": ("Qwen3ForCausalLM", {}),
    "mistral": ("MistralForCausalLM", {"sliding_window": 3}),
    "gemma": ("GemmaForCausalLM", {}),
    "gemma3": ("Gemma3ForCausalLM", {"sliding_window": 3}),
    "granite": ("GraniteForCausalLM", {"embedding_multiplier": 3.0}),
    "mixtral": ("MixtralForCausalLM", {"num_local_experts": 4}),
    "classifier": ("LlamaForSequenceClassification", {"num_labels": 3}),
    "routed": ("MixtralForCausalLM", {"output_router_logits": True}),
    "gpt2": ("GPT2LMHeadModel", {"n_embd": 32, "n_head": 4, "n_layer": 4}),
    "bert": ("BertForMaskedLM", {}),
}
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


def build(kind: str, tied: bool = False, dtype: torch.dtype = torch.float32, change: str = "") -> Any:
    name, more = KINDS[kind]
    sizes = {} if kind == "gpt2" else SIZES
    said = {"vocab_size": WORDS, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": tied}
    model = tiny(name, **sizes, **said, **more).to(dtype)
    if change == "checkpointing":
        model.gradient_checkpointing_enable()
    return with_lora(model) if change == "lora" else model


def sample(kind: str, form: str, number: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    length = 8 + (3 * number % 5 if form == "lengths" else 0)
    ids = torch.randint(3, WORDS, (ROWS, length), generator=generator)
    if form == "packed":
        starts = torch.tensor([0, 1, 2, 0, 1, 2, 3, 4])
        return {"input_ids": ids, "labels": ids, "position_ids": starts.expand(ROWS, -1)}
    mask = torch.ones_like(ids)
    mask[1, 6:] = mask[3, 5:] = 0
    ids = ids.where(mask.bool(), 0)
    labels = torch.arange(ROWS) % 3 if kind == "classifier" else ids.where(mask.bool(), -100)
    found = {"input_ids": ids, "labels": labels, "attention_mask": mask}
    if form == "tokens":
        found["num_items_in_batch"] = (labels[:, 1:] != -100).sum()
    return found


def stream(kind: str, form: str, place: int = 0) -> Iterator[dict[str, torch.Tensor]]:
    for number in itertools.count():
        yield sample(kind, form, 1000 * place + number)


def staged(json: dict[str, Any], kind: str, form: str = "padded", change: str = "", folder: str | None = None) -> Found:
    with zero.Init(config_dict_or_path=json) if change == "init" else contextlib.nullcontext():
        model = build(kind, form == "tied", change=change)
    engine = zero.initialize(model=model, config=json)[0]
    seen, numbers = None, stepped(engine, stream(kind, form, engine.get_data_parallel_rank()), STEPS)
    if folder is not None:
        if change == "lora":
            with pytest.raises(ValueError, match="PEFT writes adapters of modules that rank 0 has"):
                engine.save_pretrained(folder)
            engine.save_16bit_model(folder, exclude_frozen_parameters=True)
        else:
            engine.save_pretrained(folder)
        seen = float(engine.eval_batch(iter([sample(kind, form, 99)]), num_micro_batches=1))
    return ended(engine, *numbers, weights_of if json["optimizer"]["type"] == "SGD" else state_of, seen)


def accumulated(json: dict[str, Any], kind: str, form: str = "padded", change: str = "") -> Found:
    json = {key: value for key, value in json.items() if key != "pipeline"}
    engine = zero.initialize(model=build(kind, change=change), config=json)[0]
    data, losses, norms = stream(kind, form, dist.get_rank()), [], []
    for _ in range(STEPS):
        total = weight = 0.0
        for _ in range(json["gradient_accumulation_steps"]):
            batch = next(data)
            loss = engine(**batch, use_cache=False).loss
            engine.backward(loss)
            engine.step()
            share = float(batch.get("num_items_in_batch", 1))
            total, weight = total + float(loss.detach()) * share, weight + share
        losses.append(float(engine.reduce(total / weight)))
        norms.append(engine.get_global_grad_norm())
    return ended(engine, losses, norms)


def json(stage: int, ranks: int, stages: int, **more: Any) -> dict[str, Any]:
    return json_of(stage, ranks, MICRO_BATCHES, pipeline={"stages": stages}, **more)


@pytest.mark.parametrize(
    ("kind", "form", "stage", "stages", "ranks"),
    [
        ("llama", "padded", 1, 2, 2),
        ("qwen3", "packed", 3, 2, 2),
        ("mistral", "lengths", 1, 2, 2),
        *longer(
            *itertools.product(("llama", "qwen3", "mistral"), ("padded", "packed", "lengths"), (1, 3), (2,), (2, 4)),
            *itertools.product(("gemma3", "granite", "mixtral", "classifier"), ("padded",), (1, 3), (2, 4), (4,)),
        ),
    ],
)
def test_it_trains_to_the_bits_of_one_process(pool: Any, kind, form, stage, stages, ranks):
    found = pool.run(ranks, staged, json(stage, ranks // stages, stages), kind, form)
    plain = json(min(stage, 1), ranks // stages, stages)  # gradients are reduced once a step
    compare(found, pool.run(ranks // stages, accumulated, plain, kind, form)[0])


@pytest.mark.parametrize("schedule", longer("gpipe", "interleaved", "zero_bubble", "zbv", "dualpipev"))
def test_every_schedule_gives_its_bits(pool: Any, schedule: str):
    section = {"stages": 2, "schedule": schedule}
    section |= {"stages_per_rank": 2} if schedule in ("interleaved", "zero_bubble") else {}
    given = json_of(3, 1, 4, pipeline=section)
    compare(pool.run(2, staged, given, "llama"), pool.run(1, accumulated, json_of(1, 1, 4), "llama")[0])


@pytest.mark.parametrize("stage", [1, *longer(3)])
def test_recomputed_blocks_on_stages_as_said_do_not_change_its_bits(pool: Any, stage: int):
    given = json(stage, 1, 2) | {"pipeline": {"stages": 2, "stage_map": {"model.layers.1": 1}}}
    found = pool.run(2, staged, given, "llama", "padded", "checkpointing")
    compare(found, pool.run(1, accumulated, json(1, 1, 2), "llama")[0])


@pytest.mark.parametrize(("precision", "gather"), longer(("fp32", "step"), ("fp32", "use"), ("bf16", "use")))
def test_a_model_that_was_never_whole_has_its_bits(pool: Any, precision: str, gather: str):
    given = json_of(3, 2, MICRO_BATCHES, precision, pipeline={"stages": 2, "gather": gather})
    found = pool.run(4, staged, given, "qwen3", "padded", "init")
    wanted = json_of(1 if gather == "step" else 3, 2, MICRO_BATCHES, precision)
    compare(found, pool.run(2, accumulated, wanted, "qwen3")[0])


@pytest.mark.parametrize("stages", longer(2, 4))
def test_a_mean_over_tokens_counts_those_of_its_micro_batches(pool: Any, stages: int):
    given = json(1, 1, stages, zero={"mean": "tokens"})
    compare(pool.run(stages, staged, given, "llama", "tokens"), pool.run(1, accumulated, given, "llama", "tokens")[0])


def plain(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The parameters after the same training in plain torch."""
    model, data = build("llama", True, dtype), stream("llama", "tied")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        for _ in range(MICRO_BATCHES):
            (model(**next(data)).loss / MICRO_BATCHES).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: param.detach() for name, param in model.named_parameters()}


def plainly() -> list[dict[str, torch.Tensor]]:
    return [plain(torch.float64), *twice(lambda: plain(torch.float32))]


@pytest.mark.parametrize(("stage", "stages", "ranks"), [(1, 2, 2), *longer((3, 2, 2), (1, 2, 4), (3, 4, 4))])
def test_a_tied_embedding_has_the_gradients_of_both_ends(pool: Any, stage, stages, ranks):
    given = json(stage, ranks // stages, stages, optimizer={"type": "SGD", "params": {"lr": 0.1}}, gradient_clipping=0)
    states = [each.state for each in pool.run(ranks, staged, given, "llama", "tied")]
    if ranks == stages:
        ((exact, *roundings),) = pool.run(1, plainly)
        found = {name: value for state in states for name, value in state.items()}
        assert error(found, exact) <= allowed(exact, *roundings)
    ends = [each["model.embed_tokens.weight"] for each in states if "model.embed_tokens.weight" in each]
    assert len(ends) == 2 * ranks // stages and all(torch.equal(each, ends[0]) for each in ends)


def loaded(folder: str, kind: str, form: str) -> tuple[Any, bool, float]:
    """What is wrong with a saved model, whether its embedding is tied, and its loss."""
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    with torch.no_grad():
        loss = float(model(**sample(kind, form, 99)).loss)
    wrong = {key: each for key, each in info.items() if each}
    return wrong, model.lm_head.weight is model.model.embed_tokens.weight, loss


@pytest.mark.parametrize(("kind", "form", "stage"), [("llama", "tied", 3), *longer(("qwen3", "padded", 1))])
def test_transformers_reads_what_it_saves(pool: Any, tmp_path: Path, kind, form, stage):
    found = pool.run(2, staged, json(stage, 1, 2), kind, form, "", str(tmp_path))
    wrong, tied, loss = pool.run(1, loaded, str(tmp_path), kind, form)[0]
    assert not wrong and tied is (form == "tied")
    assert [each.seen for each in found] == [loss, loss]


def resumed(folder: str) -> float:
    """The loss of PEFT's model with the adapters that an engine in stages has written."""
    model = build("llama", change="lora").eval()
    assert not model.load_state_dict(torch.load(f"{folder}/pytorch_model.bin"), strict=False).unexpected_keys
    with torch.no_grad():
        return float(model(**sample("llama", "padded", 99)).loss)


@needs_peft
@pytest.mark.parametrize("stage", [1, *longer(3)])
def test_adapters_inside_of_blocks_train_to_its_bits_and_are_saved(pool: Any, tmp_path: Path, stage: int):
    found = pool.run(2, staged, json(stage, 1, 2), "llama", "padded", "lora", str(tmp_path))
    compare(found, pool.run(1, accumulated, json(1, 1, 2), "llama", "padded", "lora")[0])
    assert all("lora" in name for each in found for name in each.state)
    assert [each.seen for each in found] == pool.run(1, resumed, str(tmp_path)) * 2


def skipping(base: Any) -> Any:
    """A forward whose blocks all see the embedding, too."""

    def forward(input_ids: torch.Tensor, **kwargs: Any) -> Any:
        embedded = hidden = base.embed_tokens(input_ids)
        for block in base.layers:
            hidden = block(hidden + embedded)
        return (base.norm(hidden),)

    return forward


def refused(kind: str, section: dict[str, Any]) -> str:
    model = build("llama" if kind in ("skipping", "prompts") else kind)
    if kind == "skipping":
        model.model.forward = skipping(model.model)
    if kind == "prompts":
        import peft

        model = peft.get_peft_model(model, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    with pytest.raises(ValueError) as caught:
        zero.initialize(model=model, config=json(1, 1, 2) | {"pipeline": {"stages": 2, **section}})
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "section", "text"),
    [
        ("gpt2", {}, "GPT2LMHeadModel cannot be divided among stages: it has no pp_plan"),
        ("bert", {}, "BertForMaskedLM cannot be divided among stages: it has no pp_plan"),
        ("routed", {}, "MixtralForCausalLM cannot be divided among stages: output_router_logits is set"),
        pytest.param("prompts", {}, "its adapter puts virtual tokens in front of the texts", marks=needs_peft),
        ("skipping", {}, "model.layers.2 needs more than what the block before it gives"),
        ("llama", {"stage_map": {"model.layers.1.mlp": 1}}, "its blocks are of the stages [0, None, 1, 1]"),
        (
            "llama",
            {"stage_map": {"model.layers.2": 1, "model.norm": 0}},
            "'model.norm' is said to be of stage 0, and is called in stage 1",
        ),
    ],
)
def test_what_cannot_be_divided_is_named(pool: Any, kind, section, text):
    assert all(text in each for each in pool.run(2, refused, kind, section))
