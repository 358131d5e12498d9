"""The promise: models of Transformers, cut by their own plan or by structure, train as one process trains them."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from cut_models import family, json_of, place_of, plain, trained, words
from marks import longer
from sharing import needs_transformers

import zero
from zero.utils import safe_get_full_fp32_param

pytestmark = needs_transformers
CLOSE = 1e-6
NAMES = ("llama", "qwen3", "gpt2", "bert", "mixtral", "deepseek_v3", "deepseek_v2", "gpt_oss")


CASES = [(2, name, 2, at % 4, name in ("qwen3", "mixtral"), {}) for at, name in enumerate(NAMES)]
BESIDE_DATA = [(4, name, 2, at, name not in ("deepseek_v2", "bert"), {}) for name in NAMES for at in range(4)]
HEADS = {3: {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 48}, 4: {}}  # by the ranks
OF_HEADS = [(tp, name, tp, 2, True, more) for name in ("llama", "qwen3", "gpt_oss") for tp, more in HEADS.items()]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("world", "name", "tp", "stage", "sequences", "more"), [*CASES, *longer(*BESIDE_DATA, *OF_HEADS)]
)
def test_losses_gradients_and_norms_are_those_of_one_process(
    world: int, name: str, tp: int, stage: int, sequences: bool, more: dict[str, int]
) -> None:
    """Alone and beside data ranks; with heads that ranks share, and parts of unequal size."""
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


@pytest.mark.ranks
@pytest.mark.parametrize(("world", "name"), [(2, "qwen3"), *longer(*((4, name) for name in NAMES))])
def test_weights_are_born_as_those_of_one_process(world: int, name: str) -> None:
    wanted = {key: value.detach().clone() for key, value in family(name).named_parameters()}
    json = json_of(2, 3)
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
    engine, *_ = zero.initialize(model=model, config=json_of(2, 1))
    for key, param in engine.module.named_parameters():
        assert torch.equal(safe_get_full_fp32_param(param), wanted[key]), key
    engine.destroy()
