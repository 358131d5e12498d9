"""Run folders made up for tests, as `zero.monitor.run_folder` says they look."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

MIB = 2**20
UNITS = [{"name": f"blocks.{i}", "numel": 1_770_000, "bytes": 4 * 1_770_000, "dtype": "fp32"} for i in range(6)] + [
    {"name": "<root>", "numel": 98_304, "bytes": 4 * 98_304, "dtype": "fp32"}
]
FACTS = {
    "time": 1_790_000_000.0,
    "configuration": {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 3}},
    "world": 2,
    "stage": 3,
    "device": "cpu",
    "versions": {"zero": "0.1.0", "torch": "2.13.0", "Python": "3.11.2"},
    "units": UNITS,
    "plan": {"parameters": 21 * MIB, "gradients": 21 * MIB, "optimizer": 42 * MIB},
}


def step(number: int, rank: int = 0) -> dict[str, Any]:
    """A loss that falls, with a spike; a step of about 100 ms."""
    wave = math.sin(number * 1.7) + math.sin(number * 0.37 + rank)
    report = {
        "event": "step",
        "step": number,
        "time": FACTS["time"] + 0.1 * number,
        "seconds": 0.1 + 0.004 * wave,
        "samples": 8,
        "tokens": 2048.0,
        "global_samples": 8 * number,
        "skipped": False,
        "loss": 2 + 8 * math.exp(-number / 900) + 0.1 * wave + (3 if number == 777 else 0),
        "phases": {"forward": 0.03, "backward": 0.055 + 0.003 * wave, "step": 0.012},
        "sent": 63 * MIB,
    }
    if number % 10 == 1:  # once a second
        whole = (431 + 12 * wave) * MIB
        report["bytes"] = {"parameters": 21 * MIB, "gradients": 21 * MIB, "optimizer": 43 * MIB, "memory": whole}
    if rank == 0:
        warm = min(1.0, number / 200)
        values = {"accuracy": 1 - 0.9 ** (number / 500), "MFU": 0.38 + 0.01 * wave}
        report |= {"norm": 1.5 + 0.4 * wave, "lr": [3e-4 * warm, 1e-4 * warm], "values": values}
    return report


def timeline(number: int, rank: int = 0) -> dict[str, Any]:
    """Of 100 ms, 20 are waits for messages: the first gather, and 2 ms in front of the update of each of 7 units."""
    spans, at = [["MainThread", "wait gather blocks.0", 0.0, 0.006], ["messages", "gather blocks.0", 0.0, 0.006]], 0.006
    for i in range(6):
        spans += [["MainThread", f"forward blocks.{i}", at, at + 0.0045]]
        spans += [["messages", f"gather blocks.{i + 1}", at, at + 0.004]] if i < 5 else []
        at += 0.005
    spans += [["MainThread", "backward", at, at + 0.048]]
    for i in reversed(range(6)):
        spans += [["MainThread", f"recompute blocks.{i}", at, at + 0.002]]
        spans += [["messages", f"reduce blocks.{i}", at + 0.008, at + 0.014]]
        at += 0.008
    spans += [["MainThread", "step", at, 0.1]]
    for unit in UNITS:
        spans += [["MainThread", f"wait reduce {unit['name']}", at, at + 0.002]]
        spans += [["MainThread", f"update {unit['name']}", at + 0.002, at + 0.0022]]
        at += 0.0022
    return {"event": "timeline", "step": number, "spans": spans}


def write(folder: Path, steps: Iterable[int], ranks: int = 2, end: str | None = "ended", **facts: Any) -> Path:
    """A run of so many ranks; `end`: how it ended, None for one that was killed."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text(json.dumps(FACTS | {"world": ranks} | facts))
    numbers = list(steps)
    for rank in range(ranks):
        events = [{"event": "start", "time": FACTS["time"], "world": ranks, "step": 0}]
        events += [step(number, rank) for number in numbers]
        events.append({"event": "phase", "time": FACTS["time"] + 0.1 * numbers[-1], "phase": "backward"})
        if rank == 0:
            norms = {unit["name"]: [0.5, 40.0 + i, 0.02] for i, unit in enumerate(UNITS)}
            events.append({"event": "unit_norms", "step": numbers[-1], "units": norms})
            text = "the dataset has 7 samples: </script><b>the last one</b> is left out"
            events.append({"event": "warning", "time": FACTS["time"] + 3, "text": text})
        events.append(timeline(numbers[-1], rank))
        if end is not None:
            events.append({"event": "end", "time": FACTS["time"] + 0.1 * numbers[-1], "status": end})
        text = "".join(json.dumps(event) + "\n" for event in events)
        (folder / f"rank-{rank}.jsonl").write_text(text)
    return folder
