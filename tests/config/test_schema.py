"""The promise: `zero schema` accepts what the check accepts, and says of wrong keys and values what is wrong."""

from __future__ import annotations

import ast
import functools
import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from mistakes import CONFIGS

from zero.config import json_schema, load
from zero.tools.whole_schema import whole_schema

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").rglob("*.json"))
MICRO = {"train_micro_batch_size_per_gpu": 1}


@functools.cache
def validator() -> Any:
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads(json.dumps(whole_schema()))
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def problems(values: Any) -> list[str]:
    return [f"{error.json_path}: {error.message}" for error in validator().iter_errors(values)]


def optimizer(kind: str, **params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": kind, "params": params}}


def scheduler(kind: str, **params: Any) -> dict[str, Any]:
    return {"scheduler": {"type": kind, "params": params}}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"zero_optimization": {"stage": 4}}, "$.zero_optimization.stage: 4 is greater than the maximum of 3"),
        ({"zero_optimization": {"stge": 3}}, "$.zero_optimization: Additional properties are not allowed ('stge'"),
        ({"train_batch_size": 0}, "$.train_batch_size: 0 is less than the minimum of 1"),
        ({"train_batch_size": "many"}, "$.train_batch_size: 'many' is not of type 'integer'"),
        ({"bf16": {"enabled": "yes"}}, "$.bf16.enabled: 'yes' is not one of [True, False, 'auto']"),
        ({"bf16": True}, "$.bf16: True is not of type 'object'"),
        ({"data_types": {"grad_accum_dtype": "int8"}}, "$.data_types.grad_accum_dtype: 'int8' is not one of ['fp32'"),
        ({"zero": {"recompute": {"budget": []}}}, "$.zero.recompute.budget: [] is not of type 'integer', 'string'"),
        ({"steps_per_print": 0}, "$.steps_per_print: 0 is less than the minimum of 1"),
        ({"amp": {"enabled": True}}, "$.amp.enabled: True is not one of [False, 'auto']"),
        ({"sparse_gradients": True}, "$.sparse_gradients: True is not one of [False, 'auto']"),
        (optimizer("AdamX"), "$.optimizer.type: 'AdamX' is not one of ['Adadelta', 'Adagrad', 'Adam', 'Adamax', "),
        (optimizer("LBFGS"), "$.optimizer.type: 'LBFGS' is not one of"),
        (optimizer("aDamW", lrr=1), "$.optimizer.params: Additional properties are not allowed ('lrr'"),
        (optimizer("Adam", betas=[1.5, 0.9]), "$.optimizer.params.betas[0]: 1.5 is greater than or equal to the max"),
        (optimizer("Adam", zero={"moments": "4bit"}), "$.optimizer.params.zero.moments: '4bit' is not one of ['fp32'"),
        (optimizer("RMSprop", alpa=1), "$.optimizer.params: Additional properties are not allowed ('alpa'"),
        (optimizer("RMSprop", alpha="x"), "$.optimizer.params.alpha: 'x' is not of type 'number'"),
        (scheduler("Warmup"), "$.scheduler.type: 'Warmup' is not one of"),
        (scheduler("WarmupLR", warmup_num_step=3), "$.scheduler.params: Additional properties are not allowed"),
        (scheduler("WarmupLR", warmup_max_lr="high"), "$.scheduler.params.warmup_max_lr: 'high' is not of type 'num"),
        (scheduler("WarmupDecayLR"), "$.scheduler.params: 'total_num_steps' is a required property"),
        ({"scheduler": {"type": "WarmupDecayLR"}}, "$.scheduler: 'params' is a required property"),
        (scheduler("StepLR", step_size=3, gama=1), "$.scheduler.params: Additional properties are not allowed ('gama'"),
    ],
)
def test_a_wrong_file_is_rejected_with_one_message_that_says_what_is_wrong(values: dict[str, Any], said: str) -> None:
    (found,) = problems(values)
    assert found.startswith(said), found
    assert "valid under any" not in found


KNOWN = (
    *("stage 7", "typo", "three sections", "LBFGS", "OneBitAdam", "argument of torch"),
    *("value of a schedule", "unknown schedule", "schedule lacks", "not built"),
)
NO_JSON = ("empty file", "file ends", "no comma", "True")


@pytest.mark.parametrize("name", KNOWN)
def test_mistakes_of_the_error_table_that_a_schema_can_know_are_rejected(name: str) -> None:
    assert problems(eval(CONFIGS[name].lines, {"make": dict}))


@pytest.mark.long
def test_the_program_check_jsonschema_rejects_them_all(tmp_path: Path) -> None:
    """Ten files that are wrong by the schema, four that are no JSON, and one that is right, as a user checks them."""
    pytest.importorskip("check_jsonschema")
    (tmp_path / "schema.json").write_text(json.dumps(whole_schema()))
    (tmp_path / "right.json").write_text(json.dumps(optimizer("AdamW", lr=1e-3)))
    for name in KNOWN:
        (tmp_path / f"{name}.json").write_text(json.dumps(eval(CONFIGS[name].lines, {"make": dict})))
    for name in NO_JSON:
        text = re.search(r"file\((.*)\)\)$", CONFIGS[name].lines)
        (tmp_path / f"{name}.json").write_text(ast.literal_eval(text[1]))
    names = [f"{name}.json" for name in (*KNOWN, *NO_JSON, "right")]
    command = [sys.executable, "-m", "check_jsonschema", "--schemafile", "schema.json", "-o", "json", *names]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    told = json.loads(done.stdout)
    assert {error["filename"] for error in told["errors"]} == {f"{name}.json" for name in KNOWN}
    assert {error["filename"] for error in told["parse_errors"]} == {f"{name}.json" for name in NO_JSON}


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"$schema": "zero.schema.json", "a_key_of_another_program": 1},
        {"train_batch_size": "auto", "bf16": "auto", "optimizer": None, "fp16": {"enabled": "auto"}},
        {"steps_per_print": math.inf, "zero_optimization": {"stage": 2, "cpu_offload": True}},
        {"zero_optimization": {"prefetch_bucket_size": 5}},
        optimizer("aDAMw", lr="auto", betas="auto", zero={"moments": "8bit"}),
        optimizer("RMSprop", alpha=0.9, centered=True),
        optimizer("SGD", maximize=True),
        scheduler("WarmupLR", warmup_max_lr=[1e-3, 1], warmup_type="linear", warmup_min_lr="auto"),
        scheduler("StepLR", step_size=3, gamma=1),
        scheduler("OneCycleLR", max_lr=1, total_steps=5),
    ],
)
def test_a_right_file_is_accepted(values: dict[str, Any]) -> None:
    assert problems(values) == []
    load({**MICRO, **values}, 1, filled=False)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_the_files_of_the_examples_are_accepted(path: Path) -> None:
    assert problems(json.loads(path.read_text())) == []


def test_the_key_of_editors_is_no_unknown_key(caplog: pytest.LogCaptureFixture) -> None:
    load({**MICRO, "$schema": "file.json"}, 1)
    assert "$schema" not in caplog.text
    load({**MICRO, "$scheme": "file.json"}, 1)
    assert "unknown top-level key '$scheme'" in caplog.text


def test_each_key_has_a_description_and_editors_see_old_names() -> None:
    schema = whole_schema()
    assert schema["properties"]["gradient_clipping"]["description"]
    assert schema["$defs"]["ZeroOptimization"]["properties"]["cpu_offload"]["deprecated"] is True
    assert {"bf16", "bfloat16"} <= set(schema["properties"])


def test_without_torch_any_type_passes_and_our_arguments_are_known() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    known = jsonschema.Draft202012Validator(json_schema())
    assert known.is_valid(optimizer("Other", x=1))
    assert known.is_valid(scheduler("Other", x=1))
    assert not known.is_valid(optimizer("Lion", x=1))
