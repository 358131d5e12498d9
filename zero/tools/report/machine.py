"""`zero report`: what is installed, what runs here, and how fast; for a bug report, or to see whether all is well."""

from __future__ import annotations

import json
import platform
import re
from dataclasses import asdict, dataclass
from importlib import metadata

import psutil
import torch
import torch.distributed as dist
from packaging.requirements import Requirement

from zero.kernels import cuda, native
from zero.tools.report.speed import Speed, measure

# What a reader may ask for, in the names of torch.cpu.get_capabilities().
_INSTRUCTIONS = (
    "sse2", "avx", "avx2", "fma3", "f16c", "avx512_f", "avx512_bw", "avx512_vl", "avx512_dq", "avx512_bf16", "amx_bf16",
    "neon", "sve", "bf16",
)  # fmt: skip


@dataclass(frozen=True)
class Versions:
    """Of zero and what it runs on; None: torch was built without it."""

    zero: str
    python: str
    torch: str
    cuda: str | None
    nccl: str | None
    gloo: bool


@dataclass(frozen=True)
class Machine:
    """Of the CPU: cores that this process may use, threads that torch uses, and what kind they are."""

    system: str
    architecture: str
    name: str
    cores: int
    threads: int
    instructions: tuple[str, ...]
    memory_nbytes: int


@dataclass(frozen=True)
class CpuKernels:
    """``zero._cpu``: the instruction sets it was compiled for, weakest first, those that run here, and the one in use.

    `missing`: why it is not there and what follows from that; the sets are empty then.
    """

    compiled: tuple[str, ...]
    runnable: tuple[str, ...]
    picked: str | None
    missing: str | None


@dataclass(frozen=True)
class CudaKernels:
    """``zero._cuda``: the architectures it was compiled for, in the words of ``ZERO_CUDA_ARCHS``.

    `missing`: why it is not there and what follows from that.
    """

    compiled: tuple[str, ...]
    missing: str | None


@dataclass(frozen=True)
class Gpu:
    """A visible GPU, and whether it runs ``zero._cuda``."""

    name: str
    capability: str
    memory_nbytes: int
    runs_kernels: bool


@dataclass(frozen=True)
class Extra:
    """An optional library: the extra of zero that asks for it, and its version; None: it is not installed."""

    extra: str
    name: str
    version: str | None


@dataclass(frozen=True)
class Facts:
    """All of the above, and what should be there but is not."""

    versions: Versions
    machine: Machine
    cpu: CpuKernels
    cuda: CudaKernels
    gpus: tuple[Gpu, ...]
    extras: tuple[Extra, ...]
    problems: tuple[str, ...]


def run(measured: bool, as_json: bool) -> int:
    """Print the report; the exit status is 1 where something is missing that should be there, else 0."""
    facts = gather()
    # Without compiled kernels there is nothing to measure but torch.
    speed = measure() if measured and facts.cpu.picked is not None else None
    if as_json:
        print(json.dumps({**asdict(facts), "speed": None if speed is None else asdict(speed)}, indent=2))
    else:
        print("\n".join(lines(facts, speed)))
    return 1 if facts.problems else 0


def lines(facts: Facts, speed: Speed | None) -> list[str]:
    """The report as text, one fact per line, what is wrong at the end."""
    versions, machine, cpu, cuda = facts.versions, facts.machine, facts.cpu, facts.cuda
    rows = [
        ("zero", versions.zero),
        ("Python", versions.python),
        ("torch", f"{versions.torch}, {f'CUDA {versions.cuda}' if versions.cuda else 'without CUDA'}"),
        ("collectives", f"gloo {_there(versions.gloo)}, NCCL {versions.nccl or 'not there'}"),
        ("machine", f"{machine.system}, {machine.architecture}, {machine.name}"),
        ("cores", f"{machine.cores}, of which torch uses {machine.threads}"),
        ("RAM", _gib(machine.memory_nbytes)),
        ("instructions", " ".join(machine.instructions) or "unknown"),
        ("CPU kernels", _cpu_text(facts)),
        ("CUDA kernels", f"compiled for {' '.join(cuda.compiled)}" if cuda.compiled else "not there"),
        *((f"GPU {index}", _gpu_text(gpu)) for index, gpu in enumerate(facts.gpus)),
        *([] if facts.gpus else [("GPUs", "none visible")]),
        *_extra_rows(facts.extras),
        *([] if speed is None else _speed_rows(speed)),
    ]
    if speed is None:
        rows.append(("speed", "not measured" if cpu.picked else "not measured, as there are no compiled CPU kernels"))
    width = max(len(name) for name, _ in rows)
    return [f"{name:<{width}}  {text}" for name, text in rows] + [f"\nproblem: {text}" for text in facts.problems]


def _there(yes: bool) -> str:
    return "there" if yes else "not there"


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f} GiB"


def _cpu_text(facts: Facts) -> str:
    cpu = facts.cpu
    if cpu.picked is None:
        return "not there"
    return f"{cpu.picked} in use; run here: {' '.join(cpu.runnable)}; compiled: {' '.join(cpu.compiled)}"


def _gpu_text(gpu: Gpu) -> str:
    kernels = "runs the kernels" if gpu.runs_kernels else "runs plain torch operations"
    return f"{gpu.name}, compute capability {gpu.capability}, {_gib(gpu.memory_nbytes)}, {kernels}"


def _extra_rows(extras: tuple[Extra, ...]) -> list[tuple[str, str]]:
    """One row for each extra of zero, with the libraries it asks for."""
    rows: dict[str, list[str]] = {}
    for extra in extras:
        rows.setdefault(extra.extra, []).append(f"{extra.name} {extra.version or 'not there'}")
    return [(f"extra {name}", ", ".join(texts)) for name, texts in rows.items()]


def _speed_rows(speed: Speed) -> list[tuple[str, str]]:
    threads = f"{speed.threads} thread{'' if speed.threads == 1 else 's'}"
    memory = f"{speed.update:.1f} GB/s updating, {speed.copy:.1f} copying, by torch in fp32 ({threads})"
    mixed = f"{speed.mixed:.1f} GB/s, {speed.mixed_share:.0f} % of the faster (bf16, fp32 moments: 26 B/parameter)"
    fp32 = f"{speed.fp32:.1f} GB/s, {speed.fp32_share:.0f} % (28 B/parameter)"
    return [("memory", memory), ("Adam, mixed", mixed), ("Adam, fp32", fp32)]


def gather() -> Facts:
    """Look at this process and machine, without measuring; makes a CUDA context where there is a GPU."""
    cpu, compiled, gpus = _cpu_kernels(), _cuda_kernels(), _gpus()
    problems = [cpu.missing] if cpu.missing else []
    if gpus and compiled.missing:
        problems.append(compiled.missing)
    elif not all(gpu.runs_kernels for gpu in gpus):
        wrong = ", ".join(f"{gpu.name} ({gpu.capability})" for gpu in gpus if not gpu.runs_kernels)
        problems.append(
            f"the CUDA kernels, compiled for {', '.join(compiled.compiled)}, do not run on {wrong}: plain torch "
            "operations run there, with equal results but several times slower. To get them, install zero from source "
            "with this compute capability in ZERO_CUDA_ARCHS."
        )
    return Facts(_versions(), _machine(), cpu, compiled, gpus, _extras(), tuple(problems))


def _versions() -> Versions:
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if dist.is_available() and dist.is_nccl_available() else None
    gloo = dist.is_available() and dist.is_gloo_available()
    own = _version("zero") or "(not installed)"  # run from its folder
    return Versions(own, platform.python_version(), torch.__version__, torch.version.cuda, nccl, gloo)


def _machine() -> Machine:
    process = psutil.Process()
    cores = len(process.cpu_affinity()) if hasattr(process, "cpu_affinity") else psutil.cpu_count() or 1
    capable = torch.cpu.get_capabilities()
    return Machine(
        system=platform.system(),
        architecture=platform.machine(),
        name=str(capable.get("cpu_name") or platform.processor() or "unknown"),
        cores=cores,
        threads=torch.get_num_threads(),
        instructions=tuple(name for name in _INSTRUCTIONS if capable.get(name)),
        memory_nbytes=psutil.virtual_memory().total,
    )


def _cpu_kernels() -> CpuKernels:
    missing = native.missing_text()
    module = None if missing else native.load()  # which would say it as a warning
    if module is None:
        return CpuKernels((), (), None, missing)
    return CpuKernels(tuple(module.compiled_isas()), tuple(module.isas()), str(module.isa()), None)


def _cuda_kernels() -> CudaKernels:
    missing = native.missing_text(native.CUDA_MODULE)
    module = None if missing else native.load(native.CUDA_MODULE)
    if module is None:
        return CudaKernels((), missing)
    return CudaKernels(tuple(re.split(r"[;,\s]+", module.ARCHS.strip())), None)


def _gpus() -> tuple[Gpu, ...]:
    gpus = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        capability = f"{properties.major}.{properties.minor}"
        # What was compiled for a GPU may still not run, with an old driver: the first launch shows that.
        runs = native.missing_text(native.CUDA_MODULE) is None and cuda.kernels(torch.device("cuda", index)) is not None
        gpus.append(Gpu(properties.name, capability, properties.total_memory, runs))
    return tuple(gpus)


def _extras() -> tuple[Extra, ...]:
    """Every library that an extra of zero asks for; none where zero runs from its folder without an installation."""
    try:
        requirements = [Requirement(text) for text in metadata.requires("zero") or ()]
    except metadata.PackageNotFoundError:
        return ()
    extras = []
    for requirement in requirements:
        extra = re.search(r"extra\s*==\s*['\"]([^'\"]+)", str(requirement.marker or ""))
        if extra is not None:
            extras.append(Extra(extra[1], requirement.name, _version(requirement.name)))
    return tuple(extras)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
