"""The promise: these methods of PEFT train at stage 3 as in plain PEFT, bit by bit, and write the same file.

So they do at stage 1, where nothing is cut: some are tried.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from adapters import differing, engine_of, llama, plain, train
from marks import needs
from safetensors.torch import load_file

pytestmark = [pytest.mark.long, needs("peft")]
QV, PROMPT = {"target_modules": ["q_proj", "v_proj"]}, {"num_virtual_tokens": 4}
METHODS = {
    "AdaLora": {**QV, "init_r": 4, "target_r": 2, "total_step": 10},
    "AdaptionPrompt": {"adapter_len": 4, "adapter_layers": 2},
    "BOFT": {"target_modules": ["q_proj"], "boft_block_size": 4},
    "C3A": {"target_modules": ["q_proj"], "block_size": 8},
    "FourierFT": {**QV, "n_frequency": 10},
    "HRA": {**QV, "r": 4},
    "IA3": {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
    "LNTuning": {"target_modules": ["input_layernorm"]},
    "LoHa": {**QV, "r": 4, "alpha": 8},
    "LoKr": {**QV, "r": 4, "alpha": 8},
    "Lora": {"target_modules": "all-linear", "r": 4, "modules_to_save": ["lm_head"]},
    "Lora of embeddings": {"target_modules": ["embed_tokens", "q_proj"], "r": 4},
    "Lora with biases": {**QV, "r": 4, "bias": "lora_only", "lora_bias": True},
    "Lora with tokens": {**QV, "r": 4, "trainable_token_indices": {"embed_tokens": [1, 3]}},
    "Miss": {**QV, "r": 4},
    "OFT": {**QV, "r": 0, "oft_block_size": 4},
    "PrefixTuning": {**PROMPT, "prefix_projection": True},
    "PromptEncoder": {**PROMPT, "encoder_reparameterization_type": "LSTM", "encoder_hidden_size": 16},
    "PromptTuning": PROMPT,
    "RandLora": {**QV, "r": 4},
    "Shira": {**QV, "r": 2},
    "TrainableTokens": {"target_modules": ["embed_tokens"], "token_indices": [1, 2]},
    "VBLoRA": {**QV, "r": 4, "num_vectors": 16, "vector_length": 8, "topk": 2},
    "Vera": {"target_modules": ["q_proj"], "r": 4},
}


def made(method: str) -> Any:
    import peft

    torch.manual_seed(3)
    config = getattr(peft, f"{method.split()[0]}Config")
    return peft.get_peft_model(llama(torch.float32), config(task_type="CAUSAL_LM", **METHODS[method]))


def file_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter_model.safetensors")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("method", METHODS)
def test_a_method_is_as_in_plain_peft(method: str, tmp_path: Path) -> None:
    losses, wanted = plain(made(method))
    if dist.get_rank() == 0:
        wanted.save_pretrained(tmp_path / "plain")
    for stage in (1, 3) if method in ("AdaLora", "Lora") else (3,):
        engine = engine_of(made(method), stage)
        mine = train(engine)
        assert mine == {number: losses[number] for number in mine}
        engine.save_pretrained(tmp_path / str(stage))
        engine.destroy()
        assert differing(engine.module, wanted) == []
        dist.barrier()
        ours, theirs = file_of(tmp_path / str(stage)), file_of(tmp_path / "plain")
        assert ours.keys() == theirs.keys() and all(ours[name].equal(theirs[name]) for name in theirs)
