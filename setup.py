"""Build of the compiled kernels: C++17 through ninja, no torch. Everything else stands in pyproject.toml.

``zero._cpu`` is made of a few files that are compiled once per instruction set (scalar, SSE2, AVX2, AVX-512 or NEON), each time with
the flags of that set only, and of files that are compiled once, for any processor. Which set runs is decided at run
time, so that one build fits every machine of an architecture.

Without a compiler, or when it fails, the installation goes on with a warning, since every kernel has a plain torch
version; ``ZERO_REQUIRE_NATIVE=1`` makes it fail instead. ``CXX`` and ``CXXFLAGS`` are respected.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

CSRC = Path("csrc")
REQUIRE_NATIVE = os.environ.get("ZERO_REQUIRE_NATIVE", "0") not in ("", "0")

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
    "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c", "-Wno-maybe-uninitialized", "-Wno-uninitialized",
]  # fmt: skip

ISA_SOURCES = ["cpu_step.cpp", "cpu_norm.cpp", "cpu_bucket.cpp"]
COMMON_SOURCES = ["cpu_dispatch.cpp", "cpu_parallel.cpp", "bind_cpu.cpp"]


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


def cpu_build_file(target: Path) -> str:
    """Text of the build.ninja that makes the extension ``target``; objects lie beside the build file."""
    try:
        import pybind11
    except ImportError as error:
        raise BuildError("pybind11 was not found (pip install pybind11)") from error
    includes = [f"-isystem{pybind11.get_include()}", f"-isystem{sysconfig.get_paths()['include']}"]
    flags = COMMON_FLAGS + includes + shlex.split(os.environ.get("CXXFLAGS", ""))
    link = LINK_FLAGS + (["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else [])
    lines = [
        f"cxx = {shell(find_compiler())}",
        f"flags = {shell(flags)}",
        "rule compile",
        "  command = $cxx $flags $extra -MMD -MF $out.d -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "rule link",
        f"  command = $cxx $in {shell(link + shlex.split(os.environ.get('LDFLAGS', '')))} -o $out",
    ]
    objects = cpu_objects()
    for source, name, extra in objects:
        lines.append(f"build {name}: compile {ninja_escape(str((CSRC / source).resolve()))}")
        lines.append(f"  extra = {shell(extra)}")
    lines.append(f"build {ninja_escape(str(target))}: link {' '.join(name for _, name, _ in objects)}")
    return "\n".join(lines) + "\n"


class NinjaBuild(build_ext):
    """Builds the extensions with ninja, and lets the installation go on without them unless told otherwise."""

    def build_extension(self, ext: Extension) -> None:
        """Build one extension; on failure warn and leave nothing behind."""
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        try:
            self.run_ninja(ext, target)
        except (BuildError, OSError) as error:
            # A library of an earlier build must not stay: it would be loaded in silence.
            self.remove_outputs(ext, target)
            if REQUIRE_NATIVE:
                raise
            rule = "*" * 100
            print(
                f"{rule}\nWARNING: {ext.name} was not built: {error}\n"
                "zero works without it, on slower kernels in plain torch. To get it, install a C++17 compiler with "
                "OpenMP\n(and the headers of Python) and install zero again; ZERO_REQUIRE_NATIVE=1 makes this an "
                f"error.\n{rule}",
                file=sys.stderr,
            )

    def run_ninja(self, ext: Extension, target: Path) -> None:
        """Write build.ninja and run it; raises BuildError with the compiler's words."""
        folder = Path(self.build_temp).resolve() / ext.name
        folder.mkdir(parents=True, exist_ok=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        (folder / "build.ninja").write_text(cpu_build_file(target))
        command = [find_ninja(), "-C", str(folder), *(["-v"] if self.verbose > 1 else [])]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        if done.returncode != 0:
            raise BuildError(f"ninja failed with status {done.returncode}\n{done.stdout}")
        print(done.stdout, end="")

    def remove_outputs(self, ext: Extension, target: Path) -> None:
        """Remove the library where it was to be built and, for an editable install, where it is loaded from."""
        target.unlink(missing_ok=True)
        if self.inplace or self.editable_mode:
            package = Path(*ext.name.split(".")[:-1])
            (package / target.name).unlink(missing_ok=True)


if __name__ == "__main__":
    cpu = Extension("zero._cpu", sources=[], optional=not REQUIRE_NATIVE)
    setup(ext_modules=[cpu], cmdclass={"build_ext": NinjaBuild})
