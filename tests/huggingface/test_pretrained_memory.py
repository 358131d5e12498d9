"""The promise: `from_pretrained` at stage 3 brings weights in without a copy of the model on any rank.

What grows is private memory (RssAnon, sampled): a shard, a parameter twice (whole, and on its way to the others), and
what the allocator keeps: less than a shard and one unit of the engine, which is a decoder block.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_cases import filled, opened
from ranks import Pool
from sampled_memory import MIB, SLACK, Sampled

import zero

SIZES = {"vocab_size": 512, "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 16}
LARGEST = 2048 * 8192 * 4  # bytes


def loaded(tiny: str, large: str) -> int:
    """Growth by loading the large model, once everything that a small one takes is imported."""
    with opened():
        from safetensors import safe_open
        from transformers import AutoModelForCausalLM
        from transformers.integrations import HfDeepSpeedConfig

        said = HfDeepSpeedConfig(filled(3))
        AutoModelForCausalLM.from_pretrained(tiny)
        with Sampled() as sampled:
            model = AutoModelForCausalLM.from_pretrained(large)
        params = dict(model.named_parameters())
        for path in Path(large).glob("*.safetensors"):
            with safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118 (it is no dict)
                    with zero.GatheredParameters(params[name]):
                        assert (params[name] == file.get_tensor(name)).all(), name
                    params.pop(name)
        assert not params
        del said
        return sampled.growth


def write(folder: Path, layers: int) -> int:
    """A model in several files; its size in bytes."""
    import torch
    from transformer_models import tiny

    with torch.device("meta"):
        model = tiny("LlamaForCausalLM", **SIZES, num_hidden_layers=layers)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for number, param in enumerate(model.parameters()):
            param.fill_(1 + number / 64)
    model.save_pretrained(folder, max_shard_size="300MB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return sum(param.nbytes for param in model.parameters())


@pytest.mark.long
def test_growth_is_less_than_a_shard_and_a_unit(door: Pool, tiny: Path, tmp_path: Path) -> None:
    world, layers = 4, 4
    size = write(tmp_path, layers)
    limit = size // world + 2 * LARGEST + SLACK
    assert limit < size // world + size // layers + SLACK
    assert limit < 0.8 * size, "a whole copy would pass"
    ranks = Pool(world)  # of new processes: what others have given back to themselves would not be seen to grow
    found = ranks.run(world, loaded, str(tiny), str(tmp_path))
    ranks.close()
    print(world, size // MIB, [growth // MIB for growth in found], "limit", limit // MIB)
    for growth in found:
        assert size // world < growth <= limit, (found, limit)
