"""Everything that a GPU has to show, in parts: what `make gpu` runs.

    python benchmarks/gpu.py first              a little of everything, in six minutes
    python benchmarks/gpu.py second             the short tests of the engine, steps of 1.42B, in as many
    python benchmarks/gpu.py third              what failed of those, streamed state, memcheck, in four
    python benchmarks/gpu.py                    all the other parts
    python benchmarks/gpu.py kernels core       these
    python benchmarks/gpu.py --list

A part takes less than nine minutes: it is ended then, and counts as cut. What a part found is appended to
OUT/lines.jsonl as it is found, a line for each test, each row of a table that a benchmark printed, and each part; a run
that is killed leaves them. Another call builds, and leaves out the parts that passed and of the others the tests that
did, in this folder or in the lines of another (--again FILE), so that a machine that is lent by the minute can be used
by it. What fails is collected: the table at the end and the exit status say it.

Where torch sees no GPU the same parts run, with less in each, on a stand-in: a "cuda:0" that tests/cuda_emulation
compiles for the processor. That shows that the parts run, and that the engine and its tests keep what is on the device
apart from what is not. It measures nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
EMULATION = ROOT / "tests" / "cuda_emulation"
SECONDS = 530.0  # of a part
GOOD = ("passed", "skipped")
BUILD = "build"
NO_TESTS = 5  # pytest's status where none was left to run
WORKERS = max(2, min(8, (os.cpu_count() or 1) // 2))  # of pytest, each with up to four ranks that share the GPU
NO_GPU = "torch sees no GPU: the parts run on a stand-in, which shows that they run, and measures nothing"
PYTEST = "-m pytest -p gpu -p no:cacheprovider --tb short --continue-on-collection-errors"
KERNELS = "tests/kernels/test_cuda_kernels.py"
MATRIX = "tests/core/test_matrix.py tests/core/test_hsdp.py"  # two, three and four ranks
PRECISION = "tests/engine/test_overflow.py tests/engine/test_formats.py tests/core/test_same_bits.py"


class Part(NamedTuple):
    """What runs on a GPU and on the stand-in, as arguments of Python; None: `why` says why nothing does there."""

    about: str
    gpu: str | None
    stand_in: str | None
    why: str = ""
    needs: str = ""  # a program
    emulated: bool = False  # the stand-in has a "cuda:0"


def tests(about: str, where: str, quick: str) -> Part:
    """The tests of `where` with their long cases, a few workers at a time; of the stand-in `quick`."""
    run = f"{PYTEST} -m '' -n {WORKERS} --max-worker-restart 8 {where}"
    return Part(about, run, f"{PYTEST} -n 2 {quick}", emulated=True)


def sanitized(tool: str) -> Part:
    """The kernels under a tool of compute-sanitizer; what asks for errors, or for half a second of sleep, left out."""
    chosen = "gpu and not fails and not stream and not graph and not device_that_is_not"
    quiet = " --report-api-errors no" if tool == "memcheck" else ""  # torch asks CUDA what may fail
    run = f"--tool {tool}{quiet} --error-exitcode 9 {shlex.quote(sys.executable)} {PYTEST}"
    about = f"the CUDA kernels under compute-sanitizer's {tool}"
    why = "there is no GPU whose memory compute-sanitizer could watch"
    return Part(about, f"{run} {KERNELS} -k '{chosen}'", None, why, "compute-sanitizer")


def program(about: str, command: str, small: str | None = None) -> Part:
    return Part(about, f"benchmarks/{command}", small and f"benchmarks/{small}", "it times what a GPU does")


GPT = "--width 2048 --layers 24 --heads 16 --vocab 50304 --context 1024 --batch 8 --dtype bf16"
TINY = "--width 32 --layers 2 --heads 2 --vocab 64 --context 16 --batch 2 --rounds 1 --repeat 1"
ACTIVATIONS = "activations.py --rounds 1 --repeat 1 --width 32 --heads 2 --layers 2 --vocab 64 --context 32 --batch 1"
LOSS = "--loss-vocab 256 --loss-tokens 64 --loss-width 32 --budget 64 --most 256"
TINY_OFFLOAD = f"{TINY} --warmup 1 --variants none2 cpu2"
SMALL = "--width 1024 --layers 20 --heads 16 --vocab 50304 --context 1024 --batch 8 --dtype bf16 --rounds 3"
EACH_STAGE = "tests/core/test_same_numbers.py::test_each_stage_in_each_precision"
AND_STATE = (
    "tests/offload/test_offload_numbers.py::test_losses_norms_and_weights_are_those_of_the_device "
    "tests/checkpoint/test_checkpoint_save.py::test_each_element_is_written_once_and_every_file_is_plain_safetensors "
    "tests/checkpoint/test_checkpoint_load.py::test_parameters_that_ranks_keep_whole_are_loaded_whole"
)
SHORT = "-m 'not long' tests/core tests/engine tests/offload tests/recompute tests/checkpoint tests/data"
# What `first`, `second`, `third` stand for, and when each part ends on a GPU, in seconds of the call: one leaves its
# time to the next.
GROUPS = {
    "first": {BUILD: 140, "first-kernels": 190, "first-stages": 240, "first-state": 290, "first-step": 330},
    "third": {BUILD: 45, "short": 105, "memcheck": 165, "bench-streamed": 250},
    "second": {BUILD: 60, "short": 190, "bench-stage0": 245, "bench-stage3": 300, "bench-offload2": 355},
}
GROUPS["first"]["first-adam"] = 355
PARTS = {
    BUILD: Part("the compiled kernels, always", "benchmarks/gpu.py --build", "benchmarks/gpu.py --build"),
    "first-kernels": Part("every CUDA kernel", f"{PYTEST} -m gpu -n {WORKERS} {KERNELS}", f"{PYTEST} -m gpu {KERNELS}"),
    "first-stages": tests("each stage in each precision, on one rank and on two", EACH_STAGE, f"-m long {EACH_STAGE}"),
    "first-state": tests("offload, checkpoints", f"-m 'not long' {AND_STATE}", AND_STATE),
    "first-step": program(
        "a step of 304M parameters at stages 0 and 3 beside FSDP2",
        f"step.py --gpu --ranks 1 --variants fsdp2 zero0 zero3 {SMALL}",
        f"step.py --ranks 1 --variants fsdp2 zero0 zero3 {TINY}",
    ),
    "first-adam": program("fused Adam beside torch's and a copy", "kernels_cuda.py --numel 200000000 --rounds 3"),
    "short": tests("the short tests of the engine", SHORT, "tests/engine/test_overflow.py"),
    "kernels": Part("every CUDA kernel against torch", f"{PYTEST} -m '' tests/kernels", f"{PYTEST} {KERNELS}"),
    "core": tests("stages x precision x models against plain torch", "tests/core", MATRIX),
    "engine": tests("precision, norms, schedules, formats", "tests/engine", PRECISION),
    "offload": tests("state on the host and in files", "tests/offload", "tests/offload/test_offload_numbers.py"),
    "recompute": tests("recomputation, by policy", "tests/recompute", "tests/recompute/test_recompute.py"),
    "checkpoint": tests("checkpoints", "tests/checkpoint tests/data", "tests/checkpoint/test_checkpoint_save.py"),
    **{tool: sanitized(tool) for tool in ("memcheck", "racecheck", "synccheck", "initcheck")},
    "bench-kernels": program("kernels beside a copy and torch's fused AdamW", "kernels_cuda.py --numel 1000000000"),
    **{
        f"bench-stage{stage}": program(
            f"a step of stage {stage} beside FSDP2",
            f"step.py --gpu --ranks 1 --variants fsdp2 zero{stage} {GPT}",
            f"step.py --ranks 1 --variants fsdp2 zero{stage} {TINY}",
        )
        for stage in range(4)
    },
    **{
        f"bench-{name}": program(
            about, f"offload.py --rounds 1 {GPT} --variants {variants}", f"offload.py {TINY_OFFLOAD}"
        )
        for name, about, variants in (
            ("offload2", "stage 2 with the optimizer on the host", "none2 cpu2 cpu2-8bit"),
            ("streamed", "its state streamed through the GPU", "none2 gpu2 gpu2-8bit"),
            ("offload3", "stage 3 with both on the host, beside FSDP2", "none3 cpu3 fsdp2"),
        )
    },
    "bench-large": program(
        "6.9B with the optimizer on the host",
        "offload.py --rounds 1 --dtype bf16 --moments bf16 --recompute --variants cpu2 --width 4096 --layers 32 "
        "--heads 32 --vocab 50304 --context 1024 --batch 8",
    ),
    "bench-recompute": program(
        "policies of recomputation", "activations.py --dtype bf16 --budget 4096", f"{ACTIVATIONS} {LOSS}"
    ),
}


class Lines:
    """The file of lines, and what the earlier ones say."""

    def __init__(self, path: Path, most: int | None = None) -> None:
        self.path = path
        self._most = most  # so many bytes of it are read

    def add(self, **line: Any) -> None:
        with self.path.open("a") as file:  # one write each: workers of a part may add at the same time
            file.write(json.dumps(line) + "\n")

    def all(self) -> list[dict[str, Any]]:
        text = self.path.read_bytes()[: self._most].decode() if self.path.exists() else ""
        return [json.loads(line) for line in text.split("\n")[:-1]]  # a last one without an end was cut off

    def begin(self, earlier: list[dict[str, Any]]) -> None:
        """Put lines of another file before those of this one, and drop what a machine that was lost half wrote."""
        own = self.all()
        self.path.write_text("".join(json.dumps(line) + "\n" for line in (*(e for e in earlier if e not in own), *own)))

    def forget(self, parts: Sequence[str]) -> None:
        """Take out what the file says of some parts."""
        self.path.write_text("".join(json.dumps(line) + "\n" for line in self.all() if line["part"] not in parts))

    def read(self, part: str, kind: str) -> dict[str, dict[str, Any]]:
        """The last line of each test of a part ("test"), or of the part itself ("status"), by name."""
        found = [line for line in self.all() if line["part"] == part and kind in line]
        return {line["test" if kind == "test" else "part"]: line for line in found}


# What pytest calls of this file, where it is a plugin of the run of a part.


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Leave out what passed before."""
    # As when the part began: all its workers must choose the same, one that takes the place of another, too.
    lines = Lines(Path(os.environ["ZERO_GPU_LINES"]), int(os.environ["ZERO_GPU_BEFORE"]))
    before = lines.read(os.environ["ZERO_GPU_PART"], "test")
    done = [item for item in items if before.get(item.nodeid, {}).get("outcome") in GOOD]
    items[:] = [item for item in items if item not in done]
    config.hook.pytest_deselected(items=done)


def pytest_runtest_logreport(report: Any) -> None:
    """A line of each test, from the process that prints the results."""
    if os.environ.get("PYTEST_XDIST_WORKER") or not (report.when == "call" or report.outcome != "passed"):
        return
    text = report.longrepr[-1] if isinstance(report.longrepr, tuple) else str(report.longrepr or "")
    line = {"test": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 2)}
    lines = Lines(Path(os.environ["ZERO_GPU_LINES"]))
    lines.add(part=os.environ["ZERO_GPU_PART"], **line, **({"text": text.strip()[-600:]} if text else {}))


# The parts.


def device() -> str:
    """The name of the GPU, "" without one; asked of a process that ends, so that this one holds none of its memory."""
    ask = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else '')"
    return subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True).stdout.strip()


def build(folder: Path, gpu: bool) -> None:
    """zero._cpu and zero._cuda beside the sources; without a GPU the stand-in. Soon done where nothing is new."""
    if gpu:
        import torch

        kind = "".join(map(str, torch.cuda.get_device_capability()))  # other kinds would take as long again
        required = {"ZERO_CUDA_ARCHS": kind, **os.environ, "ZERO_REQUIRE_NATIVE": "1", "ZERO_REQUIRE_CUDA": "1"}
        subprocess.run([sys.executable, "setup.py", "build_ext", "--inplace"], cwd=ROOT, env=required, check=True)
        return
    sys.path.insert(0, str(EMULATION))
    from build import build as build_kernels  # type: ignore[import-not-found]
    from build import build_device

    sources = [*EMULATION.glob("*.*"), *(ROOT / "csrc").glob("*.*")]
    made = folder / "stand_in" / "_cuda.so"
    if not made.exists() or made.stat().st_mtime < max(source.stat().st_mtime for source in sources):
        made.parent.mkdir(exist_ok=True)
        build_device(made.parent)
        build_kernels(made.parent)


def environment(lines: Lines, name: str, gpu: str) -> dict[str, str]:
    """What the processes of a part find: the sources, this file as a plugin, and the stand-in where there is no GPU."""
    paths = [str(ROOT), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")]
    more = {"ZERO_GPU_LINES": str(lines.path), "ZERO_GPU_PART": name, "OMP_NUM_THREADS": "1"}
    more["ZERO_GPU_BEFORE"] = str(lines.path.stat().st_size if lines.path.exists() else 0)
    if PARTS[name].emulated and not gpu:
        paths.insert(0, str(EMULATION / "site"))
        more["ZERO_STAND_IN"] = str(lines.path.parent / "stand_in")
    # Whoever started this may be a worker of pytest-xdist, which a part of its own is not.
    outer = {key: value for key, value in os.environ.items() if key != "PYTEST_XDIST_WORKER"}
    return {**outer, **more, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}


def rows(text: str) -> Iterator[dict[str, str]]:
    """The rows of the markdown tables in a text, by the titles of their columns."""
    header: list[str] = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip()[1:-1].split("|")] if line.startswith("|") else []
        if not cells or not header:
            header = cells
        elif set(line) - set("|-"):
            yield dict(zip(header, cells, strict=False))


def run(command: Sequence[str], log: Path, env: dict[str, str], seconds: float, each: Callable[[], None]) -> int | None:
    """The exit status of a command whose output goes to `log`; None where its time was over and it was ended.

    `each` is called every second, and at the end.
    """
    end = time.monotonic() + seconds
    with log.open("w") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, min(1.0, end - time.monotonic())))
                each()
                if process.returncode is not None or time.monotonic() >= end:
                    return process.returncode
        finally:
            with contextlib.suppress(ProcessLookupError):  # and what it has started
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def run_part(name: str, lines: Lines, gpu: str, seconds: float) -> str:
    """Run one part and add its lines; its status: passed, failed, skipped or cut."""
    folder, part = lines.path.parent, PARTS[name]
    arguments, begin = part.gpu if gpu else part.stand_in, time.monotonic()
    absent = part.needs and shutil.which(part.needs) is None
    why = part.why if arguments is None else f"{part.needs} is not installed" if absent else ""
    done: dict[str, Any] = {"part": name, "device": gpu or "stand-in", "at": time.strftime("%Y-%m-%d %H:%M:%S")}
    if arguments is None or why:
        lines.add(**done, status="skipped", why=why)
        return "skipped"
    if part.needs:  # what it finds is no test's failure
        lines.forget([name])
    log, added = folder / f"{name}.log", 0

    def add_rows() -> None:
        nonlocal added
        for row in [*rows(log.read_text(errors="replace").rpartition("\n")[0])][added:]:
            lines.add(part=name, row=row)
            added += 1

    command = [part.needs or sys.executable, *shlex.split(arguments)]
    code = run(command, log, environment(lines, name, gpu), seconds, add_rows)
    outcomes = [line["outcome"] for line in lines.read(name, "test").values()]
    counts = {outcome: outcomes.count(outcome) for outcome in sorted(set(outcomes))}
    good = code == 0 or (code == NO_TESTS and outcomes and not part.needs)
    status = "cut" if code is None else "passed" if good and "failed" not in counts else "failed"
    took = round(time.monotonic() - begin, 1)
    lines.add(**done, status=status, code=code, seconds=took, log=str(log), **counts)
    return status


def summary(lines: Lines, names: Sequence[str]) -> str:
    """A line of text for each part, and below it each test of it that failed."""
    text = [f"{'part':16}{'status':10}{'seconds':>8}{'passed':>8}{'failed':>8}{'skipped':>9}"]
    for name in names:
        told = lines.read(name, "status").get(name, {"status": "not run"})
        cells = [str(told.get(key, "")) for key in ("seconds", "passed", "failed", "skipped")]
        text.append(f"{name:16}{told['status']:10}{cells[0]:>8}{cells[1]:>8}{cells[2]:>8}{cells[3]:>9}")
        text[-1] += f"  {told['why']}" if "why" in told else ""
        failed = [test for test, line in lines.read(name, "test").items() if line["outcome"] == "failed"]
        text += [f"    failed: {test}" for test in failed]
    return "\n".join(text)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="run what a GPU has to show, in parts; without one on a stand-in")
    parser.add_argument("parts", nargs="*", metavar="PART", help="which; first, second, third: some, minutes in all")
    parser.add_argument("--list", action="store_true", help="print the parts and end")
    parser.add_argument("--anew", action="store_true", help="also what passed before")
    parser.add_argument("--again", type=Path, metavar="FILE", help="of lines: what passed there has passed before, too")
    parser.add_argument("--out", type=Path, help="folder of lines.jsonl and the logs; out/gpu, or out/stand_in")
    parser.add_argument("--build", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if unknown := [name for name in args.parts if name not in (*GROUPS, *PARTS)]:
        parser.error(f"got {', '.join(unknown)}; wanted some of {', '.join((*GROUPS, *PARTS))}")
    if args.again and not args.again.is_file():
        parser.error(f"--again: there is no file {args.again}; wanted the lines.jsonl of an earlier call")
    return args


def main() -> int:
    begin, args = time.monotonic(), parse()
    if args.list:
        print("\n".join(f"{name:16}{part.about}" for name, part in PARTS.items()))
        return 0
    if args.build:
        build(Path(os.environ["ZERO_GPU_LINES"]).parent, bool(device()))
        return 0
    gpu, ends = device(), {part: end for name in args.parts for part, end in GROUPS.get(name, {}).items()}
    quick = {"short", *GROUPS["first"]}  # what others of all hold, too
    wanted = {BUILD, *ends, *(args.parts or PARTS.keys() - quick)}
    names = [name for name in PARTS if name in wanted]
    folder = (args.out or ROOT / "out" / ("gpu" if gpu else "stand_in")).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    lines = Lines(folder / "lines.jsonl")
    print(f"on {gpu}" if gpu else NO_GPU, flush=True)
    if args.anew:
        lines.forget(names)
    lines.begin(Lines(args.again).all() if args.again else [])
    for name in names:
        told = lines.read(name, "status").get(name, {}).get("status")
        if told in GOOD and name != BUILD:  # what was built may have been elsewhere
            print(f"{name}: {told} before", flush=True)
        else:
            seconds = max(1.0, ends[name] - time.monotonic() + begin) if gpu and name in ends else SECONDS
            print(f"{name}: {run_part(name, lines, gpu, seconds)}", flush=True)
    print(f"\n{summary(lines, names)}\n\nlines: {lines.path}")
    statuses = [lines.read(name, "status")[name]["status"] for name in names]
    return int(any(status not in GOOD for status in statuses))


if __name__ == "__main__":
    sys.exit(main())
