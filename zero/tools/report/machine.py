"""`zero report`: what is installed, what runs here, and how fast; for a bug report, or to see whether all is well."""

from __future__ import annotations

import json
from dataclasses import asdict

from zero.tools.report.facts import Extra, Facts, Gpu, gather
from zero.tools.report.speed import Speed, measure

__all__ = ["Facts", "Speed", "gather", "lines", "measure", "run"]


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
