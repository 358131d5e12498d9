"""The promise: type checkers, and so editors, know the names and arguments of zero.

They find each error of a script with planted ones, and none in one that is right; pyright none in the documentation.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from marks import needs
from pages import PAGES, blocks, files, session

import zero

ROOT = Path(__file__).parents[2]

RIGHT = """
import torch
import zero
from torch import nn
from zero import Engine, initialize

zero.seed_everything(1)
data = torch.utils.data.TensorDataset(torch.randn(8, 2))
train, held_out = zero.random_split(data, [6, 2])
made = initialize(model=nn.Linear(2, 2), config="zero.json", training_data=train)
engine: Engine = made[0]
engine, optimizer, loader, scheduler = zero.initialize(model=nn.Linear(2, 2), config={"zero_optimization": {}})
for (batch,) in zero.skip_first_batches(loader, 2):
    loss = engine(batch.to(engine.device)).sum()
    engine.backward(loss)
    engine.step()
    engine.log({"loss": engine.reduce(loss)})
for (batch,) in engine.deepspeed_io(held_out, route="eval"):
    guesses = engine.gather_for_metrics(engine(batch), total=2)
with zero.GatheredParameters(engine.module.parameters()):
    engine.print(engine.get_global_grad_norm())
optimizer.param_groups[0]["lr"] = 1e-3
engine.save_checkpoint("folder", tag="last")
engine.save_pretrained("folder", max_shard_size="5GB")
engine.load_checkpoint("folder")
with zero.Init():
    model = nn.Linear(2, 2)
"""

# Each line that ends so is an error, and no other line is.
WRONG = """
import zero
from torch import nn
zero.initialise(model=nn.Linear(2, 2))  # wrong
zero.initialize(model=nn.Linear(2, 2), confg="zero.json")  # wrong
zero.initialize(model="model")  # wrong
zero.seed_everything("1")  # wrong
engine, optimizer, loader, scheduler = zero.initialize(model=nn.Linear(2, 2), config="zero.json")
engine.backward("loss")  # wrong
engine.save_checkpoint("folder", tagg="last")  # wrong
engine.gather_for_metrics(1, totl=3)  # wrong
norm: int = engine.get_global_grad_norm()  # wrong
zero.GatheredParameters(engine.parameters(), rank=0)  # wrong
zero.config.load("zero.json", wrld_size=1)  # wrong
"""


def wrong_lines(text: str) -> set[int]:
    return {number for number, line in enumerate(text.splitlines(), 1) if line.endswith("# wrong")}


def write(folder: Path) -> tuple[str, str]:
    for name, text in (("right.py", RIGHT), ("wrong.py", WRONG)):
        (folder / name).write_text(text)
    return "right.py", "wrong.py"


def documented(folder: Path) -> list[str]:
    """Every program of the documentation and of examples/, under a name of its own, beside what they import."""
    programs = {f"{path.parent.name}_{path.name}": path.read_text() for path in (ROOT / "examples").glob("*/train.py")}
    for path in (ROOT / "examples").glob("*/*.py"):  # what these import
        if path.name != "train.py":
            (folder / path.name).write_text(path.read_text())
    for page in PAGES:
        (folder / "net.py").write_text(files(page)["net.py"])
        programs |= {f"{page.stem}_{block.name}": block.text for block in blocks(page) if block.name.endswith(".py")}
        texts = [block.text for block in session(page)]
        # On this page each block is a program; elsewhere each goes on from those before it.
        for number, text in enumerate(texts if page.stem == "huggingface" else ["\n".join(texts)]):
            programs[f"{page.stem}_session{number}.py"] = text
    for name in ("moving_deepspeed_before.py", *(name for name, text in programs.items() if not text)):
        del programs[name]  # deepspeed is not here
    for name, text in programs.items():
        (folder / name).write_text(text)
    return sorted(programs)


def run(folder: Path, *command: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "MYPYPATH": str(ROOT)},
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done.stdout


def pyright(folder: Path, *names: str) -> list[dict[str, Any]]:
    """The errors that it finds."""
    # As pyright has it: packages that are not here, and names of a loop that may have no turn, are no errors.
    rules = {"reportMissingImports": "none", "reportPossiblyUnboundVariable": "none"}
    rules |= {"typeCheckingMode": "standard", "reportPrivateImportUsage": "error"}
    (folder / "pyrightconfig.json").write_text(json.dumps({**rules, "extraPaths": [str(ROOT)]}))
    text = run(folder, "basedpyright", "--outputjson", "--pythonpath", sys.executable, *names)
    found = [one for one in json.loads(text)["generalDiagnostics"] if one["severity"] == "error"]
    return [one for one in found if 'not exported from module "trl"' not in one["message"]]  # it documents that


@needs("basedpyright")
def test_pyright_finds_the_planted_errors_and_no_other(tmp_path: Path) -> None:
    found = pyright(tmp_path, *write(tmp_path))
    assert {Path(one["file"]).name for one in found} == {"wrong.py"}, found
    assert {one["range"]["start"]["line"] + 1 for one in found} == wrong_lines(WRONG), found


@pytest.mark.long
@needs("mypy")
def test_mypy_finds_the_planted_errors_and_no_other(tmp_path: Path) -> None:
    flags = ["--check-untyped-defs", "--cache-dir", "cache"]
    flags += [f"--disable-error-code={code}" for code in ("import-untyped", "import-not-found")]  # other packages
    text = run(tmp_path, "mypy", *flags, *write(tmp_path))
    found = re.findall(r"^(\w+\.py):(\d+): error", text, re.MULTILINE)
    assert {name for name, _ in found} == {"wrong.py"}, text
    assert {int(line) for _, line in found} == wrong_lines(WRONG), text


@pytest.mark.long
@needs("basedpyright")
def test_pyright_finds_nothing_in_the_programs_of_the_documentation(tmp_path: Path) -> None:
    names = documented(tmp_path)
    assert len(names) > 25
    assert not pyright(tmp_path, *names)


def test_type_checkers_are_told_every_name_and_the_right_one() -> None:
    tree = ast.parse((ROOT / "zero" / "__init__.py").read_text())
    told = [node for each in tree.body if isinstance(each, ast.If) for node in each.body]
    homes = {alias.name: node.module for node in told for alias in node.names}
    assert homes.keys() == set(zero.__all__) - {"__version__"}
    for name, home in homes.items():
        assert getattr(importlib.import_module(home), name) is getattr(zero, name), name
    assert (ROOT / "zero" / "py.typed").exists()
