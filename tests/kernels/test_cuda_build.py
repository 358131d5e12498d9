"""``zero._cuda`` holds machine code for every architecture that it should, and is built, or not, as setup.py says."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
import struct
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from marks import longer

# Here, before any test has run: setuptools refuses to be imported behind the half of another distutils.
with contextlib.suppress(ImportError):
    import setuptools  # noqa: F401

ROOT = Path(__file__).parents[2]
ELF, PTX = 2, 1


def load_setup() -> ModuleType:
    """setup.py as a module; it builds nothing when imported."""
    spec = importlib.util.spec_from_file_location("zero_setup", ROOT / "setup.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def setup() -> ModuleType:
    pytest.importorskip("setuptools")
    return load_setup()


def fatbin_entries(data: bytes) -> Iterator[tuple[int, int]]:
    """(PTX or ELF, architecture) of all device code in a library or object: what `cuobjdump --list-elf` would list.

    A fat binary is a header (magic, version, size of the header, size of the rest), then entries of a header (kind,
    version, its size, size of the code, ..., at byte 28 the architecture) and the code.
    """
    at = 0
    while (at := data.find(b"\x50\xed\x55\xba", at)) >= 0:
        version, header, size = struct.unpack_from("<HHQ", data, at + 4)
        at += header if version == 1 else 4
        end = at + size if version == 1 else at
        while at < end:
            kind, _, header, size = struct.unpack_from("<HHIQ", data, at)
            yield kind, struct.unpack_from("<I", data, at + 28)[0]
            at += header + size


def nvcc_of(setup: ModuleType) -> str:
    try:
        return setup.find_nvcc()
    except setup.BuildError as error:
        pytest.skip(str(error))


def installed() -> Path | None:
    found = importlib.util.find_spec("zero._cuda")
    return Path(found.origin) if found and found.origin else None


def test_machine_code_for_all_architectures_is_inside(setup: ModuleType, tmp_path: Path) -> None:
    """Of the installed library; without one of a library that is built here, as setup.py would."""
    nvcc = nvcc_of(setup)
    library = installed()
    if library is None or os.environ.get("ZERO_CUDA_ARCHS"):
        library = tmp_path / "_cuda.so"
        (tmp_path / "build.ninja").write_text(setup.cuda_build_file(library))
        done = subprocess.run(
            [setup.find_ninja(), "-C", str(tmp_path)], capture_output=True, text=True, check=False, timeout=540
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "warning" not in done.stdout
    inside = list(fatbin_entries(library.read_bytes()))
    sources = len(setup.CUDA_OBJECTS)
    for arch in setup.cuda_archs(nvcc):
        number = int(re.match(r"\d+", arch)[0])
        assert inside.count((ELF, number)) == sources, f"sm_{number} in {inside}"
        assert inside.count((PTX, number)) == (sources if arch.endswith("+PTX") else 0), f"PTX in {inside}"


@pytest.mark.parametrize("arch", ["90", *longer("80", "100")])
def test_no_kernel_spills_registers(setup: ModuleType, tmp_path: Path, arch: str) -> None:
    """As ptxas says with -v, of the code of one architecture."""
    nvcc, said = nvcc_of(setup), ""
    if arch not in {known.removesuffix("+PTX") for known in setup.cuda_archs(nvcc)}:
        pytest.skip(f"this nvcc does not know sm_{arch}")
    for source, _, extra in setup.CUDA_OBJECTS:
        target = ["-Xptxas=-v", "-cubin", f"-arch=sm_{arch}", "-o", str(tmp_path / "kernels.cubin")]
        command = [nvcc, *setup.CUDA_FLAGS, *extra, *target, str(ROOT / "csrc" / source)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        said += done.stdout + done.stderr
    kernels = re.findall(r"entry function '(\w+)'.*?(\d+) bytes spill stores, (\d+) bytes spill loads", said, re.DOTALL)
    assert len(kernels) == said.count("entry function") > 10
    assert not [kernel for kernel in kernels if kernel[1:] != ("0", "0")]


def test_importing_it_loads_no_driver() -> None:
    if installed() is None:
        pytest.skip("zero._cuda is not installed")
    code = "import zero._cuda; print(zero._cuda.ARCHS); print('libcuda' in open('/proc/self/maps').read())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[1:] == ["False"], done.stdout


def test_the_default_is_what_the_users_are_told(setup: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ZERO_CUDA_ARCHS", raising=False)
    nvcc = nvcc_of(setup)
    known = subprocess.run([nvcc, "--list-gpu-code"], capture_output=True, text=True, check=True).stdout
    if "sm_100" not in known:
        pytest.skip("this nvcc does not know sm_100")
    assert setup.cuda_archs(nvcc) == ["80", "90", "100+PTX"]


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        ("90", ["arch=compute_90,code=sm_90"]),
        ("80; 90+PTX", ["arch=compute_80,code=sm_80", "arch=compute_90,code=sm_90", "arch=compute_90,code=compute_90"]),
        ("90a,120f", ["arch=compute_90a,code=sm_90a", "arch=compute_120f,code=sm_120f"]),
    ],
)  # fmt: skip
def test_the_list_of_architectures(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch, text: str, flags: list[str]
) -> None:
    monkeypatch.setenv("ZERO_CUDA_ARCHS", text)
    assert setup.arch_flags(setup.cuda_archs("nvcc")) == [f"-gencode={flag}" for flag in flags]


def test_a_wrong_list_of_architectures_is_refused(setup: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("sm_90", "90;;100", "9.0", "PTX", ";"):
        monkeypatch.setenv("ZERO_CUDA_ARCHS", text)
        with pytest.raises(setup.BuildError, match="ZERO_CUDA_ARCHS: got"):
            setup.cuda_archs("nvcc")


def fake_tree(folder: Path) -> Path:
    """A copy of what setup.py needs, with a library of an earlier build in the package."""
    for name in ("setup.py", "README.md", "LICENSE", "pyproject.toml"):
        shutil.copy(ROOT / name, folder / name)
    shutil.copytree(ROOT / "csrc", folder / "csrc")
    (folder / "zero").mkdir()
    (folder / "zero" / "__init__.py").touch()
    stale = folder / "zero" / f"_cuda{sysconfig.get_config_var('EXT_SUFFIX')}"
    stale.write_text("stale")
    return stale


def build_in_place(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run setup.py build_ext --inplace with a compiler that fails at once, so that only the rules are tried."""
    path = os.pathsep.join([str(folder / "bin"), os.environ["PATH"]])
    (folder / "bin").mkdir(exist_ok=True)
    for name in ("nvcc", "c++"):
        tool = folder / "bin" / name
        tool.write_text(
            '#!/bin/sh\nif [ "$1" = --list-gpu-code ]; then echo sm_90; exit 0; fi\necho broken >&2\nexit 3\n'
        )
        tool.chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("ZERO_", "CUDA_"))}
    return subprocess.run(
        [sys.executable, "setup.py", "build_ext", "--inplace"],
        cwd=folder, env={**kept, "PATH": path, "CXX": "c++", **environment},
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip


def test_a_build_that_fails_warns_and_may_be_left_out_or_required(setup: ModuleType, tmp_path: Path) -> None:
    """None of them leaves a library of an earlier build."""
    stale = fake_tree(tmp_path)
    said = []
    for environment, good in (({}, True), ({"ZERO_CUDA": "0"}, True), ({"ZERO_REQUIRE_CUDA": "1"}, False)):
        stale.write_text("stale")
        done = build_in_place(tmp_path, **environment)
        assert (done.returncode == 0) == good, done.stderr
        assert not stale.exists()
        said.append(done.stderr)
    fails, without, required = said
    assert fails.count("WARNING: zero._cuda was not built: ninja failed") == 1
    assert "broken" in fails and "ZERO_REQUIRE_CUDA=1" in fails
    assert "zero._cuda" not in without
    assert "ninja failed" in required
