"""The promise: a wheel has the adapter whole, and its doors work where nothing but the wheel is installed."""

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

import zero

ROOT = Path(__file__).parents[2]
SITE = "zero/as_deepspeed/site"


def run(*words: str, **more: str) -> str:
    left_out = ("PYTHONPATH", "PIP_CONSTRAINT", "PIP_BUILD_CONSTRAINT")  # which `make` gives relative to the tree
    environment = {name: value for name, value in os.environ.items() if name not in left_out} | more
    done = subprocess.run(words, env=environment, cwd="/", capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Without compiled kernels, which nothing here needs."""
    pytest.importorskip("pip")
    folder = tmp_path_factory.mktemp("wheel")
    tree = folder / "tree"
    built = shutil.ignore_patterns("*.so", "__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "zero", tree / "zero", ignore=built)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, tree)
    shutil.copytree(ROOT / "csrc", tree / "csrc")
    words = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index"]
    run(*words, "--wheel-dir", str(folder), str(tree), CXX="false", ZERO_CUDA="0")
    (made,) = folder.glob("*.whl")
    return made


@pytest.mark.long
def test_a_wheel_has_all_of_the_adapter(wheel: Path) -> None:
    here = {str(path.relative_to(ROOT)) for path in (ROOT / SITE).rglob("*") if path.is_file()}
    here = {name for name in here if "__pycache__" not in name}
    assert {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith(SITE)} == here
    assert {f"{SITE}/bin/{name}" for name in ("deepspeed", "ds_report", "zero_to_fp32.py")} < here


@pytest.mark.long
def test_its_doors_open_where_it_is_installed(wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path, symlinks=True)
    python = str(tmp_path / "bin" / "python")
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", str(wheel))
    (libraries,) = (tmp_path / "lib").glob("python*/site-packages")
    others = [sysconfig.get_path("purelib"), *(path for path in sys.path if path.endswith("site-packages"))]
    (libraries / "others.pth").write_text("\n".join(others))  # torch, after the wheel
    ask = "import deepspeed, zero; print(deepspeed.__version__, zero.__file__, deepspeed.__file__)"
    version, *places = run(python, "-m", "zero.as_deepspeed", "-c", ask).split()
    assert version == f"0.19.6+zero{zero.__version__}"
    assert all(Path(place).is_relative_to(libraries) for place in places), places
    opened = f'eval "$({shlex.quote(python)} -m zero.as_deepspeed --shell)"'
    assert "--num_gpus" in run("sh", "-c", f"{opened}; deepspeed --help")
    assert "--max_shard_size" in run("sh", "-c", f"{opened}; {shlex.quote(python)} $(which zero_to_fp32.py) --help")
