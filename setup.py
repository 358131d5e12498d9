"""Build of the compiled kernels: C++17 and CUDA through ninja, no torch. Everything else stands in pyproject.toml.

``zero._cpu`` is made of a few files that are compiled once per instruction set (scalar, SSE2, AVX2, AVX-512 or NEON),
each time with the flags of that set only, and of files that are compiled once, for any processor. Which set runs is
decided at run time, so that one build fits every machine of an architecture.

``zero._cuda`` is built where nvcc is found ($CUDA_HOME, $CUDA_PATH, the PATH or /usr/local/cuda), with its own copy of
the CUDA runtime. It holds machine code for sm_80, sm_90 and sm_100, and PTX for what comes after them;
``ZERO_CUDA_ARCHS`` chooses otherwise, as in "90;100+PTX", and ``ZERO_CUDA=0`` leaves the module out.

Without a compiler, or when it fails, the installation goes on with a warning, since every kernel has a plain torch
version; ``ZERO_REQUIRE_NATIVE=1`` makes it fail instead where ``zero._cpu`` is concerned, ``ZERO_REQUIRE_CUDA=1`` where
``zero._cuda`` is. ``CXX`` and ``CXXFLAGS`` are respected.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

CSRC = Path("csrc")


def switch(name: str, default: str) -> bool:
    """Whether an environment variable is set to anything but nothing or 0."""
    return os.environ.get(name, default) not in ("", "0")


# A module, and whether the installation fails without it.
REQUIRED = {"zero._cpu": switch("ZERO_REQUIRE_NATIVE", "0"), "zero._cuda": switch("ZERO_REQUIRE_CUDA", "0")}
TO_GET = {
    "zero._cpu": "install a C++17 compiler with OpenMP\n(and the headers of Python) and install zero again; "
    "ZERO_REQUIRE_NATIVE=1 makes this an error.",
    "zero._cuda": "install nvcc (CUDA toolkit)\nand install zero again; ZERO_REQUIRE_CUDA=1 makes this an error, "
    "ZERO_CUDA=0 leaves the module out without a word.",
}

# -ffp-contract=off: a fused multiply-add where the compiler likes one would make results depend on the instruction
# set. -fno-math-errno and -fno-trapping-math change no result; they let sqrt become one instruction.
COMMON_FLAGS = [
    "-std=c++17", "-O3", "-fPIC", "-fopenmp", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math",
    "-fvisibility=hidden", "-Wall", "-Wextra",
]  # fmt: skip
LINK_FLAGS = ["-shared", "-fopenmp"]
AVX2_FLAGS = ["-mavx2", "-mfma", "-mf16c"]
# The last flags: gcc 12 warns about its own AVX-512 headers.
AVX512_FLAGS = [
    "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c", "-Wno-maybe-uninitialized",
    "-Wno-uninitialized",
]  # fmt: skip

ISA_SOURCES = ["cpu_step.cpp", "cpu_norm.cpp", "cpu_rows.cpp", "cpu_wire.cpp", "cpu_crc32.cpp"]
COMMON_SOURCES = [
    "cpu_dispatch.cpp", "cpu_parallel.cpp", "cpu_read.cpp", "aio.cpp", "aio_uring.cpp", "bind_aio.cpp",
    "bind_cpu.cpp",
]  # fmt: skip

# One compilation per format of the states lets ninja run them side by side; they are the most work.
CUDA_OBJECTS = [
    *(("cuda_step.cu", f"cuda_step{code}.o", [f"-DZERO_STATE_FORMAT={code}"]) for code in (2, 1, 0)),
    *((f"cuda_{name}.cu", f"cuda_{name}.o", []) for name in ("norm", "pack", "rows", "wire", "host")),
]
# -fmad=false is to nvcc what -ffp-contract=off is to a C++ compiler. The next three are what it does anyway; they stand
# here since the results depend on them.
CUDA_FLAGS = ["-std=c++17", "-O3", "-fmad=false", "-ftz=false", "-prec-div=true", "-prec-sqrt=true"]
CUDA_ARCHS = "80;90;100+PTX"


class BuildError(RuntimeError):
    """The compiled kernels could not be built; the text says why."""


def instruction_sets() -> dict[str, list[str]]:
    """Instruction sets to compile for, weakest first, each with its flags."""
    sets: dict[str, list[str]] = {"scalar": []}
    if platform.machine().lower() in ("x86_64", "amd64") and sys.maxsize > 2**32:
        sets["sse2"] = []
        sets["avx2"] = AVX2_FLAGS
        sets["avx512"] = AVX512_FLAGS
    if platform.machine().lower() in ("aarch64", "arm64"):
        sets["neon"] = []
    return sets


def find_compiler() -> list[str]:
    """The C++ compiler as a command line: ``$CXX``, the one Python was built with, or a usual name."""
    for candidate in (os.environ.get("CXX"), sysconfig.get_config_var("CXX"), "c++", "g++", "clang++"):
        words = shlex.split(candidate or "")
        if words and shutil.which(words[0]):
            return words
    raise BuildError("no C++ compiler was found (looked for $CXX, c++, g++ and clang++)")


def find_ninja() -> str:
    """Path of ninja: the one of the Python package, or one on the PATH."""
    try:
        import ninja

        path = shutil.which("ninja", path=ninja.BIN_DIR)
    except ImportError:
        path = None
    path = path or shutil.which("ninja")
    if path is None:
        raise BuildError("ninja was not found (pip install ninja)")
    return path


def ninja_escape(text: str) -> str:
    """Escape a path for a build.ninja file."""
    return text.replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


def shell(words: list[str]) -> str:
    """Words as one command line, for the value of a ninja variable."""
    return " ".join(shlex.quote(word) for word in words).replace("$", "$$")


def cpu_objects() -> list[tuple[str, str, list[str]]]:
    """All objects of ``zero._cpu`` as (source, object, extra flags)."""
    sets = instruction_sets()
    objects = [
        (source, f"{Path(source).stem}.{isa}.o", [f"-DZERO_ISA={isa}", *flags])
        for isa, flags in sets.items()
        for source in ISA_SOURCES
    ]
    have = [f"-DZERO_HAVE_{isa.upper()}" for isa in sets]
    return objects + [(source, f"{Path(source).stem}.o", have) for source in COMMON_SOURCES]


def python_includes() -> list[str]:
    """Flags that find the headers of pybind11 and Python."""
    try:
        import pybind11
    except ImportError as error:
        raise BuildError("pybind11 was not found (pip install pybind11)") from error
    return [f"-isystem{pybind11.get_include()}", f"-isystem{sysconfig.get_paths()['include']}"]


def compile_rules(flags: list[str]) -> list[str]:
    """The rule `compile` of a build.ninja: C++ with these flags."""
    return [
        f"cxx = {shell(find_compiler())}",
        f"flags = {shell(flags + python_includes() + shlex.split(os.environ.get('CXXFLAGS', '')))}",
        "rule compile",
        "  command = $cxx $flags $extra -MMD -MF $out.d -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
    ]


def compile_steps(rule: str, objects: list[tuple[str, str, list[str]]]) -> list[str]:
    """Lines that make (source, object, extra flags) with a rule."""
    lines = []
    for source, name, extra in objects:
        lines.append(f"build {name}: {rule} {ninja_escape(str((CSRC / source).resolve()))}")
        lines.append(f"  extra = {shell(extra)}")
    return lines


def link_step(target: Path, objects: list[tuple[str, str, list[str]]]) -> str:
    """Line that links the objects."""
    return f"build {ninja_escape(str(target))}: link {' '.join(name for _, name, _ in objects)}"


def cpu_build_file(target: Path) -> str:
    """Text of the build.ninja that makes ``zero._cpu`` at ``target``; objects lie beside the build file."""
    link = LINK_FLAGS + (["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else [])
    objects = cpu_objects()
    lines = [
        *compile_rules(COMMON_FLAGS),
        "rule link",
        f"  command = $cxx $in {shell(link + shlex.split(os.environ.get('LDFLAGS', '')))} -o $out",
        *compile_steps("compile", objects),
        link_step(target, objects),
    ]
    return "\n".join(lines) + "\n"


def find_nvcc() -> str:
    """Path of nvcc."""
    homes = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")]
    for folder in (*(f"{home}/bin" for home in homes if home), None, "/usr/local/cuda/bin"):
        path = shutil.which("nvcc", path=folder)
        if path is not None:
            return path
    raise BuildError("nvcc was not found (looked in $CUDA_HOME/bin, $CUDA_PATH/bin, the PATH and /usr/local/cuda/bin)")


def cuda_archs(nvcc: str) -> list[str]:
    """What to compile for: numbers such as 90 or 100a, "+PTX" behind those that are kept as PTX, too.

    By default those of CUDA_ARCHS that this nvcc knows. PTX is kept for the last of them.
    """
    text = os.environ.get("ZERO_CUDA_ARCHS", "")
    if text:
        archs = [arch.strip() for arch in text.replace(",", ";").split(";")]
        bad = [arch for arch in archs if not re.fullmatch(r"\d{2,3}[af]?(\+PTX)?", arch)]
        if bad:
            raise BuildError(f"ZERO_CUDA_ARCHS: got {text!r}; wanted numbers as in '80;90;100+PTX'")
        return archs
    done = subprocess.run([nvcc, "--list-gpu-code"], capture_output=True, text=True, check=False)
    known = set(re.findall(r"sm_(\d+)", done.stdout))
    archs = [arch for arch in CUDA_ARCHS.replace("+PTX", "").split(";") if arch in known]
    if not archs:
        raise BuildError(f"{nvcc} knows none of {CUDA_ARCHS} (it said: {(done.stdout + done.stderr).strip()[:500]})")
    return [*archs[:-1], f"{archs[-1]}+PTX"]


def arch_flags(archs: list[str]) -> list[str]:
    """The flags of nvcc for what :func:`cuda_archs` returned."""
    flags = []
    for arch in archs:
        number = arch.removesuffix("+PTX")
        flags.append(f"-gencode=arch=compute_{number},code=sm_{number}")
        if arch != number:
            flags.append(f"-gencode=arch=compute_{number},code=compute_{number}")
    return flags


def cuda_build_file(target: Path) -> str:
    """Text of the build.ninja that makes ``zero._cuda`` at ``target``; objects lie beside the build file."""
    nvcc, host = find_nvcc(), [flag for flag in COMMON_FLAGS if flag not in ("-std=c++17", "-O3", "-fopenmp")]
    archs = cuda_archs(nvcc)
    flags = [*CUDA_FLAGS, *arch_flags(archs), *(f"-Xcompiler={flag}" for flag in host)]
    # The compiler that nvcc would take by itself may be another one, or one that it does not go with.
    cxx = [word for word in find_compiler() if Path(word).name not in ("ccache", "sccache")]
    compiler = ["-ccbin", cxx[0]] if os.environ.get("CXX") else []
    bindings = [("bind_cuda.cpp", "bind_cuda.o", [f'-DZERO_CUDA_ARCHS="{";".join(archs)}"'])]
    lines = [
        *compile_rules([flag for flag in COMMON_FLAGS if flag != "-fopenmp"]),
        f"nvcc = {shell([nvcc, *compiler])}",
        "rule compile_cuda",
        f"  command = $nvcc {shell(flags)} $extra -MMD -MF $out.d -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "rule link",
        # Static, and its symbols hidden: torch brings a CUDA runtime of its own.
        "  command = $nvcc -shared -cudart static -Xlinker=--exclude-libs,ALL $in -o $out",
        *compile_steps("compile_cuda", CUDA_OBJECTS),
        *compile_steps("compile", bindings),
        link_step(target, [*CUDA_OBJECTS, *bindings]),
    ]
    return "\n".join(lines) + "\n"


BUILD_FILES = {"zero._cpu": cpu_build_file, "zero._cuda": cuda_build_file}


class NinjaBuild(build_ext):
    """Builds the extensions with ninja, and lets the installation go on without them unless told otherwise."""

    def run(self) -> None:
        """Build all; setuptools forgets `inplace` while it does."""
        self.beside_sources = bool(self.inplace or self.editable_mode)
        super().run()

    def build_extension(self, ext: Extension) -> None:
        """Build one extension; on failure warn and leave nothing behind."""
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        if ext.name == "zero._cuda" and not switch("ZERO_CUDA", "1"):
            self.remove_outputs(ext, target)
            return
        try:
            self.run_ninja(ext, target)
        except (BuildError, OSError) as error:
            # A library of an earlier build must not stay: it would be loaded in silence.
            self.remove_outputs(ext, target)
            if REQUIRED[ext.name]:
                raise
            rule = "*" * 100
            print(
                f"{rule}\nWARNING: {ext.name} was not built: {error}\nzero works without it, on slower kernels in "
                f"plain torch. To get it, {TO_GET[ext.name]}\n{rule}",
                file=sys.stderr,
            )

    def run_ninja(self, ext: Extension, target: Path) -> None:
        """Write build.ninja and run it; raises BuildError with the compiler's words."""
        folder = Path(self.build_temp).resolve() / ext.name
        folder.mkdir(parents=True, exist_ok=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        (folder / "build.ninja").write_text(BUILD_FILES[ext.name](target))
        command = [find_ninja(), "-C", str(folder), *(["-v"] if self.verbose > 1 else [])]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        if done.returncode != 0:
            raise BuildError(f"ninja failed with status {done.returncode}\n{done.stdout}")
        print(done.stdout, end="")

    def remove_outputs(self, ext: Extension, target: Path) -> None:
        """Remove the library where it was to be built and, for an editable install, where it is loaded from."""
        target.unlink(missing_ok=True)
        if self.beside_sources:
            package = Path(*ext.name.split(".")[:-1])
            (package / target.name).unlink(missing_ok=True)


if __name__ == "__main__":
    modules = [Extension(name, sources=[], optional=not required) for name, required in REQUIRED.items()]
    if sys.platform == "darwin":  # there is no CUDA for it
        modules = modules[:1]
    setup(ext_modules=modules, cmdclass={"build_ext": NinjaBuild})
