"""What a right config becomes: defaults, names, file syntax and the batch triple."""

import itertools
import json
import math
import operator
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zero.config import Config, ConfigError, load
from zero.config.batch import Batch, resolve
from zero.config.file import File, sections
from zero.config.instead import names
from zero.config.optimizers import ARGUMENTS, States, torch_reason
from zero.config.schema import descriptions

MICRO = {"train_micro_batch_size_per_gpu": 1}
GATHER = "zero_optimization.stage3_gather_16bit_weights_on_model_save"
OFFLOAD = "zero_optimization.offload_optimizer.device"


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "zero.json"
    path.write_text(text)
    return path


def test_defaults():
    config = load(MICRO, 4)
    assert isinstance(config, Config)
    assert (config.train_batch_size, config.gradient_accumulation_steps, config.world_size) == (4, 1, 4)
    assert config.optimizer is None and config.scheduler is None
    assert config.gradient_clipping == 1.0 and config.steps_per_print == 10
    assert config.compute_dtype == "fp32"
    assert not config.fp16.enabled and not config.bf16.enabled and config.bf16.check_grad_overflow
    assert not config.dataloader_drop_last and not config.wall_clock_breakdown
    zero = config.zero_optimization
    assert zero.stage == 0 and not zero.stage3_gather_16bit_weights_on_model_save
    assert zero.reduce_bucket_size == 500_000_000 and zero.stage3_prefetch_bucket_size == 50_000_000
    assert zero.offload_optimizer.device == zero.offload_param.device == "none"
    assert zero.overlap_comm is None
    assert config.zero.units == [] and config.zero.reduce_every_micro_batch is False


def test_optimizer_and_scheduler_are_handed_on():
    config = load(
        {
            **MICRO,
            "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "eps": "auto"}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10, "warmup_max_lr": "auto"}},
        },
        1,
        filled=False,
    )
    assert (config.optimizer.type, config.optimizer.params) == ("AdamW", {"lr": 3e-4, "betas": [0.9, 0.95]})
    assert (config.scheduler.type, config.scheduler.params) == ("WarmupLR", {"warmup_num_steps": 10})


@pytest.mark.parametrize(
    ("given", "where", "wanted"),
    [
        ({"bfloat16": {"enabled": True}}, "compute_dtype", "bf16"),
        ({"zero_optimization": {"prefetch_bucket_size": 7}}, "zero_optimization.stage3_prefetch_bucket_size", 7),
        ({"zero_optimization": {"gather_16bit_weights_on_model_save": True}}, GATHER, True),
        ({"zero_optimization": {"stage3_gather_fp16_weights_on_model_save": True}}, GATHER, True),
        ({"zero_optimization": {"cpu_offload": False, "cpu_offload_use_pin_memory": True}}, OFFLOAD, "none"),
        ({"checkpoint": {"tag_validation": "FAIL"}}, "checkpoint.tag_validation", "fail"),
        ({"data_types": {"grad_accum_dtype": "torch.float32"}}, "data_types.grad_accum_dtype", "fp32"),
        ({"zero_optimization": True}, "zero_optimization.stage", 1),
        ({"zero_optimization": False}, "zero_optimization.stage", 0),
    ],
)
def test_other_names_and_forms_of_a_key(given, where, wanted):
    assert operator.attrgetter(where)(load({**MICRO, **given}, 1)) == wanted


def test_0_and_1_are_false_and_true():
    given = {**MICRO, "bf16": {"enabled": 1}, "zero_optimization": {"stage": 2, "cpu_offload": 1, "overlap_comm": 0}}
    config = load(given, 1)
    assert config.bf16.enabled is True and config.zero_optimization.overlap_comm is False
    assert config.zero_optimization.offload_optimizer.device == "cpu"
    adam = {"type": "Adam", "params": {"torch_adam": 1}}
    assert load({**MICRO, "optimizer": adam}, 1) and torch_reason("Adam", adam["params"]) == "'torch_adam' is true"
    for refused in (
        {"sparse_gradients": 1},
        {"elasticity": {"enabled": 1}},
        {"zero_optimization": {"ignore_unused_parameters": 0}},
        {"optimizer": {"type": "Adam", "params": {"amsgrad": 1}}},
    ):
        with pytest.raises(ConfigError, match=r"not available|always allowed"):
            load({**MICRO, **refused}, 1)


class Somewhere:
    """A path of somebody else's."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __fspath__(self) -> str:
        return str(self.path)


def test_a_file_is_named_by_anything_that_has_a_path(tmp_path):
    path = written(tmp_path, json.dumps({**MICRO, "zero": {"xyzzy": 1}}))
    for source in (path, str(path), Somewhere(path)):
        with pytest.raises(ConfigError, match=re.escape(f"in {path}:")):
            load(source, 1)


def test_integral_floats_are_integers():
    config = load({"train_batch_size": 8.0, "zero_optimization": {"stage": 2.0, "reduce_bucket_size": 5e8}}, 1)
    assert config.train_batch_size == 8 and type(config.train_batch_size) is int
    assert config.zero_optimization.reduce_bucket_size == 500_000_000
    assert type(config.zero_optimization.reduce_bucket_size) is int


def test_steps_per_print_may_be_infinite(tmp_path):
    assert load({**MICRO, "steps_per_print": math.inf}, 1).steps_per_print == math.inf
    assert load({**MICRO, "steps_per_print": 5.0}, 1).steps_per_print == 5
    path = written(tmp_path, json.dumps({**MICRO, "steps_per_print": math.inf}, indent=1))
    assert load(path, 1).steps_per_print == math.inf
    path = written(tmp_path, "{train_batch_size: 1\n steps_per_print: inf\n}")
    assert load(path, 1).steps_per_print == math.inf


def test_hjson(tmp_path):
    text = """
    {
      // how many samples
      train_batch_size: 16
      "gradient_accumulation_steps": 2,  # passes
      /* what is sharded */
      "zero_optimization": {"stage": 3, "reduce_bucket_size": 5e8,},
      "optimizer": {
        "type": "AdamW",
        "params": {"lr": 1e-4, "betas": [0.9, 0.95,],},
      },
    }
    """
    config = load(str(written(tmp_path, text)), 4)
    assert config.train_micro_batch_size_per_gpu == 2
    assert config.zero_optimization.stage == 3
    assert config.optimizer.params == {"lr": 1e-4, "betas": [0.9, 0.95]}
    assert type(config.raw) is dict and type(config.raw["optimizer"]) is dict


def test_everything_that_is_off_is_silent():
    off = {
        **MICRO,
        "fp16": {"enabled": False, "auto_cast": True, "loss_scale": 0, "initial_scale_power": 16},
        "amp": {"enabled": False, "opt_level": "O1"},
        "msamp": {"enabled": False},
        "hybrid_engine": {"enabled": False, "max_out_tokens": 512},
        "elasticity": {"enabled": False, "max_train_batch_size": 2000},
        "compression_training": {"weight_quantization": {"shared_parameters": {"enabled": False}}},
        "tensor_parallel": {"autotp_size": 1},
        "wandb": {"enabled": False, "project": "x"},
        "aio": {"block_size": 262144, "thread_count": 1, "queue_depth": 32},
        "flops_profiler": {"enabled": False, "module_depth": -1},
        "activation_checkpointing": {"partition_activations": False, "number_checkpoints": 4},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "none", "pin_memory": True},
            "mics_shard_size": -1,
            "zero_hpz_partition_size": 1,
            "allgather_bucket_size": 2e8,
        },
    }
    assert load(off, 1).zero_optimization.stage == 3


@pytest.mark.parametrize("world_size", [0, -1, True, "2", 1.5])
def test_world_size_is_checked(world_size):
    with pytest.raises(ValueError, match=r"world_size: got .*, wanted an integer of at least 1"):
        load(MICRO, world_size)


maybe = st.none() | st.integers(1, 24)


@settings(max_examples=400, deadline=None)
@given(train=maybe, micro=maybe, steps=maybe, world=st.integers(1, 6))
def test_batch_triple_is_what_a_search_finds(train, micro, steps, world):
    """A search over every triple that agrees with what is given; where only one is, steps is 1."""
    top = 24 * 24 * 6
    found = {
        Batch(m * s * world, m, s)
        for m, s in itertools.product([micro] if micro else range(1, 25), [steps] if steps else range(1, 25))
        if m * s * world <= top and (train is None or m * s * world == train)
    }
    if train is None and micro is None:
        found = set()
    elif steps is None and (train is None or micro is None):
        found = {triple for triple in found if triple.steps == 1}
    try:
        assert {resolve(train, micro, steps, world)} == found
    except ValueError as error:
        assert not found
        for value in (train, micro, steps):
            assert f"={'(not given)' if value is None else value}" in str(error)
        assert f"world size {world}" in str(error)
        for fix in re.findall(r"\d+", "".join(re.findall(r"set train_batch_size to ([\d or]+)", str(error)))):
            assert resolve(int(fix), micro, steps, world).train == int(fix)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 9) | st.floats() | st.sampled_from(["auto", "none", "cpu", "x", ""]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["enabled", "stage", "type", "params", "lr", "x", 1]), inner, max_size=3)
    ),
    max_leaves=5,
)


@settings(max_examples=400, deadline=None)
@given(st.dictionaries(st.sampled_from([*names(File), "mine", 3]), json_values, max_size=4))
def test_any_values_give_a_config_or_a_config_error(values):
    try:
        config = load({**values, **MICRO}, 2)
    except ConfigError as error:
        assert error.errors and all("\n" not in line for line in error.errors)
    else:
        assert config.train_batch_size >= 1


def test_every_key_of_every_section_is_described():
    arguments = {("optimizer", kind): model for kind, model in ARGUMENTS.items()}
    for path, model in {**sections(), **arguments, ("zero",): States}.items():
        assert model.__doc__, path
        assert descriptions(model).keys() == model.model_fields.keys(), path
        assert all(descriptions(model).values()), path


def test_how_checkpoints_are_saved():
    saving = load({**MICRO, "zero": {"checkpoint": {"async": True, "keep": 3, "keep_optimizer": 1}}}, 1).zero.checkpoint
    assert (saving.asynchronous, saving.keep, saving.keep_optimizer) == (True, 3, 1)
    saving = load(MICRO, 1).zero.checkpoint
    assert (saving.asynchronous, saving.keep, saving.keep_optimizer) == (False, None, None)
    with pytest.raises(ValueError, match=r"zero\.checkpoint\.keep_optimizer: got 4, wanted at most .*, which is 3"):
        load({**MICRO, "zero": {"checkpoint": {"keep": 3, "keep_optimizer": 4}}}, 1)
    with pytest.raises(ValueError, match=r"zero\.checkpoint\.keep: got 0"):
        load({**MICRO, "zero": {"checkpoint": {"keep": 0}}}, 1)


def errors(source: dict) -> str:
    with pytest.raises(ConfigError) as caught:
        load(source, 1)
    return str(caught.value)


def test_precision_that_fits_together():
    both = {"data_types": {"param_dtype": "half"}, "fp16": {"enabled": True, "loss_scale": 128, "hysteresis": 0}}
    assert load({"train_batch_size": 8, **both}, 1).scales_loss
    off = {"fp16": {"enabled": False, "hysteresis": 0}, "torch_autocast": {"enabled": True}}
    config = load({"train_batch_size": 8, **off}, 1)
    assert (config.autocast_dtype, config.scales_loss, config.compute_dtype) == ("bf16", False, "fp32")
    for dtype in ("fp16", "bf16"):
        on = {dtype: {"enabled": True}, "torch_autocast": {"enabled": True}}
        config = load({"train_batch_size": 8, **on}, 1)
        assert (config.autocast_dtype, config.scales_loss, config.compute_dtype) == (dtype, dtype == "fp16", dtype)


def test_numbers_of_the_loss_scale_that_nothing_reads():
    given = {"loss_scale_window": -1, "min_loss_scale": -1}
    for unread in ({"enabled": False}, {"enabled": True, "loss_scale": 128}, {"enabled": True, "loss_scale": " 128.0"}):
        section = load({"train_batch_size": 8, "fp16": {**given, **unread}}, 1).fp16
        assert section.loss_scale in (0.0, 128.0) and type(section.loss_scale) is float
    assert errors({"train_batch_size": 8, "fp16": {"enabled": True, "loss_scale": "0", **given}}).splitlines() == [
        f"fp16.{name}: got -1, wanted an integer of at least 1 for a dynamic loss scale" for name in given
    ]
    for wrong in ("big", "", "nan", "-1", True, [128]):
        assert "fp16.loss_scale: got" in errors({"train_batch_size": 8, "fp16": {"loss_scale": wrong}})


@pytest.mark.parametrize(
    ("keys", "wanted"),
    [
        ({}, 1.0),
        ({"prescale_gradients": True}, 4.0),
        ({"gradient_predivide_factor": 3}, 3.0),
        ({"prescale_gradients": True, "gradient_predivide_factor": 3}, 3.0),
    ],
)
def test_what_gradients_are_divided_by_before_they_travel(keys, wanted):
    assert load({"train_batch_size": 8, **keys}, 4).predivide == wanted


def shards(shard_size=0, **keys) -> dict:
    return {"train_batch_size": 8, "zero": {"shard_size": shard_size}, "zero_optimization": keys}


@pytest.mark.parametrize(
    ("given", "shard_size", "secondary"),
    [
        (shards(stage=3), 0, 1),
        (shards(-1, mics_shard_size=0, stage=0), 0, 1),
        (shards(1, stage=1), 1, 1),
        (shards(mics_shard_size=2, stage=2), 2, 1),
        (shards(2, mics_shard_size=2, stage=3), 2, 1),
        (shards(4, mics_shard_size=-1, stage=3), 0, 1),
        (shards(zero_hpz_partition_size=2, stage=3), 0, 2),
        (shards(zero_hpz_partition_size=4, stage=3), 0, 1),
    ],
)
def test_shard_sizes_that_fit(given, shard_size, secondary):
    config = load(given, 4)
    assert (config.shard_size, config.secondary_shard_size) == (shard_size, secondary)
