"""The promise: `pip install .` into one's own environment takes neither torch nor nvcc to build."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ("zero", "csrc", "pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE")
ONE_STEP = """
import sys, torch, zero, zero._cpu
settings = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW", "params": {"lr": 1.0}}}
engine = zero.initialize(model=torch.nn.Linear(1, 1), config=settings)[0]
engine.backward(engine(torch.ones(1, 1)).sum())
engine.step()
print(zero.__file__)
"""


@pytest.mark.long
def test_pip_installs_into_an_environment_without_torch_or_nvcc(tmp_path: Path) -> None:
    source, home = tmp_path / "source", tmp_path / "env"
    source.mkdir()
    for name in SOURCES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    for built in source.rglob("zero/_c*.so"):
        built.unlink()
    subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
    python = str(home / "bin" / "python")
    env = {key: value for key, value in os.environ.items() if key not in ("CUDA_HOME", "PYTHONPATH")}
    env |= {"PATH": f"{home / 'bin'}:/usr/bin:/bin", "PIP_CONSTRAINT": str(ROOT / "constraints.txt")}
    env["PIP_BUILD_CONSTRAINT"] = env["PIP_CONSTRAINT"]
    done = subprocess.run(
        [python, "-m", "pip", "install", "--no-deps", str(source)], env=env, capture_output=True, text=True, check=False
    )
    if "No matching distribution found for setuptools" in done.stderr:
        pytest.skip("there is no index of packages here, from which pip has what it builds with")
    assert done.returncode == 0, done.stdout + done.stderr
    (packages,) = home.glob("lib/python*/site-packages")
    installed = {str(path.relative_to(packages)) for path in packages.rglob("zero/**/*")}
    assert {"zero/py.typed", "zero/as_deepspeed/site/bin"} <= installed
    assert any(path.startswith("zero/_cpu") for path in installed), "the kernels are not compiled"
    said = subprocess.check_output([str(home / "bin" / "zero"), "--version"], text=True, env=env)
    assert said.startswith("zero ")
    # torch and the rest from the environment of the tests, behind what was installed.
    (packages / "behind.pth").write_text(sysconfig.get_path("purelib") + "\n")
    said = subprocess.check_output([python, "-c", ONE_STEP], text=True, env=env, cwd=tmp_path)
    assert Path(said.strip()).is_relative_to(packages)
