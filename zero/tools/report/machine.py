"""`zero report`: what is installed, what runs here, and how fast; for a bug report, or to see whether all is well.

The facts, as `--json` prints them with "speed" (see `measure`); None for what is not there:
    versions  zero, python and torch; cuda and nccl, which torch was built with; gloo, whether it was
    machine   system, architecture, name, memory_nbytes; cores that this process may use, threads that torch uses;
              instructions of the CPU
    cpu       of `zero._cpu` the instruction sets: compiled, weakest first, runnable here, and the one picked;
              missing: why it is not there and what follows from that, the sets are empty then
    cuda      of `zero._cuda`, compiled: the architectures in the words of ZERO_CUDA_ARCHS; missing
    gpus      of each visible one name, capability, memory_nbytes; runs_kernels, whether it runs `zero._cuda`
    extras    of each optional library the extra of zero that asks for it, name and version
    problems  what should be there but is not
"""

from __future__ import annotations

import json
import platform
import re
from importlib import metadata
from typing import Any

import psutil
import torch
import torch.distributed as dist
from packaging.requirements import Requirement

from zero.kernels import cuda, native
from zero.log import counted
from zero.memory.available import cores
from zero.tools.report.speed import measure

# What a reader may ask for, in the names of torch.cpu.get_capabilities().
_INSTRUCTIONS = (
    "sse2", "avx", "avx2", "fma3", "f16c", "avx512_f", "avx512_bw", "avx512_vl", "avx512_dq", "avx512_bf16", "amx_bf16",
    "neon", "sve", "bf16",
)  # fmt: skip

Facts = dict[str, Any]
GIB = 2**30


def run(measured: bool, as_json: bool) -> int:
    """Print the report; the exit status is 1 where something is missing that should be there, else 0."""
    facts = gather()
    # Without compiled kernels there is nothing to measure but torch.
    speed = measure() if measured and facts["cpu"]["picked"] is not None else None
    if as_json:
        print(json.dumps({**facts, "speed": speed}, indent=2))
    else:
        print("\n".join(lines(facts, speed)))
    return 1 if facts["problems"] else 0


def lines(facts: Facts, speed: Facts | None) -> list[str]:
    """The report as text, one fact per line, what is wrong at the end."""
    versions, machine, gpus = facts["versions"], facts["machine"], facts["gpus"]
    cpu, archs = facts["cpu"], facts["cuda"]["compiled"]
    kernels = f"{cpu['picked']} in use; run here: {' '.join(cpu['runnable'])}; compiled: {' '.join(cpu['compiled'])}"
    rows = [
        ("zero", versions["zero"]),
        ("Python", versions["python"]),
        ("torch", f"{versions['torch']}, {'CUDA ' + versions['cuda'] if versions['cuda'] else 'without CUDA'}"),
        ("collectives", f"gloo {'' if versions['gloo'] else 'not '}there, NCCL {versions['nccl'] or 'not there'}"),
        ("machine", f"{machine['system']}, {machine['architecture']}, {machine['name']}"),
        ("cores", f"{machine['cores']}, of which torch uses {machine['threads']}"),
        ("RAM", in_gib(machine["memory_nbytes"])),
        ("instructions", " ".join(machine["instructions"]) or "unknown"),
        ("CPU kernels", "not there" if cpu["picked"] is None else kernels),
        ("CUDA kernels", f"compiled for {' '.join(archs)}" if archs else "not there"),
        *((f"GPU {index}", _gpu_text(gpu)) for index, gpu in enumerate(gpus)),
        *([] if gpus else [("GPUs", "none visible")]),
        *_extra_rows(facts["extras"]),
        *([] if speed is None else _speed_rows(speed)),
    ]
    if speed is None:
        rows.append(("speed", "not measured" + ", as there are no compiled CPU kernels" * (cpu["picked"] is None)))
    width = max(len(name) for name, _ in rows)
    return [f"{name:<{width}}  {text}" for name, text in rows] + [f"\nproblem: {text}" for text in facts["problems"]]


def in_gib(nbytes: int) -> str:
    """As text."""
    return f"{nbytes / GIB:,.1f} GiB"


def _gpu_text(gpu: Facts) -> str:
    kernels = "runs the kernels" if gpu["runs_kernels"] else "runs plain torch operations"
    return f"{gpu['name']}, compute capability {gpu['capability']}, {in_gib(gpu['memory_nbytes'])}, {kernels}"


def _extra_rows(extras: list[Facts]) -> list[tuple[str, str]]:
    """One row for each extra of zero, with the libraries it asks for."""
    rows: dict[str, list[str]] = {}
    for each in extras:
        rows.setdefault(each["extra"], []).append(f"{each['name']} {each['version'] or 'not there'}")
    return [(f"extra {name}", ", ".join(texts)) for name, texts in rows.items()]


def _speed_rows(speed: Facts) -> list[tuple[str, str]]:
    threads = counted(speed["threads"], "thread")
    memory = f"{speed['update']:.1f} GB/s updating, {speed['copy']:.1f} copying, by torch in fp32 ({threads})"
    mixed = (
        f"{speed['mixed']:.1f} GB/s, {speed['mixed_share']:.0f} % of the faster (bf16, fp32 moments: 26 B/parameter)"
    )
    fp32 = f"{speed['fp32']:.1f} GB/s, {speed['fp32_share']:.0f} % (28 B/parameter)"
    return [("memory", memory), ("Adam, mixed", mixed), ("Adam, fp32", fp32)]


def gather() -> Facts:
    """Look at this process and machine, without measuring; makes a CUDA context where there is a GPU."""
    cpu, compiled, gpus = _cpu_kernels(), _cuda_kernels(), _gpus()
    problems = [cpu["missing"]] if cpu["missing"] else []
    if gpus and compiled["missing"]:
        problems.append(compiled["missing"])
    elif wrong := [f"{gpu['name']} ({gpu['capability']})" for gpu in gpus if not gpu["runs_kernels"]]:
        problems.append(
            f"the CUDA kernels, compiled for {', '.join(compiled['compiled'])}, do not run on {', '.join(wrong)}: "
            "plain torch operations run there, with equal results but several times slower. To get them, install zero "
            "from source with this compute capability in ZERO_CUDA_ARCHS."
        )
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if dist.is_available() and dist.is_nccl_available() else None
    versions = {
        "zero": _version("zero") or "(not installed)",  # run from its folder
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": nccl,
        "gloo": dist.is_available() and dist.is_gloo_available(),
    }
    capable = torch.cpu.get_capabilities()
    machine = {
        "system": platform.system(),
        "architecture": platform.machine(),
        "name": str(capable.get("cpu_name") or platform.processor() or "unknown"),
        "cores": cores(),
        "threads": torch.get_num_threads(),
        "instructions": [name for name in _INSTRUCTIONS if capable.get(name)],
        "memory_nbytes": psutil.virtual_memory().total,
    }
    facts = {"versions": versions, "machine": machine, "cpu": cpu, "cuda": compiled, "gpus": gpus}
    return facts | {"extras": _extras(), "problems": problems}


def _cpu_kernels() -> Facts:
    missing = native.missing_text()
    module = None if missing else native.load()  # which would say it as a warning
    if module is None:
        return {"compiled": [], "runnable": [], "picked": None, "missing": missing}
    isas = {"compiled": list(module.compiled_isas()), "runnable": list(module.isas())}
    return {**isas, "picked": str(module.isa()), "missing": None}


def _cuda_kernels() -> Facts:
    missing = native.missing_text(native.CUDA_MODULE)
    module = None if missing else native.load(native.CUDA_MODULE)
    return {"compiled": [] if module is None else re.split(r"[;,\s]+", module.ARCHS.strip()), "missing": missing}


def _gpus() -> list[Facts]:
    gpus = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        seen = torch.cuda.get_device_properties(index)
        capability = f"{seen.major}.{seen.minor}"
        # What was compiled for a GPU may still not run, with an old driver: the first launch shows that.
        runs = native.missing_text(native.CUDA_MODULE) is None and cuda.kernels(torch.device("cuda", index)) is not None
        what = {"name": seen.name, "capability": capability, "memory_nbytes": seen.total_memory}
        gpus.append({**what, "runs_kernels": runs})
    return gpus


def _extras() -> list[Facts]:
    """Every library that an extra of zero asks for; none where zero runs from its folder without an installation."""
    try:
        requirements = [Requirement(text) for text in metadata.requires("zero") or ()]
    except metadata.PackageNotFoundError:
        return []
    found = [(re.search(r"extra\s*==\s*['\"]([^'\"]+)", str(each.marker or "")), each.name) for each in requirements]
    return [{"extra": extra[1], "name": name, "version": _version(name)} for extra, name in found if extra]


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
