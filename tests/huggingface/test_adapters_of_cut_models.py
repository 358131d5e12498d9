"""The promise: a model that is cut gets adapters, a larger embedding and trained copies of modules as a plain one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from adapters import differing, engine_of, llama, lora, plain, settings, train, with_lora
from huggingface_cases import opened
from marks import needs

import zero
from zero.core.owner import is_released

pytestmark = [pytest.mark.ranks(2), pytest.mark.long, needs("peft")]


def test_adapters_may_be_added_to_a_model_that_is_cut() -> None:
    """Behind the block, inside a later one, and by Transformers' own add_adapter: the same numbers."""
    losses, wanted = plain(with_lora(llama()))
    with zero.Init():
        behind, inside, own = llama(), llama(), llama()
    behind = with_lora(behind)
    with zero.Init():
        inside = with_lora(inside)
    torch.manual_seed(1)
    own.add_adapter(lora())
    for model in (behind, inside, own):
        assert is_released(model.get_input_embeddings().weight)
        engine = engine_of(model, 3)
        mine = train(engine)
        engine.destroy()
        assert mine == {number: losses[number] for number in mine} or model is own  # adapters in the base's dtype
    assert differing(behind, wanted) == differing(inside, wanted) == []


def built(make: Callable[[], Any], change: Callable[[Any], Any], where: str) -> Any:
    """A model that is changed in the block it is built in, in a later one, or behind it."""
    with zero.Init():
        model = make() if where != "same" else change(make())
    if where == "later":
        with zero.Init():
            return change(model)
    return change(model) if where == "behind" else model


SAVED = [["lm_head"], ["embed_tokens"], ["embed_tokens", "lm_head"]]


@pytest.mark.parametrize("tied", [False, True])
def test_modules_to_save(tied: bool, tmp_path: Path) -> None:
    import peft

    def base() -> Any:
        return llama(torch.float32, tied)

    for number, modules in enumerate(SAVED):
        more = {"modules_to_save": modules}
        losses, wanted = plain(with_lora(base(), **more), 1)
        for where in ("behind", "later") if number else ("same",):
            model = built(base, lambda made, more=more: with_lora(made, **more), where)
            engine = engine_of(model, 3)
            mine = train(engine, 1)
            assert mine == {key: losses[key] for key in mine}, (modules, where)
            folder = tmp_path / f"{number}-{where}"
            engine.save_pretrained(folder)
            engine.destroy()
            assert differing(engine.module, wanted) == [], (modules, where)
            dist.barrier()
            read = peft.PeftModel.from_pretrained(base(), folder)
            assert differing(engine.module, read) == [], (modules, where)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
def test_an_embedding_is_resized(tied: bool, first: bool, tmp_path: Path) -> None:
    def change(model: Any) -> Any:
        torch.manual_seed(2)
        if first:
            model.resize_token_embeddings(29)
            return with_lora(model)
        model = with_lora(model)
        torch.manual_seed(2)
        model.resize_token_embeddings(29)
        return model

    losses, wanted = plain(change(llama(torch.float32, tied)), 1)
    for where in ("same", "later"):
        model = built(lambda: llama(torch.float32, tied), change, where)
        engine = engine_of(model, 3)
        mine = train(engine, 1)
        assert mine == {key: losses[key] for key in mine}, where
        engine.destroy()
        assert differing(engine.module, wanted) == [], where
        assert engine.module.get_output_embeddings().weight.shape == (29, 32)
    with zero.Init():
        model = llama(tied=tied)
    with pytest.raises(RuntimeError, match="released"):
        model.resize_token_embeddings(29)


KINDS = {"DoRA": {"use_dora": True}, "rsLoRA": {"use_rslora": True}, "PiSSA": {"init_lora_weights": "pissa_niter_2"}}


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_that_read_the_base(kind: str) -> None:
    losses, wanted = plain(with_lora(llama(torch.float32), **KINDS[kind]), 1)
    for where in ("same", "later"):
        model = built(lambda: llama(torch.float32), lambda base: with_lora(base, **KINDS[kind]), where)
        engine = engine_of(model, 3)
        mine = train(engine, 1)
        assert mine == {key: losses[key] for key in mine}, where
        engine.destroy()
        assert differing(engine.module, wanted) == [], where
    with zero.Init():
        model = llama()
    if kind != "rsLoRA":
        with pytest.raises(RuntimeError, match=r"q_proj.weight' is released"):
            with_lora(model, **KINDS[kind])


def behind_a_door(folder: str) -> None:
    """A script for DeepSpeed, which gathers what it reads: an embedding to resize, a head to copy, norms."""
    with opened():
        from transformers import AutoModelForCausalLM
        from transformers.integrations import HfDeepSpeedConfig

        def change(model: Any) -> Any:
            torch.manual_seed(2)
            model.resize_token_embeddings(29)
            return with_lora(model, use_dora=True, modules_to_save=["lm_head"])

        losses, wanted = plain(change(AutoModelForCausalLM.from_pretrained(folder)), 1)
        said = HfDeepSpeedConfig(settings(3))  # as long as it is there, Transformers and PEFT gather
        engine = engine_of(change(AutoModelForCausalLM.from_pretrained(folder)), 3)
        mine = train(engine, 1)
        engine.destroy()
        del said
        assert mine == {number: losses[number] for number in mine}
        assert differing(engine.module, wanted) == []


def test_a_script_for_deepspeed_adds_them_too(door: Any, tiny: Path) -> None:
    door.run(2, behind_a_door, str(tiny))
