"""What a wrong config says: the texts are part of the interface, so they are compared whole."""

import logging

import pytest

from zero import log
from zero.config import ConfigError, load
from zero.config.optimizers import ARGUMENTS

WANTED = "wanted the path of a JSON or hjson file, or a dict"


def errors(source, world_size=1) -> str:
    with pytest.raises(ConfigError) as caught:
        load(source, world_size)
    return str(caught.value)


def zero(**keys) -> dict:
    return {"train_batch_size": 8, "zero_optimization": keys}


def test_typo_in_a_section():
    assert errors(zero(stge=2)) == "zero_optimization: unknown key 'stge'; did you mean 'stage'?"


def test_typo_deep_in_a_section():
    text = errors(zero(offload_param={"devise": "none"}))
    assert text == "zero_optimization.offload_param: unknown key 'devise'; did you mean 'device'?"


def test_key_of_another_section():
    text = errors(zero(gradient_clipping=1.0))
    assert text == "zero_optimization: unknown key 'gradient_clipping'; it belongs at the top level"


def test_unknown_key_like_no_other():
    text = errors({"train_batch_size": 8, "zero": {"profile": {"steps": [1, 2], "xyzzy": 1}}})
    assert text == "zero.profile: unknown key 'xyzzy'; known keys: steps, dir, ranks"
    assert errors(zero(xyzzy=1)) == "zero_optimization: unknown key 'xyzzy'; `zero schema` lists the known keys"


def test_several_errors_at_once():
    text = errors(
        {
            "train_batch_size": 30,
            "train_micro_batch_size_per_gpu": 4,
            "zero_optimization": {"stage": 4, "stge": 1, "offload_optimizer": {"device": "cpu", "super_offload": True}},
            "fp16": {"enabled": "yes"},
            "optimizer": {"type": "AdamW", "params": {"lr": -1}},
        },
        world_size=4,
    )
    assert text.splitlines() == [
        "zero_optimization.offload_optimizer.super_offload: is not available; leave it out",
        "zero_optimization.stage: got 4, wanted an integer from 0 to 3",
        "zero_optimization: unknown key 'stge'; did you mean 'stage'?",
        "fp16.enabled: got 'yes', wanted true or false",
        "optimizer.params.lr: got -1, wanted a number of at least 0",
        "train_batch_size=30, train_micro_batch_size_per_gpu=4, gradient_accumulation_steps=(not given), "
        "world size 4: 30 is not a multiple of 4 x 4 = 16; set train_batch_size to 16 or 32",
    ]


def test_missing_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert errors("zro.json") == (f"config: there is no file 'zro.json' in {tmp_path}; {WANTED}")
    absolute = tmp_path / "zro.json"
    assert errors(absolute) == (f"config: there is no file '{absolute}'; {WANTED}")


def test_source_of_a_wrong_kind(tmp_path):
    assert errors(5) == f"config: got 5 (int), {WANTED}"
    assert errors(tmp_path) == (f"config: cannot read '{tmp_path}': Is a directory; {WANTED}")


def test_file_that_is_no_object(tmp_path):
    path = tmp_path / "zero.json"
    path.write_text("[1, 2]")
    assert errors(path) == f"in {path}:\ngot [1, 2], wanted an object {{...}} at the top"


def test_syntax_error_names_the_line(tmp_path):
    path = tmp_path / "zero.json"
    path.write_text('{\n  "train_batch_size": 8,\n  "fp16": [1\n    "x": 2\n}')
    text = errors(path)
    assert text.startswith(f"in {path}:\nline 4 column 5: a comma or a closing bracket")
    # hjson takes `True},` for a word and fails at the end of the file only; a comment is no reason.
    path.write_text('{\n  "train_batch_size": 8,\n  "bf16": {"enabled": True},\n  "zero_optimization": {"stage": 2}\n}')
    assert errors(path).startswith(f"in {path}:\nline 3 column 23: this is no value; JSON has")
    path.write_text('{\n  "train_batch_size": 8, // samples\n  "fp16": [1\n    "x": 2\n}')
    assert "line 4 column 8: " in errors(path)
    path.write_text('{\n  "fp16": {\n    "enabled": true\n  },\n  "bf16": [1,\n')
    assert errors(path).endswith(
        "line 5: the file ends too early: ']}' is missing, the first of it for the '[' of line 5"
    )
    path.write_text("\n")
    assert errors(path) == f"in {path}:\nthe file is empty, wanted an object {{...}}"


def test_world_size_that_does_not_fit_the_batch():
    assert errors({"train_batch_size": 10}, 4) == (
        "train_batch_size=10, train_micro_batch_size_per_gpu=(not given), "
        "gradient_accumulation_steps=(not given), world size 4: "
        "10 is not a multiple of world size 4; set train_batch_size to 8 or 12"
    )
    assert errors({"train_batch_size": 2}, 4) == (
        "train_batch_size=2, train_micro_batch_size_per_gpu=(not given), "
        "gradient_accumulation_steps=(not given), world size 4: "
        "2 is not a multiple of world size 4; set train_batch_size to 4"
    )
    assert errors({"train_batch_size": 20, "gradient_accumulation_steps": 3}, 4) == (
        "train_batch_size=20, train_micro_batch_size_per_gpu=(not given), gradient_accumulation_steps=3, "
        "world size 4: 20 is not a multiple of 3 x 4 = 12; set train_batch_size to 12 or 24, "
        "or gradient_accumulation_steps to a divisor of 5"
    )


def test_contradiction_of_the_triple():
    given = {
        "train_batch_size": 32,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
    }
    assert errors(given, 4) == (
        "train_batch_size=32, train_micro_batch_size_per_gpu=2, gradient_accumulation_steps=2, world size 4: "
        "2 x 2 x 4 = 16, not 32; set train_batch_size to 16, or gradient_accumulation_steps to 4, "
        "or train_micro_batch_size_per_gpu to 4"
    )


@pytest.mark.parametrize("steps", [None, 2])
def test_no_batch_size(steps):
    shown = "(not given)" if steps is None else steps
    assert errors({"gradient_accumulation_steps": steps}) == (
        "train_batch_size=(not given), train_micro_batch_size_per_gpu=(not given), "
        f"gradient_accumulation_steps={shown}, world size 1: "
        "the batch size is missing; set train_batch_size or train_micro_batch_size_per_gpu"
    )


def test_a_batch_size_of_a_wrong_type_is_said_once():
    assert errors({"train_batch_size": "big"}) == ("train_batch_size: got 'big', wanted an integer of at least 1")
    assert errors({"train_batch_size": 0}) == "train_batch_size: got 0, wanted an integer of at least 1"


def test_fp16_and_bf16_together():
    assert errors({"train_batch_size": 8, "fp16": {"enabled": True}, "bf16": {"enabled": True}}) == (
        "fp16.enabled and bf16.enabled: both are true; set one of them to false"
    )


def test_duplicate_keys(tmp_path):
    path = tmp_path / "zero.json"
    path.write_text('{"train_batch_size": 8, "train_batch_size": 8, "bf16": {"enabled": true, "enabled": false}}')
    assert errors(path) == (
        f"in {path}:\n"
        "key 'train_batch_size' is given twice (8, then 8); keep one\n"
        "bf16: key 'enabled' is given twice (true, then false); keep one"
    )


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (
            {"zero_optimization": {"stage": "2"}},
            "zero_optimization.stage: got '2', wanted an integer from 0 to 3",
        ),
        (
            {"zero_optimization": {"stage": 1.5}},
            "zero_optimization.stage: got 1.5, wanted an integer from 0 to 3",
        ),
        (
            {"zero_optimization": {"stage": True}},
            "zero_optimization.stage: got true, wanted an integer from 0 to 3",
        ),
        ({"zero_optimization": 2}, "zero_optimization: got 2, wanted an object {...}"),
        ({"bf16": True}, "bf16: got true, wanted an object {...}"),
        ({"bf16": {"enabled": 2}}, "bf16.enabled: got 2, wanted true or false"),
        ({"bfloat16": {"enabled": 2}}, "bfloat16.enabled: got 2, wanted true or false"),
        ({"gradient_clipping": -1}, "gradient_clipping: got -1, wanted a number of at least 0"),
        ({"gradient_clipping": float("nan")}, "gradient_clipping: got NaN, wanted a number of at least 0"),
        ({"steps_per_print": 0}, "steps_per_print: got 0, wanted an integer of at least 1, or inf"),
        ({"zero": {"units": [1]}}, "zero.units: got [1], wanted a list of strings"),
        ({"optimizer": {"type": 5}}, "optimizer.type: got 5, wanted a string"),
        ({"optimizer": {"params": {}}}, "optimizer: 'type' is missing"),
        ({"scheduler": {"params": {}}}, "scheduler: 'type' is missing"),
        ({"scheduler": {"type": "WarmupLR", "params": 3}}, "scheduler.params: got 3, wanted an object {...}"),
        (
            {"zero_optimization": {"offload_param": {"device": "disk"}}},
            "zero_optimization.offload_param.device: got 'disk', wanted one of 'none', 'cpu', 'nvme'",
        ),
        (
            {"zero_optimization": {"prefetch_bucket_size": 1.5}},
            "zero_optimization.prefetch_bucket_size: got 1.5, wanted an integer of at least 0",
        ),
        (
            {"communication_data_type": "int8"},
            "communication_data_type: got 'int8', wanted one of 'fp32', 'fp16', 'bf16'",
        ),
        (
            {"log_level": "loud"},
            "log_level: got 'loud', wanted one of 'debug', 'info', 'warning', 'error', 'critical'",
        ),
    ],
)
def test_wrong_types(given, text):
    first = errors({"train_batch_size": 8, **given}).splitlines()[0]
    assert first == text


def adam(**params) -> dict:
    return {"train_batch_size": 8, "optimizer": {"type": "Adam", "params": params}}


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({"lrr": 1}, "optimizer.params: unknown key 'lrr'; did you mean 'lr'?"),
        (
            {"betas": [0.9, 1.0]},
            "optimizer.params.betas: got [0.9, 1.0], wanted a list of two numbers in [0, 1)",
        ),
        ({"betas": 0.9}, "optimizer.params.betas: got 0.9, wanted a list of two numbers in [0, 1)"),
        ({"adam_w_mode": 2}, "optimizer.params.adam_w_mode: got 2, wanted true or false"),
        ({"amsgrad": True}, "optimizer.params.amsgrad: got true, wanted false; AMSGrad is not available"),
        (
            {"max_grad_norm": 0.5},
            "optimizer.params: 'max_grad_norm' is not an argument of the optimizer; "
            "set the top-level key gradient_clipping to 0.5",
        ),
    ],
)
def test_arguments_of_adam(params, text):
    assert errors(adam(**params)) == text


NEEDS_BF16 = (
    "optimizer.params.zero.master: 'remainder' needs bf16.enabled, because it is the lower half of a master "
    "whose upper half is the bf16 parameter; use 'fp32'"
)
OURS_ONLY = "our kernels run Adam, AdamW, Lamb, Lion, SGD and Adagrad only"


@pytest.mark.parametrize(
    ("kind", "params", "lines"),
    [
        ("Lion", {"eps": 1}, ["optimizer.params: unknown key 'eps'; known keys: lr, weight_decay, zero, betas"]),
        ("SGD", {"momentun": 1}, ["optimizer.params: unknown key 'momentun'; did you mean 'momentum'?"]),
        ("SGD", {"momentum": -1}, ["optimizer.params.momentum: got -1, wanted a number of at least 0"]),
        (
            "SGD",
            {"nesterov": True},
            ['optimizer.params: got {"nesterov": true}, wanted with nesterov a momentum above 0 and no dampening'],
        ),
        ("Adagrad", {"differentiable": True}, ["optimizer.params: unknown key 'differentiable'; known keys: lr, "]),
        ("AdamW", {"zero": 8}, ["optimizer.params.zero: got 8, wanted an object {...}"]),
        (
            "AdamW",
            {"zero": {"moment": "8bit", "master": "fp16"}, "lr": -1},
            [
                "optimizer.params.lr: got -1, wanted a number of at least 0",
                "optimizer.params.zero.master: got 'fp16', wanted one of 'fp32', 'remainder'",
                "optimizer.params.zero: unknown key 'moment'; did you mean 'moments'?",
            ],
        ),
        (
            "Muon",
            {"split": {"*.qkv": 0}},
            ['optimizer.params.split: got {"*.qkv": 0}, wanted numbers of parts, or lists of their rows, as {\'*.qkv'],
        ),
        (
            "Lion",
            {"zero": {"moments": "4bit", "master": "remainder"}},
            ["optimizer.params.zero.moments: got '4bit', wanted one of 'fp32', 'bf16', '8bit'", NEEDS_BF16],
        ),
        (
            "RMSprop",
            {"zero": {"moments": "8bit"}},
            [
                f"optimizer.params.zero: RMSprop runs as torch's own class here ({OURS_ONLY}), "
                "which keeps its state in fp32; leave it out"
            ],
        ),
        (
            "Adam",
            {"zero": {"moments": "8bit"}, "torch_adam": True},
            [
                "optimizer.params.zero: Adam runs as torch's own class here ('torch_adam' is true), "
                "which keeps its state in fp32; leave it out"
            ],
        ),
    ],
)
def test_arguments_of_our_optimizers(kind, params, lines):
    found = errors({"train_batch_size": 8, "optimizer": {"type": kind, "params": params}}).splitlines()
    assert len(found) == len(lines)
    assert all(text.startswith(line) for text, line in zip(found, lines, strict=True)), found


HOSTILE = (0, -1, 1.5, float("nan"), True, None, "", "x", [], [0], ["x"], {}, {"a": 0}, {"a": [1, "x"]}, {3: [[]]})


@pytest.mark.parametrize("kind", ARGUMENTS)
def test_every_argument_of_our_optimizers_is_named_where_it_is_wrong(kind):
    for name in ARGUMENTS[kind].model_fields:
        for value in HOSTILE:
            try:
                load({"train_batch_size": 8, "optimizer": {"type": kind, "params": {name: value}}}, 8)
            except ConfigError as error:
                assert all(line.startswith("optimizer.params") and name in line for line in error.errors)


def test_max_grad_norm_of_any_optimizer():
    given = {
        "train_batch_size": 8,
        "optimizer": {"type": "SGD", "params": {"max_grad_norm": 1, "nesterov": True}},
    }
    assert errors(given).startswith("optimizer.params: 'max_grad_norm' is not an argument of the optimizer")


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (
            {"fp16": {"fp16_master_weights_and_grads": True}},
            "fp16.fp16_master_weights_and_grads: masters are exact fp32 here; leave it out",
        ),
        (
            {"bf16": {"bf16_optimizer_states": True}},
            "bf16.bf16_optimizer_states: set optimizer.params.zero.moments to 'bf16' instead",
        ),
        (
            {"elasticity": {"enabled": True}},
            "elasticity: is not available in this release; set train_batch_size",
        ),
        (
            {"zero_optimization": {"zero_quantized_nontrainable_weights": True}},
            "zero_optimization.zero_quantized_nontrainable_weights: is not available; zero_quantized_weights and "
            "zero_quantized_gradients are, without it",
        ),
    ],
)
def test_feature_that_is_not_available(given, text):
    assert errors({"train_batch_size": 8, **given}) == text


def test_old_and_new_name_together():
    assert errors(zero(cpu_offload=False, offload_optimizer={"device": "none"})) == (
        "zero_optimization.cpu_offload and zero_optimization.offload_optimizer: "
        "an old and a new name of one key; keep the new"
    )
    assert errors(zero(prefetch_bucket_size=1, stage3_prefetch_bucket_size=1)) == (
        "zero_optimization.prefetch_bucket_size and zero_optimization.stage3_prefetch_bucket_size: "
        "two names of one key; keep zero_optimization.stage3_prefetch_bucket_size"
    )
    given = {"train_batch_size": 8, "bf16": {}, "bfloat16": {}}
    assert errors(given) == "bf16 and bfloat16: two names of one key; keep bf16"


@pytest.fixture
def said(caplog):
    log._said.cache_clear()
    caplog.set_level(logging.INFO, logger="zero")
    return lambda: [(record.levelname, record.getMessage()) for record in caplog.records]


def test_unknown_top_level_key_is_a_warning(said):
    load({"train_batch_size": 8, "zero_optimisation": {"stage": 3}, "stage": 3}, 1)
    assert said() == [
        (
            "WARNING",
            "unknown top-level key 'zero_optimisation' is ignored; did you mean 'zero_optimization'?",
        ),
        ("WARNING", "unknown top-level key 'stage' is ignored; it belongs in 'zero_optimization'"),
    ]


def test_the_warning_comes_with_an_error_too(said):
    errors({"train_batch_sise": 8})
    assert said() == [
        ("WARNING", "unknown top-level key 'train_batch_sise' is ignored; did you mean 'train_batch_size'?")
    ]


def test_keys_without_effect_are_said_once_in_one_line(said):
    given = zero(stage=3, overlap_comm=True, reduce_bucket_size=5e8) | {"aio": {"single_submit": True}}
    load(given, 1)
    load(given, 1)
    assert said() == [
        (
            "INFO",
            "keys of the config that have no effect: zero_optimization.overlap_comm, "
            "zero_optimization.reduce_bucket_size (the units decide what is reduced and gathered together); "
            "aio.single_submit (blocks go to the drive together, while others are on their way)",
        )
    ]


def test_the_old_name_of_the_workers_says_the_new_one(said):
    load({"train_batch_size": 8, "aio": {"thread_count": 4, "block_size": 4096}}, 1)
    assert said() == [
        (
            "INFO",
            "keys of the config that have no effect: aio.thread_count "
            "(DeepSpeed ignores it, too; intra_op_parallelism is the number of workers)",
        )
    ]


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [
        ("block_size", 0, "a multiple of 4096 from 4096 to 1073741824"),
        ("block_size", 5000, "a multiple of 4096 from 4096 to 1073741824"),
        ("block_size", "1M", "a multiple of 4096 from 4096 to 1073741824"),
        ("queue_depth", 0, "an integer from 1 to 4096"),
        ("intra_op_parallelism", -1, "an integer from 1 to 256"),
    ],
)
def test_numbers_of_aio(key, value, wanted):
    shown = f"'{value}'" if isinstance(value, str) else value
    assert errors({"train_batch_size": 8, "aio": {key: value}}) == f"aio.{key}: got {shown}, wanted {wanted}"


def test_only_rank_zero_speaks(said, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    load({"train_batch_size": 8, "zero_optimisation": {}}, 1)
    assert said() == []


def test_error_holds_its_lines_and_its_source(tmp_path):
    path = tmp_path / "zero.json"
    path.write_text('{"train_batch_size": 8, "bf16": {"enabled": 2}}')
    with pytest.raises(ConfigError) as caught:
        load(path, 1)
    assert caught.value.errors == ("bf16.enabled: got 2, wanted true or false",)
    assert caught.value.source == str(path)
    assert str(caught.value) == f"in {path}:\nbf16.enabled: got 2, wanted true or false"
