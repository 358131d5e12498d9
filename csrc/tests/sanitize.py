"""Build csrc/tests/test_kernels.cpp and the CPU kernels with AddressSanitizer and UBSan, and run them.

    python csrc/tests/sanitize.py --out build/sanitize

Sources and flags are those of setup.py, so that what is tested is what is shipped. Exit status: 0 all is well, 77 this
compiler has no sanitizers (the usual "skipped"), anything else: what was printed is wrong.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
SKIPPED = 77

# -O1: at -O3 the checks are compiled for minutes, and the kernels' own code is no other. Recovering from undefined
# behaviour would end with status 0.
SANITIZE = ["-O1", "-g1", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
# Leaks are not looked for: it needs ptrace, which containers forbid, and libgomp keeps its threads until the end.
OPTIONS = {"ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0", "UBSAN_OPTIONS": "print_stacktrace=1"}


class Unavailable(RuntimeError):
    """This machine cannot build with sanitizers; the text says why."""


def build_script() -> ModuleType:
    """The repository's setup.py as a module: importing it builds nothing."""
    spec = importlib.util.spec_from_file_location("setup_of_zero", ROOT / "setup.py")
    if spec is None or spec.loader is None:
        raise RuntimeError(f"{ROOT / 'setup.py'} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(ROOT))  # it may have modules of its own beside it
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(ROOT))
    return module


def compiler(setup: ModuleType) -> list[str]:
    """The compiler that setup.py takes, if it and its run-time libraries can do sanitizers and OpenMP."""
    try:
        words = setup.find_compiler()
    except setup.BuildError as error:
        raise Unavailable(str(error)) from error
    with tempfile.TemporaryDirectory() as folder:
        source, program = Path(folder) / "probe.cpp", Path(folder) / "probe"
        source.write_text("int main() { return 0; }\n")
        made = subprocess.run([*words, *SANITIZE, "-fopenmp", source, "-o", program], capture_output=True, check=False)
        if made.returncode != 0:
            raise Unavailable(f"{shlex.join(words)} cannot build with {SANITIZE[3]}")
        if subprocess.run([program], env=environment(), capture_output=True, check=False).returncode != 0:
            raise Unavailable(f"a program that {shlex.join(words)} built with {SANITIZE[3]} does not run")
    return words


def environment() -> dict[str, str]:
    """The process's own, without a preloaded library (it would come before AddressSanitizer, which refuses)."""
    kept = {key: value for key, value in os.environ.items() if key != "LD_PRELOAD"}
    return {**kept, **OPTIONS}


def build_file(setup: ModuleType, cxx: list[str]) -> str:
    """Text of the build.ninja: the kernels of setup.py without the Python module, and the test."""
    lines = [
        f"cxx = {setup.shell(cxx)}",
        f"flags = {setup.shell([*setup.COMMON_FLAGS, *SANITIZE])}",
        "rule compile",
        "  command = $cxx $flags $extra -MMD -MF $out.d -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "rule link",
        "  command = $cxx $in $flags -o $out",
    ]
    objects = [entry for entry in setup.cpu_objects() if not entry[0].startswith("bind_")]
    objects.append(("tests/test_kernels.cpp", "test_kernels.o", []))
    for source, name, extra in objects:
        lines.append(f"build {name}: compile {setup.ninja_escape(str(ROOT / 'csrc' / source))}")
        lines.append(f"  extra = {setup.shell(extra)}")
    lines.append(f"build test_kernels: link {' '.join(name for _, name, _ in objects)}")
    return "\n".join(lines) + "\n"


def build(folder: Path) -> Path:
    """Build in `folder` and return the program; raises Unavailable, or CalledProcessError once ninja has said why."""
    setup = build_script()
    text = build_file(setup, compiler(setup))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "build.ninja").write_text(text)
    subprocess.run([setup.find_ninja(), "-C", str(folder), "--quiet"], check=True)
    return folder / "test_kernels"


def main() -> int:
    """Build and run."""
    parser = argparse.ArgumentParser(description="run the tests of the CPU kernels under sanitizers")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "sanitize", help="folder of the build")
    args = parser.parse_args()
    try:
        program = build(args.out.resolve())
    except Unavailable as reason:
        print(f"skipped: {reason}")
        return SKIPPED
    except subprocess.CalledProcessError as error:
        return error.returncode
    return subprocess.run([program], env=environment(), check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
