"""The promise: models of Transformers, cut by their own plan or by structure, train as one process trains them."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from cut_models import family, json_of, place_of, plain, trained, words
from ranks import Pool
from sharing import needs_transformers

from zero.utils import safe_get_full_fp32_param

CLOSE = 1e-6
NAMES = ("llama", "qwen3", "gpt2", "bert", "mixtral", "deepseek_v3", "deepseek_v2", "gpt_oss")


def equal(name: str, tp: int, stage: int, sequences: bool = False, **more: int) -> None:
    make = functools.partial(family, name, **more)
    dp = dist.get_world_size() // tp
    json = json_of(tp, stage, tensor_parallel={"sequence_parallel": sequences})
    found, wanted = trained(make, json, words, place_of(tp)), plain(make, words, dp)
    loss = torch.tensor(found["losses"], dtype=torch.float64)
    dist.all_reduce(loss)
    assert loss.item() / dist.get_world_size() == pytest.approx(wanted["loss"], rel=CLOSE)
    squares = 0.0
    for key, grad in wanted["grads"].items():
        grad = torch.zeros_like(found["grads"][key]) if grad is None else grad
        assert (found["grads"][key] - grad).abs().max() <= CLOSE, key
        squares += float(found["grads"][key].double().square().sum())
    assert found["norms"][0] == pytest.approx(squares**0.5, rel=1e-12)


@needs_transformers
@pytest.mark.ranks(2)
@pytest.mark.parametrize(("name", "stage"), [(name, at % 4) for at, name in enumerate(NAMES)])
def test_losses_gradients_and_norms_are_those_of_one_process(name: str, stage: int) -> None:
    equal(name, 2, stage, sequences=name in ("qwen3", "mixtral"))


@needs_transformers
@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("stage", range(4))
def test_also_beside_data_ranks(pool: Pool, name: str, stage: int) -> None:
    pool.run(4, equal, name, 2, stage, name not in ("deepseek_v2", "bert"))


@needs_transformers
@pytest.mark.long
@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt_oss"])
@pytest.mark.parametrize("tp", [3, 4])
def test_heads_that_ranks_share_and_parts_of_unequal_size(pool: Pool, name: str, tp: int) -> None:
    sizes = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 48} if tp == 3 else {}
    pool.run(tp, equal, name, tp, 2, True, **sizes)


def born(name: str, stage: int, tp: int) -> None:
    import zero

    wanted = {key: value.detach().clone() for key, value in family(name).named_parameters()}
    json = json_of(tp, stage)
    with zero.Init(config_dict_or_path=json):
        model = family(name)
    held = sum(param._zero_owner.unit.shard.values.numel() for param in model.parameters())
    total = sum(value.numel() for value in wanted.values())
    assert held <= total / dist.get_world_size() * 1.1 + 64 * len(wanted)  # of no layer more than a shard
    engine, *_ = zero.initialize(model=model, config=json)
    for key, param in engine.module.named_parameters():
        assert torch.equal(safe_get_full_fp32_param(param), wanted[key]), key
    engine.destroy()
    model = family(name, seed=dist.get_rank())  # the first rank's values count
    engine, *_ = zero.initialize(model=model, config=json_of(tp, 1))
    for key, param in engine.module.named_parameters():
        assert torch.equal(safe_get_full_fp32_param(param), wanted[key]), key
    engine.destroy()


@needs_transformers
@pytest.mark.ranks(2)
def test_weights_are_born_as_those_of_one_process() -> None:
    born("qwen3", 3, 2)


@needs_transformers
@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_every_model_is_born_so_beside_data_ranks(pool: Pool, name: str) -> None:
    pool.run(4, born, name, 3, 2)
