"""What a wrong config says: the texts are part of the interface, so they are compared whole."""

import json
import logging

import pytest
from told import as_told, cases

from zero import log
from zero.config import ConfigError, load
from zero.config.optimizers import ARGUMENTS

WANTED = "wanted the path of a JSON or hjson file, or a dict"
HOSTILE = (0, -1, 1.5, float("nan"), True, None, "", "x", [], [0], ["x"], {}, {"a": 0}, {"a": [1, "x"]}, {3: [[]]})

# What stands before an object is the number of ranks, 1 where there is none; the batch size is 8.

KEYS = """\
{"zero_optimization": {"stge": 2}}
    zero_optimization: unknown key 'stge'; did you mean 'stage'?
{"zero_optimization": {"offload_param": {"devise": "none"}}}
    zero_optimization.offload_param: unknown key 'devise'; did you mean 'device'?
{"zero_optimization": {"gradient_clipping": 1.0}}
    zero_optimization: unknown key 'gradient_clipping'; it belongs at the top level
{"zero_optimisation": {"stage": 3}, "stage": 3, "ZeRO": {}, "fp_16": {"enabled": true}, "gradient_clip": 0.5}
    unknown top-level key 'zero_optimisation'; did you mean 'zero_optimization'?
    unknown top-level key 'stage'; it belongs in 'zero_optimization'
    unknown top-level key 'ZeRO'; did you mean 'zero'?
    unknown top-level key 'fp_16'; did you mean 'fp16'?
    unknown top-level key 'gradient_clip'; did you mean 'gradient_clipping'?
{"zero_opt": {"stage": 2}, "offload_optimiser": {"device": "cpu"}, "overlap_comm": true, "optim": {"type": "AdamW"}}
    unknown top-level key 'zero_opt'; did you mean 'zero_optimization'?
    unknown top-level key 'offload_optimiser'; did you mean 'offload_optimizer' in 'zero_optimization'?
    unknown top-level key 'overlap_comm'; it belongs in 'zero_optimization'
    unknown top-level key 'optim'; did you mean 'optimizer'?
{"fp16": {"fp16": true}, "bfloat16": {"bfloat16": true}}
    fp16: unknown key 'fp16'; did you mean 'enabled'?
    bfloat16: unknown key 'bfloat16'; did you mean 'enabled'?
{"zero": {"profile": {"steps": [1, 2], "xyzzy": 1}}}
    zero.profile: unknown key 'xyzzy'; known keys: steps, dir, ranks
{"zero_optimization": {"xyzzy": 1}}
    zero_optimization: unknown key 'xyzzy'; `zero schema` lists the known keys
{"fp16": {"enabled": true}, "bf16": {"enabled": true}}
    fp16.enabled and bf16.enabled: both are true; set one of them to false
{"tensor_parallel": {"partition_config": {"layer_specs": [{"patterns": ["*a"]}, {"pattern": "a"}, 3, {"shape": \
[["b"], -1]}]}}}
    tensor_parallel.partition_config.layer_specs[0].patterns: got ["*a"], wanted regular expressions, of which '*a' \
is none: nothing to repeat at position 0
    tensor_parallel.partition_config.layer_specs[1]: unknown key 'pattern'; did you mean 'patterns'?
    tensor_parallel.partition_config.layer_specs[2]: got 3, wanted an object {...}
    tensor_parallel.partition_config.layer_specs[3].shape: got [["b"], -1], wanted a list such as [3, -1] or \
[[64, 16, 16], -1]
{"tensor_parallel": {"partition_config": {"layer_specs": [{"shape": [2, -1], "partition_type": "row"}, \
{"shape": [2, -1], "partition_dim": 1}]}}}
    tensor_parallel.partition_config.layer_specs[0].shape: got [2, -1], wanted two entries as in [-1, 3] or \
[-1, [64, 16, 16]] for a row
    tensor_parallel.partition_config.layer_specs[1].partition_dim: got 1, wanted 0, the dim of a column
{"tensor_parallel": {"partition_config": {"layer_specs": {"patterns": "a"}}}}
    tensor_parallel.partition_config.layer_specs: got {"patterns": "a"}, wanted a list of objects
2 {"expert_parallel": {"enabled": true, "autoep_size": 2}, "zero": {"reduce": "tree"}}
    zero.reduce: got 'tree' with ep 2, and gradients of experts have another order of sums; use 'auto'
2 {"tensor_parallel": {"autotp_size": 2, "reduce": "tree"}}
    tensor_parallel.reduce: got 'tree' with zero.reduce 'auto', whose norms, and on other data ranks gradients, have \
other bits; set zero.reduce to 'tree', too
4 {"tensor_parallel": {"autotp_size": 2}, "data_parallel_size": 4}
    data_parallel_size: got 4, and the other sizes make it 2
{"zero_optimization": {"cpu_offload": false, "offload_optimizer": {"device": "none"}}}
    zero_optimization.cpu_offload and zero_optimization.offload_optimizer: an old and a new name of one key; keep the \
new
{"zero_optimization": {"prefetch_bucket_size": 1, "stage3_prefetch_bucket_size": 1}}
    zero_optimization.prefetch_bucket_size and zero_optimization.stage3_prefetch_bucket_size: two names of one key; \
keep zero_optimization.stage3_prefetch_bucket_size
{"bf16": {}, "bfloat16": {}}
    bf16 and bfloat16: two names of one key; keep bf16
4 {"train_batch_size": 30, "train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 4, "stge": 1, \
"offload_optimizer": {"device": "cpu", "super_offload": true}}, "fp16": {"enabled": "yes"}, "optimizer": {"type": \
"AdamW", "params": {"lr": -1}}}
    zero_optimization.offload_optimizer.super_offload: is not available; leave it out
    zero_optimization.stage: got 4, wanted an integer from 0 to 3
    zero_optimization: unknown key 'stge'; did you mean 'stage'?
    fp16.enabled: got 'yes', wanted true or false
    optimizer.params.lr: got -1, wanted a number of at least 0
    train_batch_size=30, train_micro_batch_size_per_gpu=4, gradient_accumulation_steps=(not given), world size 4: 30 \
is not a multiple of 4 x 4 = 16; set train_batch_size to 16 or 32
"""

BATCH_SIZES = """\
4 {"train_batch_size": 10}
    train_batch_size=10, train_micro_batch_size_per_gpu=(not given), gradient_accumulation_steps=(not given), world \
size 4: 10 is not a multiple of world size 4; set train_batch_size to 8 or 12
4 {"train_batch_size": 20, "gradient_accumulation_steps": 3}
    train_batch_size=20, train_micro_batch_size_per_gpu=(not given), gradient_accumulation_steps=3, world size 4: 20 \
is not a multiple of 3 x 4 = 12; set train_batch_size to 12 or 24, or gradient_accumulation_steps to a divisor of 5
4 {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}
    train_batch_size=32, train_micro_batch_size_per_gpu=2, gradient_accumulation_steps=2, world size 4: 2 x 2 x 4 = \
16, not 32; set train_batch_size to 16, or gradient_accumulation_steps to 4, or train_micro_batch_size_per_gpu to 4
{"train_batch_size": null}
    train_batch_size=(not given), train_micro_batch_size_per_gpu=(not given), gradient_accumulation_steps=(not \
given), world size 1: the batch size is missing; set train_batch_size or train_micro_batch_size_per_gpu
{"train_batch_size": "big"}
    train_batch_size: got 'big', wanted an integer of at least 1
{"train_batch_size": 0}
    train_batch_size: got 0, wanted an integer of at least 1
"""

VALUES = """\
{"zero_optimization": {"stage": "2"}}
    zero_optimization.stage: got '2', wanted an integer from 0 to 3
{"zero_optimization": {"stage": true}}
    zero_optimization.stage: got true, wanted an integer from 0 to 3
{"zero_optimization": 2}
    zero_optimization: got 2, wanted an object {...}
{"bf16": true}
    bf16: got true, wanted an object {...}
{"bf16": {"enabled": 2}}
    bf16.enabled: got 2, wanted true or false
{"gradient_clipping": NaN}
    gradient_clipping: got NaN, wanted a number of at least 0
{"steps_per_print": 0}
    steps_per_print: got 0, wanted an integer of at least 1, or inf
{"zero": {"units": [1]}}
    zero.units: got [1], wanted a list of strings
{"optimizer": {"type": 5}}
    optimizer.type: got 5, wanted a string
{"optimizer": {"params": {}}}
    optimizer: 'type' is missing
{"scheduler": {"params": {}}}
    scheduler: 'type' is missing
{"scheduler": {"type": "WarmupLR", "params": 3}}
    scheduler.params: got 3, wanted an object {...}
{"zero_optimization": {"offload_param": {"device": "disk"}}}
    zero_optimization.offload_param.device: got 'disk', wanted one of 'none', 'cpu', 'nvme'
{"zero_optimization": {"prefetch_bucket_size": 1.5}}
    zero_optimization.prefetch_bucket_size: got 1.5, wanted an integer of at least 0
{"communication_data_type": "int8"}
    communication_data_type: got 'int8', wanted one of 'fp32', 'fp16', 'bf16'
{"log_level": "loud"}
    log_level: got 'loud', wanted one of 'debug', 'info', 'warning', 'error', 'critical'
{"aio": {"block_size": 5000}}
    aio.block_size: got 5000, wanted a multiple of 4096 from 4096 to 1073741824
{"aio": {"queue_depth": 0}}
    aio.queue_depth: got 0, wanted an integer from 1 to 4096
{"aio": {"intra_op_parallelism": -1}}
    aio.intra_op_parallelism: got -1, wanted an integer from 1 to 256
{"gradient_clipping": null}
    gradient_clipping: got null, wanted a number of at least 0; leave it out for 1.0
{"zero_optimization": {"sub_group_size": null}}
    zero_optimization.sub_group_size: got null, wanted an integer of at least 0; leave it out for 1000000000
"""

OPTIMIZERS = """\
{"optimizer": {"type": "Adam", "params": {"lrr": 1}}}
    optimizer.params: unknown key 'lrr'; did you mean 'lr'?
{"optimizer": {"type": "Adam", "params": {"betas": [0.9, 1.0]}}}
    optimizer.params.betas: got [0.9, 1.0], wanted a list of two numbers in [0, 1)
{"optimizer": {"type": "Adam", "params": {"amsgrad": true}}}
    optimizer.params.amsgrad: got true, wanted false; AMSGrad is not available
{"optimizer": {"type": "Adam", "params": {"max_grad_norm": 0.5}}}
    optimizer.params: 'max_grad_norm' is not an argument of the optimizer; set the top-level key gradient_clipping to \
0.5
{"optimizer": {"type": "Lamb", "params": {"eps_inside_sqrt": true}}}
    optimizer.params.eps_inside_sqrt: got true, wanted false; eps is added to the root
{"optimizer": {"type": "Lamb", "params": {"min_coeff": 2, "max_coeff": 1}}}
    optimizer.params: got {"min_coeff": 2, "max_coeff": 1}, wanted min_coeff to be at most max_coeff
{"optimizer": {"type": "Lion", "params": {"eps": 1}}}
    optimizer.params: unknown key 'eps'; known keys: lr, weight_decay, zero, betas
{"optimizer": {"type": "SGD", "params": {"momentun": 1}}}
    optimizer.params: unknown key 'momentun'; did you mean 'momentum'?
{"optimizer": {"type": "SGD", "params": {"nesterov": true}}}
    optimizer.params: got {"nesterov": true}, wanted with nesterov a momentum above 0 and no dampening
{"optimizer": {"type": "Adagrad", "params": {"differentiable": true}}}
    optimizer.params: unknown key 'differentiable'; known keys: lr, weight_decay, zero, maximize, foreach, fused, \
lr_decay, eps, initial_accumulator_value
{"optimizer": {"type": "AdamW", "params": {"zero": 8}}}
    optimizer.params.zero: got 8, wanted an object {...}
{"optimizer": {"type": "AdamW", "params": {"zero": {"moment": "8bit", "master": "fp16"}, "lr": -1}}}
    optimizer.params.lr: got -1, wanted a number of at least 0
    optimizer.params.zero.master: got 'fp16', wanted one of 'fp32', 'remainder'
    optimizer.params.zero: unknown key 'moment'; did you mean 'moments'?
{"optimizer": {"type": "Muon", "params": {"split": {"*.qkv": 0}}}}
    optimizer.params.split: got {"*.qkv": 0}, wanted numbers of parts, or lists of their rows, as {'*.qkv.weight': 3}
{"optimizer": {"type": "Lion", "params": {"zero": {"moments": "4bit", "master": "remainder"}}}}
    optimizer.params.zero.moments: got '4bit', wanted one of 'fp32', 'bf16', '8bit'
    optimizer.params.zero.master: 'remainder' needs bf16.enabled, because it is the lower half of a master whose \
upper half is the bf16 parameter; use 'fp32'
{"optimizer": {"type": "RMSprop", "params": {"zero": {"moments": "8bit"}}}}
    optimizer.params.zero: RMSprop runs as torch's own class here (our kernels run Adam, AdamW, Lamb, Lion, SGD and \
Adagrad only), which keeps its state in fp32; leave it out
{"optimizer": {"type": "Adam", "params": {"zero": {"moments": "8bit"}, "torch_adam": true}}}
    optimizer.params.zero: Adam runs as torch's own class here ('torch_adam' is true), which keeps its state in fp32; \
leave it out
{"optimizer": {"type": "SGD", "params": {"max_grad_norm": 1, "nesterov": true}}}
    optimizer.params: 'max_grad_norm' is not an argument of the optimizer; set the top-level key gradient_clipping to \
1
    optimizer.params: got {"nesterov": true}, wanted with nesterov a momentum above 0 and no dampening
"""

PRECISION = """\
{"fp16": {"enabled": true}, "torch_autocast": {"enabled": true, "dtype": "bf16"}}
    torch_autocast.dtype: got 'bf16', wanted 'fp16', which fp16.enabled makes the parameters
{"bfloat16": {"enabled": true}, "torch_autocast": {"enabled": true, "dtype": "torch.float16"}}
    torch_autocast.dtype: got 'fp16', wanted 'bf16', which bf16.enabled makes the parameters
{"torch_autocast": {"enabled": true, "dtype": "float32"}}
    torch_autocast.dtype: got 'fp32', wanted one of 'bf16', 'fp16'
{"data_types": {"param_dtype": "bf16"}}
    data_types.param_dtype: got 'bf16', but without fp16.enabled or bf16.enabled they are fp32; set it to 'fp32', or \
switch on bf16.enabled instead
{"fp16": {"enabled": true}, "data_types": {"param_dtype": "fp32"}}
    data_types.param_dtype: got 'fp32', but fp16.enabled makes them fp16; set it to 'fp16'
{"gradient_predivide_factor": 0}
    gradient_predivide_factor: got 0, wanted a number above 0
{"fp16": {"enabled": true, "hysteresis": 0}}
    fp16.hysteresis: got 0, wanted an integer of at least 1 for a dynamic loss scale
{"torch_autocast": {"enabled": true, "dtype": "fp16"}, "fp16": {"loss_scale_window": 0}}
    fp16.loss_scale_window: got 0, wanted an integer of at least 1 for a dynamic loss scale
{"fp16": {"enabled": true, "initial_scale_power": 65}}
    fp16.initial_scale_power: got 65, wanted an integer from 0 to 64
{"fp16": {"enabled": true, "initial_scale_power": 4, "min_loss_scale": 17}}
    fp16.min_loss_scale: got 17, wanted at most 2 ** fp16.initial_scale_power = 16, where the scale starts
"""

SHARDS = """\
4 {"zero_optimization": {"stage": 2, "zero_quantized_weights": true}}
    zero_optimization.zero_quantized_weights: got true with zero_optimization.stage 2, where parameters are not \
gathered for their use; set the stage to 3, or leave it out
4 {"zero_optimization": {"zero_quantized_gradients": true}}
    zero_optimization.zero_quantized_gradients: got true with zero_optimization.stage 0, where every rank needs the \
whole sum; set the stage to 1, 2 or 3, or leave it out
4 {"zero_optimization": {"stage": 2, "zero_quantized_gradients": true}, "zero": {"reduce": "tree"}}
    zero_optimization.zero_quantized_gradients: got true with zero.reduce 'tree', whose sum no world size changes; \
keep one of the two
4 {"zero_optimization": {"stage": 2, "zero_quantized_gradients": true}, "communication_data_type": "bf16"}
    zero_optimization.zero_quantized_gradients: got true with communication_data_type 'bf16', another form of what \
travels; keep one of the two
4 {"zero": {"shard_size": 2}, "zero_optimization": {"mics_shard_size": 4, "stage": 3}}
    zero.shard_size and zero_optimization.mics_shard_size: got 2 and 4 for one size; keep one of them
4 {"zero_optimization": {"mics_shard_size": 2}}
    zero_optimization.mics_shard_size: got 2 with zero_optimization.stage 0, where every rank keeps all state; set \
the stage to 1, 2 or 3, or leave it out
4 {"zero": {"shard_size": 3}, "zero_optimization": {"stage": 1}}
    zero.shard_size: got 3, wanted a divisor of world size 4: 1, 2, 4
4 {"zero_optimization": {"mics_shard_size": 8, "stage": 2}}
    zero_optimization.mics_shard_size: got 8, wanted a divisor of world size 4: 1, 2, 4
4 {"zero_optimization": {"mics_shard_size": -2, "stage": 2}}
    zero_optimization.mics_shard_size: got -2, wanted an integer of at least -1
4 {"zero_optimization": {"zero_hpz_partition_size": 3, "stage": 2}}
    zero_optimization.zero_hpz_partition_size: got 3 with zero_optimization.stage 2, which keeps whole parameters on \
every rank; set the stage to 3, or leave it out
    zero_optimization.zero_hpz_partition_size: got 3, wanted a divisor of world size 4: 1, 2, 4
4 {"zero": {"shard_size": 2}, "zero_optimization": {"zero_hpz_partition_size": 2, "stage": 3}}
    zero_optimization.zero_hpz_partition_size: got 2 with zero.shard_size 2; it is for state that is cut over all \
ranks, keep one of the two
"""

OFFLOAD = """\
{"zero_optimization": {"stage": 0, "offload_optimizer": {"device": "cpu"}}}
    zero_optimization.offload_optimizer.device: got 'cpu' with zero_optimization.stage 0, where every rank keeps and \
updates all state; set the stage to 1, 2 or 3
{"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}
    zero_optimization.offload_param.device: got 'cpu' with zero_optimization.stage 2, which keeps whole parameters on \
the device; set the stage to 3, or leave offload_param out
{"zero_optimization": {"stage": 0, "cpu_offload": true}}
    zero_optimization.offload_optimizer.device: got 'cpu' with zero_optimization.stage 0, where ...
{"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": "half"}}}
    zero_optimization.offload_optimizer.ratio: got 'half', wanted a number from 0 to 1, or 'auto'
{"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 1.5}}}
    zero_optimization.offload_optimizer.ratio: got 1.5, wanted a number from 0 to 1, or 'auto'
{"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": true}}}
    zero_optimization.offload_optimizer.ratio: got true, wanted a number from 0 to 1, or 'auto'
{"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": null}}}
    zero_optimization.offload_optimizer.nvme_path: is missing; device 'nvme' needs a folder on a fast local drive
{"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}
    zero_optimization.offload_param.nvme_path: is missing; device 'nvme' needs a folder on a fast local drive
{"zero_optimization": {"stage": 2, "offload_optimizer": {"zero": {"update": "gpu"}}}}
    zero_optimization.offload_optimizer.zero.update: got 'gpu' with offload_optimizer.device 'none', where state is ...
{"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "zero": {"update": "tpu"}}}}
    zero_optimization.offload_optimizer.zero.update: got 'tpu', wanted one of 'host', 'gpu', 'auto'
"""

RUNS = """\
{"zero": {"recompute": {"modules": ["Block"], "policy": "selective", "ops": ["gelu"]}}}
    zero.recompute.ops: got ['gelu'] with policy 'selective'; keep one of the two
{"zero": {"recompute": {"modules": ["Block"], "policy": "auto"}}}
    zero.recompute.budget: is missing; policy 'auto' fits activations into it, such as '12 GiB'
{"zero": {"recompute": {"modules": ["Block"], "budget": 5}}}
    zero.recompute.budget: got 5; only policy 'auto' has one, leave it out
{"zero": {"recompute": {"modules": ["Block"], "products": 2}}}
    zero.recompute.products: got 2; policy 'full' keeps no products, leave it out
{"zero": {"recompute": {"modules": ["Block"], "policy": "none"}}}
    zero.recompute.policy: got 'none', wanted one of 'full', 'selective', 'auto'
{"zero": {"recompute": {"modules": ["Block"], "every": 0}}}
    zero.recompute.every: got 0, wanted an integer of at least 1
{"zero": {"recompute": {"modules": ["Block"], "budget": "12 GB/s"}}}
    zero.recompute.budget: got '12 GB/s', wanted a number of bytes above 0, such as 1073741824 or '1 GiB'
{"zero": {"recompute": {"modules": ["Block"], "polices": "full"}}}
    zero.recompute: unknown key 'polices'; did you mean 'policy'?
{"zero": {"profile": {"steps": [4, 2]}}}
    zero.profile.steps: got [4, 2], wanted the first step and then the last, such as [10, 12]
{"zero": {"profile": {"dir": "x"}}}
    zero.profile.steps: is missing; give the first and the last step of the trace, such as [10, 12]
{"zero": {"profile": {"steps": [0, 2]}}}
    zero.profile.steps: got [0, 2], wanted a list of two integers of at least 1, as [10, 12]
"""


def errors(source, world_size=1) -> str:
    with pytest.raises(ConfigError) as caught:
        load(source, world_size)
    return str(caught.value)


@pytest.mark.parametrize(
    ("given", "told"),
    cases(KEYS + BATCH_SIZES + VALUES + OPTIMIZERS + PRECISION + SHARDS + OFFLOAD + RUNS),
    ids=lambda text: text[:60],
)
def test_what_is_said(given, told):
    ranks, start, keys = given.partition("{")
    found = errors({"train_batch_size": 8, **json.loads(start + keys)}, int(ranks or 1))
    assert as_told(found, told)


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


def test_duplicate_keys(tmp_path):
    path = tmp_path / "zero.json"
    path.write_text('{"train_batch_size": 8, "train_batch_size": 8, "bf16": {"enabled": true, "enabled": false}}')
    with pytest.raises(ConfigError) as caught:
        load(path, 1)
    assert caught.value.source == str(path)
    assert caught.value.errors == (
        "key 'train_batch_size' is given twice (8, then 8); keep one",
        "bf16: key 'enabled' is given twice (true, then false); keep one",
    )
    assert str(caught.value) == "\n".join([f"in {path}:", *caught.value.errors])


@pytest.mark.parametrize("kind", ARGUMENTS)
def test_every_argument_of_our_optimizers_is_named_where_it_is_wrong(kind):
    for name in ARGUMENTS[kind].model_fields:
        for value in HOSTILE:
            try:
                load({"train_batch_size": 8, "optimizer": {"type": kind, "params": {name: value}}}, 8)
            except ConfigError as error:
                assert all(line.startswith("optimizer.params") and name in line for line in error.errors)


@pytest.fixture
def said(caplog):
    log._said.cache_clear()
    caplog.set_level(logging.INFO, logger="zero")
    return lambda: [(record.levelname, record.getMessage()) for record in caplog.records]


def test_a_top_level_key_of_another_program_is_a_warning_and_a_comment_is_nothing(said):
    """Names from published files, and those that Megatron, vLLM and TRL have; most resemble one of ours a little."""
    plain = "cuda_visible_devices model_parallel_size tensor_parallel_size static_loss_scale type name enabled steps"
    others = dict.fromkeys([*plain.split(), "zero_optimization.reduce_bucket_size"], 1)
    others |= {"eigenvalue": {"enabled": True}, "distributed": {"init_method": "env://"}, "comments": {"device": "x"}}
    comments = {"_comment": "x", "//": "x", "zero_optimization": {"_stage": 3, "stage": 1}}
    assert load({"train_batch_size": 8, **comments, **others}, 1).zero_optimization.stage == 1
    assert [(level, text.split(" is ignored")[0]) for level, text in said()] == [
        ("WARNING", f"unknown top-level key '{name}'") for name in others
    ]


def test_keys_without_effect_are_said_once_in_one_line(said):
    section = {"stage": 3, "overlap_comm": True, "reduce_bucket_size": 5e8}
    given = {"train_batch_size": 8, "zero_optimization": section, "aio": {"single_submit": True}}
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


def test_only_rank_zero_speaks(said, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    load({"train_batch_size": 8, "seed": 1}, 1)
    assert said() == []
