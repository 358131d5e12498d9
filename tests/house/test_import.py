"""`import zero` costs next to nothing, and every public name is there when it is asked for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

import zero

ROOT = Path(__file__).parents[2]

# Whoever touches one of these in a process that starts with this text fails.
FORBID = """
import importlib.abc, sys

class Forbid(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name in FORBIDDEN or name.split(".")[0] in FORBIDDEN:
            raise RuntimeError(f"touched {name}")

sys.meta_path.insert(0, Forbid())
"""


def fresh(code: str, forbidden: tuple[str, ...] = ()) -> Any:
    """Run `code` in a new interpreter and return the JSON that it prints last."""
    text = f"FORBIDDEN = {forbidden!r}\n{FORBID}\n{textwrap.dedent(code)}"
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-c", text],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_importing_zero_imports_nothing_heavy_and_loads_no_library() -> None:
    code = """
        import json, sys
        import zero
        from pathlib import Path
        maps = Path("/proc/self/maps")
        loaded = maps.read_text() if maps.exists() else ""
        libraries = [line for line in loaded.splitlines() if "libcuda" in line or "libtorch" in line]
        print(json.dumps([zero.__version__, list(sys.modules), libraries]))
    """
    version, modules, libraries = fresh(code, ("torch", "pydantic", "numpy", "zero._cpu", "zero._cuda"))
    assert version == zero.__version__
    homes = {name.split(".")[0] for name in modules}
    assert not {"torch", "pydantic", "pydantic_core", "numpy", "hjson", "safetensors", "psutil"} & homes
    assert [name for name in modules if name.split(".")[0] == "zero"] == ["zero"]
    assert libraries == []


@pytest.mark.parametrize(
    ("code", "more"),
    [
        ("import zero; zero.config, zero.plan, zero.launch, zero.log", ()),
        ("from zero.plan import layout, memory, order, sharding, units", ("pydantic", "numpy")),
    ],
    ids=["the lowest floor", "planning"],
)
def test_torch_and_compiled_code_are_not_needed(code: str, more: tuple[str, ...]) -> None:
    assert fresh(f"{code}; print(1)", ("torch", "zero._cpu", "zero._cuda", *more)) == 1


def test_a_star_import_brings_every_public_name_without_compiled_code_or_a_cuda_context() -> None:
    code = """
        import json, zero
        from zero import *
        missing = [name for name in zero.__all__ if globals().get(name) is None]
        import torch
        print(json.dumps([missing, torch.cuda.is_initialized(), zero.initialize is zero.engine.initialize]))
    """
    assert fresh(code, ("zero._cpu", "zero._cuda")) == [[], False, True]


def test_an_engine_trains_without_the_compiler() -> None:
    """Which takes more than a second to import, on every rank."""
    # zero.engine.initialize is a module too, and importing it must not put it in the place of the function.
    code = """
        import json
        import zero.engine.initialize
        import torch, zero
        settings = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW", "params": {"lr": 1.0}}}
        engine = zero.initialize(model=torch.nn.Linear(1, 1, bias=False), config=settings)[0]
        before = engine.module.weight.item()
        engine.backward(engine(torch.ones(1, 1)).sum())
        engine.step()
        same = zero.initialize is zero.engine.initialize
        print(json.dumps([engine.module.weight.item() < before - 0.9, same]))
    """
    assert fresh(code, ("torch._dynamo",)) == [True, True]


@pytest.mark.parametrize("name", zero.__all__)
def test_a_public_name_is_the_same_each_time_and_listed(name: str) -> None:
    assert getattr(zero, name) is getattr(zero, name)
    assert dir(zero).count(name) == 1


@pytest.mark.parametrize("name", ["initialise", "__wrapped__", "_cpu_"])
def test_an_unknown_name_is_an_attribute_error_that_says_it(name: str) -> None:
    with pytest.raises(AttributeError) as caught:
        getattr(zero, name)
    assert str(caught.value) == f"module 'zero' has no attribute '{name}'"
    assert not hasattr(zero, name)


def test_no_file_that_is_imported_by_its_own_name_hides_a_module_of_python() -> None:
    """The folders of benchmarks, examples and tests come before Python's own modules."""
    files = [path for folder in ("benchmarks", "examples", "tests") for path in (ROOT / folder).rglob("*.py")]
    assert len(files) > 200
    assert [str(path.relative_to(ROOT)) for path in files if path.stem in sys.stdlib_module_names] == []
