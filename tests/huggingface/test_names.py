"""The promise: docs/deepspeed.md lists every name of the adapter, and those that it calls missing are."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import zero.utils
from zero.deepspeed_names import INSTEAD

ROOT = Path(__file__).parents[2]
SITE = ROOT / "zero" / "as_deepspeed" / "site"
SECTION = (ROOT / "docs" / "deepspeed.md").read_text().split("\n## Names of `deepspeed`\n")[1].split("\n## ")[0]
ROWS = [line.strip("|").split("|") for line in SECTION.splitlines() if line.startswith("| `")]
STATUS = {name: cells[1].strip() for cells in ROWS for name in re.findall(r"`([^`]+)`", cells[0])}

# What a program with a door open finds of these names, and what each module gets from elsewhere.
ASK = """
import importlib, json, sys
import zero.as_deepspeed
import deepspeed

def there(name):
    here = deepspeed
    for part in name.split(".")[1:]:
        try:
            here = getattr(here, part)
        except AttributeError as error:
            return str(error)
    return ""

names, modules = json.loads(sys.argv[1])
found = {name: there(name) for name in names}
modules += [f"deepspeed.{name}" for name in deepspeed._modules.MODULES]
got = {name: sorted(getattr(getattr(importlib.import_module(name), "__getattr__", 0), "names", ())) for name in modules}
print(json.dumps([found, got]))
"""


def modules() -> dict[str, Path]:
    files = {path.relative_to(SITE).with_suffix("").parts: path for path in (SITE / "deepspeed").rglob("*.py")}
    public = {parts: path for parts, path in files.items() if parts[-1] == "__init__" or parts[-1][0] != "_"}
    return {".".join(parts).removesuffix(".__init__"): path for parts, path in public.items()}


def defined(path: Path) -> set[str]:
    """Public functions, classes and values of a file."""
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Assign):
            stored = [each for target in node.targets for each in ast.walk(target)]
            found |= {each.id for each in stored if isinstance(each, ast.Name)}
    return {name for name in found if not name.startswith("_")}


# Texts one after the other, in one process: to import what they look at takes seconds.
RUN = """
import json, sys
for code, asked in json.loads(sys.argv[1]):
    sys.argv[1] = json.dumps(asked)
    exec(code, {"__name__": "__main__"})
"""


@pytest.fixture(scope="module")
def answers() -> list[Any]:
    """What MODULES, KINDS and ASK print."""
    texts = [(MODULES, [*WANTED, *OTHERS]), (KINDS, None), (ASK, [list(STATUS), list(modules())])]
    words = [sys.executable, "-c", RUN, json.dumps(texts)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()[-len(texts) :]]


def test_the_page_has_all_names_of_the_adapter_and_no_others(answers: list[Any]) -> None:
    found, got = answers[2]
    wrong = {name: said for name, said in found.items() if bool(said) != (STATUS[name] == "no")}
    assert not wrong
    assert all("is not in zero, which is here as deepspeed: " in said for said in found.values() if said)
    everywhere = {f"{module}.{name}" for module, path in modules().items() for name in defined(path)}
    everywhere |= {f"{module}.{name}" for module, names in got.items() for name in names if name[0] != "_"}
    of_utils = {f"deepspeed.utils.{name}" for name in zero.utils.__all__}
    listed = {name for name, status in STATUS.items() if status != "no"}
    assert everywhere - of_utils - listed == set(), "names that the page lacks"
    assert len(listed) > 80


MODULES = """
import importlib, importlib.util, json, sys
import zero.as_deepspeed
said = {}
for name in json.loads(sys.argv[1]):
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        said[name] = [error.name, str(error)]
print(json.dumps([said, importlib.util.find_spec("deepspeed.inference") is None]))
"""


THEMSELVES = "module_inject.auto_tp accelerator.abstract_accelerator comm.torch profiling.flops_profiler.profiler "
THEMSELVES += "moe.sharded_moe runtime.zero.mics utils.nvtx"
WANTED = {
    "deepspeed.inference.v2.modules": "deepspeed.inference",
    "deepspeed.runtime.domino.transformer": "deepspeed.runtime.domino",
    **{f"deepspeed.{name}": f"deepspeed.{name}" for name in THEMSELVES.split()},
}
OTHERS = ["deepspeed.runtime.of_nobody", "of_nobody", "deepspeed.compression.helper"]


def test_a_module_that_is_not_here_says_what_to_use(answers: list[Any]) -> None:
    said, unseen = answers[0]
    for name, missing in WANTED.items():
        assert said.pop(name) == [missing, f"{missing} is not in zero, which is here as deepspeed: {INSTEAD[missing]}"]
    page = "is not in zero, which is here as deepspeed: docs/deepspeed.md says what there is"
    assert said == {
        "deepspeed.runtime.of_nobody": ["deepspeed.runtime.of_nobody", f"deepspeed.runtime.of_nobody {page}"],
        "of_nobody": ["of_nobody", "No module named 'of_nobody'"],
    }
    assert unseen, "who only asks is told that it is not there"


# What DeepSpeed's own tests import, beside what the page's test asks for.
KINDS = """
import json
import zero.as_deepspeed
from deepspeed.pipe import DualPipeVModule
from deepspeed.checkpoint.utils import get_model_ckpt_name_for_rank
from deepspeed.git_version_info import torch_info
from deepspeed.ops import __compatible_ops__, op_builder
from deepspeed.utils.torch import required_torch_version

class Pipe(DualPipeVModule):
    def __init__(self):
        super().__init__(layers=[])

said = {}
for made in (Pipe, get_model_ckpt_name_for_rank, op_builder.FusedAdamBuilder().load):
    try:
        made()
    except NotImplementedError as error:
        said[made.__name__] = str(error)
builders = op_builder.CPUAdamBuilder, op_builder.FusedLambBuilder, op_builder.InferenceBuilder
there = [builder().is_compatible() for builder in builders]
torch = [required_torch_version(2.0), required_torch_version("2.10", "99.0"), required_torch_version(99)]
torch.append(torch_info["version"])
print(json.dumps([said, there, torch]))
"""


def test_what_is_refused_can_be_imported_and_says_what_to_use_where_it_is_made(answers: list[Any]) -> None:
    said, there, versions = answers[1]
    names = ["pipe.DualPipeVModule", "checkpoint.utils.get_model_ckpt_name_for_rank"]
    for text, name in zip(said.values(), [f"deepspeed.{name}" for name in names], strict=False):
        assert text == f"{name} is not in zero, which is here as deepspeed: {INSTEAD[name]}"
    assert said["load"].startswith("FusedAdamBuilder.load(): zero, which is here as deepspeed, has no such module")
    assert there == [True, True, False]
    assert versions == [True, tuple(map(int, versions[3].split("."))) >= (2, 10), False, versions[3]]
