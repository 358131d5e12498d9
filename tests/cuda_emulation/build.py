"""Compiles csrc/*.cu for the processor: ``zero._cuda`` with cuda_on_cpu.h in the place of CUDA."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).resolve().parent
CSRC = HERE.parent.parent / "csrc"
SOURCES = {".cu", ".cuh", ".cpp", ".h", ".hpp"}

# (object, source, flags); a wide access that is not aligned traps, as it does on a GPU. The bindings are not tested
# for speed either: -O0 compiles them in half the time.
KERNEL_FLAGS = [
    "-O1", "-U_FORTIFY_SOURCE", "-x", "c++", "-include", str(HERE / "cuda_on_cpu.h"), "-fno-strict-aliasing",
    "-fsanitize=alignment,shift,bounds", "-fsanitize-undefined-trap-on-error",
]  # fmt: skip
OBJECTS = [
    *((f"step{code}.o", "cuda_step.cu", [*KERNEL_FLAGS, f"-DZERO_STATE_FORMAT={code}"]) for code in (2, 1, 0)),
    ("bind.o", "bind_cuda.cpp", ["-O0", '-DZERO_CUDA_ARCHS="emulated"']),
    *((f"{name}.o", f"cuda_{name}.cu", KERNEL_FLAGS) for name in ("norm", "pack", "rows", "wire", "host")),
]
COMMON_FLAGS = [
    "-std=c++17", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror",
    "-Wno-unknown-pragmas",
]  # fmt: skip


def compiler() -> list[str] | None:
    """A compiler that takes g++'s options, as a command line; None where there is none."""
    for candidate in (os.environ.get("CXX"), "g++", "clang++", "c++"):
        words = shlex.split(candidate or "")
        if words and shutil.which(words[0]):
            return words
    return None


def _run(command: list[str]) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{shlex.join(command)}\n{done.stdout}")


def build_device(folder: Path) -> None:
    """Compile device.cpp into ``folder``/device.so; raises RuntimeError with the compiler's words."""
    import torch

    root = Path(torch.__file__).parent
    include = root / "include"
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    flags = [f"-isystem{include}", f"-isystem{include / 'torch/csrc/api/include'}", f"-L{root / 'lib'}"]
    flags += ["-std=c++20", "-O1", "-fPIC", "-shared", "-Wall", "-Wextra", abi]
    source, target = str(HERE / "device.cpp"), str(folder / "device.so")
    _run([*(compiler() or ["c++"]), *flags, source, "-o", target, "-lc10", "-ltorch_cpu"])


def _digest(cxx: list[str]) -> str:
    """Of all that decides what is compiled."""
    import pybind11

    version = subprocess.run([*cxx, "--version"], capture_output=True, text=True, check=False).stdout
    told = repr((version, pybind11.__version__, sys.version, COMMON_FLAGS, OBJECTS))
    files = sorted(path for path in (*CSRC.iterdir(), *HERE.iterdir()) if path.suffix in SOURCES)
    return hashlib.sha256(told.encode() + b"".join(path.read_bytes() for path in files)).hexdigest()[:16]


def build(folder: Path) -> ModuleType:
    """The module in ``folder``, compiled if none is there of these sources; raises RuntimeError with what g++ says."""
    cxx = compiler()
    if cxx is None:
        raise RuntimeError("no C++ compiler")
    target = folder / _digest(cxx) / "_cuda.so"
    if not target.exists():
        shutil.rmtree(folder)  # what older sources gave
        target.parent.mkdir(parents=True)
        _compile(cxx, target)
    spec = importlib.util.spec_from_file_location("_cuda", target)
    if spec is None or spec.loader is None:
        raise RuntimeError(f"{target} cannot be loaded")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _compile(cxx: list[str], target: Path) -> None:
    import pybind11

    folder = target.parent
    includes = [f"-isystem{pybind11.get_include()}", f"-isystem{sysconfig.get_paths()['include']}"]
    commands = [
        [*cxx, *COMMON_FLAGS, *includes, *flags, "-c", str(CSRC / source), "-o", str(folder / name)]
        for name, source, flags in OBJECTS
    ]
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        list(pool.map(_run, commands))
    _run([*cxx, "-shared", *(str(folder / name) for name, _, _ in OBJECTS), "-o", f"{target}.partial"])
    Path(f"{target}.partial").rename(target)
