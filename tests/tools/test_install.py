"""The promise: zero installs without torch, nvcc or a network, and its commands and doors work from there."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
from launching import ROOT

import zero

SOURCES = ("zero", "csrc", "constraints.txt", "pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE")
SITE = "zero/as_deepspeed/site"
ONE_STEP = """
import sys, torch, zero, zero._cpu
settings = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW", "params": {"lr": 1.0}}}
engine = zero.initialize(model=torch.nn.Linear(1, 1), config=settings)[0]
engine.backward(engine(torch.ones(1, 1)).sum())
engine.step()
print(zero.__file__)
"""

pytestmark = pytest.mark.long


def run(*words: str, **more: str) -> str:
    left_out = ("PYTHONPATH", "CUDA_HOME", "PIP_CONSTRAINT", "PIP_BUILD_CONSTRAINT")  # `make` gives relative ones
    environment = {name: value for name, value in os.environ.items() if name not in left_out} | more
    done = subprocess.run(words, env=environment, cwd="/", capture_output=True, text=True, check=False)
    if "No matching distribution found for setuptools" in done.stderr:
        pytest.skip("there is no index of packages here, from which pip has what it builds with")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The sources, without what was built of them."""
    for name in SOURCES:
        target = tmp_path / "tree" / name
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, target, ignore=shutil.ignore_patterns("*.so", "__pycache__", "*.egg-info"))
        else:
            target.parent.mkdir(exist_ok=True)
            shutil.copy(ROOT / name, target)
    return tmp_path / "tree"


def packages_of(home: Path, *behind: str) -> Path:
    """The packages of an environment, behind which those of the tests come: torch, and the rest."""
    (packages,) = home.glob("lib/python*/site-packages")
    (packages / "behind.pth").write_text("\n".join([sysconfig.get_path("purelib"), *behind]) + "\n")
    return packages


def test_pip_installs_into_an_environment_without_torch_or_nvcc(tree: Path, tmp_path: Path) -> None:
    home, constraints = tmp_path / "env", str(tree / "constraints.txt")
    run(sys.executable, "-m", "venv", str(home))
    python, path = str(home / "bin" / "python"), f"{home / 'bin'}:/usr/bin:/bin"
    pins = {"PIP_CONSTRAINT": constraints, "PIP_BUILD_CONSTRAINT": constraints}
    run(python, "-m", "pip", "install", "--no-deps", str(tree), PATH=path, **pins)
    packages = packages_of(home)
    installed = {str(path.relative_to(packages)) for path in packages.rglob("zero/**/*")}
    assert {"zero/py.typed", f"{SITE}/bin"} <= installed
    assert any(path.startswith("zero/_cpu") for path in installed), "the kernels are not compiled"
    assert run(str(home / "bin" / "zero"), "--version", PATH=path).startswith("zero ")
    assert Path(run(python, "-c", ONE_STEP, PATH=path).strip()).is_relative_to(packages)


def test_a_wheel_has_all_of_the_adapter_and_its_doors_open_where_it_is_installed(tree: Path, tmp_path: Path) -> None:
    """Without compiled kernels, which nothing here needs."""
    pytest.importorskip("pip")
    words = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index"]
    run(*words, "--wheel-dir", str(tmp_path), str(tree), CXX="false", ZERO_CUDA="0")
    (wheel,) = tmp_path.glob("*.whl")
    here = {str(path.relative_to(tree)) for path in (tree / SITE).rglob("*") if path.is_file()}
    assert {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith(SITE)} == here
    assert {f"{SITE}/bin/{name}" for name in ("deepspeed", "ds_report", "zero_to_fp32.py")} < here

    home = tmp_path / "env"
    venv.create(home, symlinks=True)
    python = str(home / "bin" / "python")
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", str(wheel))
    packages = packages_of(home, *(path for path in sys.path if path.endswith("site-packages")))
    ask = "import deepspeed, zero; print(deepspeed.__version__, zero.__file__, deepspeed.__file__)"
    version, *places = run(python, "-m", "zero.as_deepspeed", "-c", ask).split()
    assert version == f"0.19.6+zero{zero.__version__}"
    assert all(Path(place).is_relative_to(packages) for place in places), places
    opened = f'eval "$({shlex.quote(python)} -m zero.as_deepspeed --shell)"'
    assert "--num_gpus" in run("sh", "-c", f"{opened}; deepspeed --help")
    assert "--max_shard_size" in run("sh", "-c", f"{opened}; {shlex.quote(python)} $(which zero_to_fp32.py) --help")
