"""The promise: adapters of PEFT on a base in 4 or 8 bits train on two ranks as on one, and their files are PEFT's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import engine_of, llama, train, with_lora
from marks import needs
from ranks import Pool

pytestmark = [pytest.mark.long, needs("bitsandbytes", "peft")]


def packed(folder: Path, bits: int) -> Any:
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    four = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    how = BitsAndBytesConfig(**(four if bits == 4 else {"load_in_8bit": True}))
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=how, dtype=torch.bfloat16)


def trained(folder: Path, bits: int, stage: int) -> tuple[dict[int, float], dict[str, torch.Tensor]]:
    """Losses by micro-batch, and the weights; the adapter is saved in the folder."""
    engine = engine_of(with_lora(packed(folder / "base", bits)), stage)
    losses = train(engine)
    weights = {name: value.clone() for name, value in engine.module_state_dict().items()}
    engine.save_pretrained(folder / "adapter")
    engine.destroy()
    return losses, weights


@pytest.mark.parametrize("bits", [4, 8])
def test_two_ranks_train_as_one_and_peft_reads_the_file(pool: Pool, tmp_path: Path, bits: int) -> None:
    import peft

    llama().save_pretrained(tmp_path / "base")
    ((losses, weights),) = pool.run(1, trained, tmp_path, bits, 0)
    assert len({round(loss, 4) for loss in losses.values()}) > 1
    for stage in (1, 3):
        found = pool.run(2, trained, tmp_path, bits, stage)
        assert {number: loss for mine, _ in found for number, loss in mine.items()} == losses
        for _, mine in found:
            assert mine.keys() == weights.keys()
            assert [name for name in mine if not torch.equal(mine[name], weights[name])] == []
        read = peft.PeftModel.from_pretrained(packed(tmp_path / "base", bits), tmp_path / "adapter").state_dict()
        assert read.keys() == weights.keys()
        assert [name for name in read if not torch.equal(read[name], weights[name])] == []
    adapters = [value for name, value in weights.items() if ".lora_B." in name]
    assert adapters and all(value.any() for value in adapters), "an adapter that is trained is not zero"
