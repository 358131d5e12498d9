"""The promise: "auto" and null are what nobody has said; where no default could stand for it, they are errors."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from models import config, make_net

import zero
from zero.config import ConfigError, load
from zero.config.file import sections

BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
MICRO = {"train_micro_batch_size_per_gpu": 1}

# As people hand it to Transformers, which fills it in.
AUTO = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bfloat16": {"enabled": "auto"},
    "autotuning": {"enabled": False, "arg_mappings": "auto"},
    "fp16": {"enabled": "auto", "loss_scale": None},
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": None,
        "reduce_bucket_size": "auto",
        "prefetch_bucket_size": "auto",
        "offload_param": {"device": "none", "nvme_path": None},
    },
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}},
}


def test_a_file_that_is_not_filled_in_yet_says_nothing_there():
    config = load(AUTO, 2, filled=False)
    assert (config.train_batch_size, config.gradient_accumulation_steps) == (4, 1)
    assert config.gradient_clipping == 1.0 and config.compute_dtype == "fp32"
    assert config.zero_optimization.reduce_bucket_size == 500_000_000
    assert config.zero_optimization.stage3_prefetch_bucket_size == 50_000_000
    assert config.optimizer.params == {} and config.scheduler.params == {}


def autos(given: dict[str, Any], **how: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(given, 2, **how)
    assert all("got 'auto'" in line and "Accelerate or Transformers" in line for line in caught.value.errors)
    return [line.partition(":")[0] for line in caught.value.errors]


def test_an_auto_that_nobody_filled_in_is_an_error_unless_we_can_tell_what_it_is():
    first = ["gradient_clipping", "bfloat16.enabled", "fp16.enabled"]
    optimizer = ["optimizer.params.lr", "optimizer.params.weight_decay"]
    scheduler = ["scheduler.params.warmup_num_steps"]
    assert autos(AUTO) == [*first, *optimizer, *scheduler]
    assert autos(AUTO, stand_ins=["optimizer"]) == [*first, *scheduler]
    assert autos({**AUTO, "optimizer": "auto", "scheduler": "auto"}) == [*first, "optimizer", "scheduler"]
    assert autos({**AUTO, "scheduler": "auto"}, stand_ins=["optimizer", "scheduler"]) == first
    filled = {**AUTO, "gradient_clipping": 0, "bfloat16": {}, "fp16": {}, "optimizer": "auto", "scheduler": "auto"}
    assert load(filled, 2, stand_ins=["optimizer", "scheduler"]).train_batch_size == 4


def test_null_is_not_given_where_the_default_is_nothing():
    default = load(MICRO, 1).model_dump(exclude={"raw"})
    for path, model in sections().items():
        for name in model.model_fields:
            if path[:1] in (("optimizer",), ("scheduler",)) or path[-1:] == ("layer_specs",) or name in BATCH:
                continue
            given = functools.reduce(lambda inner, key: {key: inner}, reversed((*path, name)), None)
            value = functools.reduce(lambda inner, key: inner[key], (*path, name), default)
            if isinstance(value, dict) or not value:
                assert load({**MICRO, **given}, 1).model_dump(exclude={"raw"}) == default, (*path, name)
            else:
                with pytest.raises(ConfigError, match=r": got null, wanted .*"):
                    load({**MICRO, **given}, 1)


def test_initialize_wants_a_file_that_is_filled_in_and_init_does_not():
    lr = {"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}
    net = make_net()
    with pytest.raises(ConfigError, match=r"^optimizer\.params\.lr: got 'auto'.*Accelerate or Transformers"):
        zero.initialize(model=net, config={**config(0, 1), **lr})
    with zero.Init(config_dict_or_path={**AUTO, **lr}):
        pass
    client = torch.optim.SGD(net.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(client, 1)
    given = {**config(0, 1), **lr, "scheduler": "auto"}
    engine, *_ = zero.initialize(model=net, optimizer=client, lr_scheduler=schedule, config=given)
    assert engine.get_lr() == [0.1]
