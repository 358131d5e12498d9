"""The promise: LoRA on layers that are cut is cut with them, and trains as in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cut_models import family, json_of, place_of, plain, trained, words
from marks import needs
from ranks import said_by
from sharing import needs_transformers

import zero

pytestmark = [pytest.mark.ranks(2), needs_transformers, needs("peft")]
LAYERS = ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]


def adapted(**more: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    model = family("llama")
    model = get_peft_model(
        model, LoraConfig(r=4, target_modules=LAYERS, lora_dropout=0.0, task_type="CAUSAL_LM", **more)
    )
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "lora_" in name:  # B is zero at first, and A has no gradient then
                param.copy_(0.1 * torch.randn(param.shape, generator=generator))
    return model


@pytest.mark.parametrize(("stage", "sequences"), [(0, False), (3, True)])
def test_gradients_of_adapters(stage: int, sequences: bool) -> None:
    json = json_of(2, stage, tensor_parallel={"sequence_parallel": sequences})
    found, wanted = trained(adapted, json, words, place_of(2)), plain(adapted, words)
    assert found["losses"][0] == pytest.approx(wanted["loss"], rel=1e-6)
    seen = 0
    for name, grad in wanted["grads"].items():
        if grad is not None:
            assert (found["grads"][name] - grad).abs().max() <= 1e-6, name
            seen += 1
    assert seen == 2 * 2 * len(LAYERS)
    assert found["shapes"]["base_model.model.model.layers.0.self_attn.q_proj.lora_B.default.weight"] == (16, 4)


def test_adapters_that_are_not_cut_are_refused_by_name() -> None:
    said = said_by(lambda: zero.initialize(model=adapted(use_dora=True), config=json_of(2)))
    assert "its adapter has 'lora_magnitude_vector', which is not cut over ranks; use plain LoRA" in said
