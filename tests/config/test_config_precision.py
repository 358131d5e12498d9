"""The promise: keys of the precision that contradict each other are refused in one sentence, the rest is taken."""

from __future__ import annotations

import pytest

from zero.config import ConfigError, load


def errors(source: dict) -> str:
    with pytest.raises(ConfigError) as caught:
        load(source, 1)
    return str(caught.value)


FP16 = {"train_batch_size": 8, "fp16": {"enabled": True}}
NO_MODE = "without fp16.enabled or bf16.enabled they are fp32"


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (
            {**FP16, "torch_autocast": {"enabled": True, "dtype": "bf16"}},
            "torch_autocast.dtype: got 'bf16', wanted 'fp16', which fp16.enabled makes the parameters",
        ),
        (
            {"bfloat16": {"enabled": True}, "torch_autocast": {"enabled": True, "dtype": "torch.float16"}},
            "torch_autocast.dtype: got 'fp16', wanted 'bf16', which bf16.enabled makes the parameters",
        ),
        (
            {"torch_autocast": {"enabled": True, "dtype": "float32"}},
            "torch_autocast.dtype: got 'fp32', wanted one of 'bf16', 'fp16'",
        ),
        (
            {"data_types": {"param_dtype": "bf16"}},
            f"data_types.param_dtype: got 'bf16', but {NO_MODE}; set it to 'fp32', or switch on bf16.enabled instead",
        ),
        (
            {**FP16, "data_types": {"param_dtype": "fp32"}},
            "data_types.param_dtype: got 'fp32', but fp16.enabled makes them fp16; set it to 'fp16'",
        ),
        ({"gradient_predivide_factor": 0}, "gradient_predivide_factor: got 0, wanted a number above 0"),
        (
            {"fp16": {"enabled": True, "hysteresis": 0}},
            "fp16.hysteresis: got 0, wanted an integer of at least 1 for a dynamic loss scale",
        ),
        (
            {"torch_autocast": {"enabled": True, "dtype": "fp16"}, "fp16": {"loss_scale_window": 0}},
            "fp16.loss_scale_window: got 0, wanted an integer of at least 1 for a dynamic loss scale",
        ),
        (
            {"fp16": {"enabled": True, "initial_scale_power": 65}},
            "fp16.initial_scale_power: got 65, wanted an integer from 0 to 64",
        ),
        (
            {"fp16": {"enabled": True, "initial_scale_power": 4, "min_loss_scale": 17}},
            "fp16.min_loss_scale: got 17, wanted at most 2 ** fp16.initial_scale_power = 16, where the scale starts",
        ),
    ],
)
def test_precision_that_does_not_fit_together(given, text):
    assert errors({"train_batch_size": 8, **given}) == text


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
