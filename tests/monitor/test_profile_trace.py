"""The promise: a trace names each unit and what is done with it, changes no number, and leaves nothing behind."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scenario import run, same

from zero.monitor.timeline import exposed, kernel_spans

VERBS = {"gather", "reduce", "sum", "update", "release"}
EVERYTHING = {
    "comms_logger": {"enabled": True},
    "flops_profiler": {"enabled": True, "profile_step": 2},
    "wall_clock_breakdown": True,
    "steps_per_print": 2,
}


def names_in(path: Path) -> set[str]:
    events = json.loads(path.read_text())["traceEvents"]
    return {event["name"].removeprefix("zero: ") for event in events if event.get("name", "").startswith("zero: ")}


def check(stage: int, folder: Path, verbs: set[str], **more: Any) -> None:
    again = {"recompute": {"modules": ["blocks.1"]}}
    profile = {"profile": {"steps": [2, 4], "dir": str(folder)}, **again}
    plain = run("net", stage, 5, zero=again, **more)
    profiled = run("net", stage, 5, zero=profile, **EVERYTHING, **more)
    assert same(profiled, plain)
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    rank = torch.distributed.get_rank()
    found = names_in(folder / f"rank-{rank}.trace.json")
    units = {"<root>", "blocks.0", "blocks.1", "blocks.2"}
    assert {f"{verb} {unit}" for verb in verbs for unit in units} <= found
    assert {"forward", "backward", "step", "forward blocks.0", "forward blocks.1", "recompute blocks.1"} <= found
    assert "recompute blocks.0" not in found
    text = (folder / f"rank-{rank}.summary.txt").read_text()
    assert text.startswith(f"steps 2 to 4 on rank {rank}\n")
    assert re.search(r"compute +gather +reduce +update +transfer +waits", text)
    assert "MainThread" in text


@pytest.mark.ranks(2)
def test_a_trace_names_units_and_verbs_and_changes_no_number(tmp_path: Path) -> None:
    check(3, tmp_path, VERBS)


@pytest.mark.long
@pytest.mark.ranks(2)
@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_what_moves_off_the_device_has_names_too(device: str, tmp_path: Path) -> None:
    where = {"device": device, "nvme_path": str(tmp_path)}
    moves = {"copy"} if device == "cpu" else {"copy", "wait read", "write"}
    check(3, tmp_path, VERBS | moves, section={"offload_optimizer": where, "offload_param": where})


def event(name: str, begin: int, end: int, stream: int, kind: Any = torch.autograd.DeviceType.CUDA) -> SimpleNamespace:
    times = SimpleNamespace(start=begin, end=end)
    return SimpleNamespace(name=name, device_type=kind, device_resource_id=stream, time_range=times)


def test_streams_of_a_gpu() -> None:
    """Of invented events: this machine may have no GPU."""
    events = [
        event("aten::mm", 0, 900, 0, torch.autograd.DeviceType.CPU),
        event("gemm", 0, 100, 7),
        event("gemm", 110, 200, 7),
        event("ncclDevKernel_AllGather_RING", 150, 400, 20),
        event("Memcpy HtoD (Pinned -> Device)", 500, 600, 21),
        event("gemm", 550, 700, 7),
    ]
    spans = kernel_spans(events, later=1.0)
    wanted = [("7", "kernels"), ("20", "gather"), ("21", "copy"), ("7", "kernels")]
    assert [(span.stream[-2:].strip(), span.name) for span in spans] == wanted
    assert spans[0][2:] == (pytest.approx(1.0), pytest.approx(1.0002))  # two kernels close to each other
    assert exposed(spans) == pytest.approx(200e-6 + 50e-6)


def test_a_folder_that_cannot_be_written_ends_no_run_and_other_ranks_write_none(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    folder = str(tmp_path / "file" / "below")
    flops = {"enabled": True, "profile_step": 0, "output_file": f"{folder}/flops.txt"}
    assert run("net", 0, zero={"profile": {"steps": [1, 1], "dir": folder}}, flops_profiler=flops).steps == 3
    run("net", 0, 1, zero={"profile": {"steps": [1, 1], "dir": str(tmp_path / "none"), "ranks": [1]}})
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_profiler_of_the_script_goes_on(tmp_path: Path) -> None:
    with torch.profiler.profile() as profiler:
        run("net", 0, 1, zero={"profile": {"steps": [1, 1], "dir": str(tmp_path)}})
    assert list(tmp_path.iterdir()) == []
    assert any("addmm" in event.name for event in profiler.events())


@pytest.mark.parametrize(("given", "number"), [({}, 5), ({"profile": {"steps": [2, 3]}}, 2)])
def test_the_report_has_the_timeline_of_one_step(given: dict[str, Any], number: int, tmp_path: Path) -> None:
    for section in given.values():
        section["dir"] = str(tmp_path / "traces")
    run("net", 1, 6, zero={"report": str(tmp_path), **given})
    lines = [json.loads(line) for line in (tmp_path / "rank-0.jsonl").read_text().splitlines()]
    ((step, spans),) = [(line["step"], line["spans"]) for line in lines if line["event"] == "timeline"]
    assert step == number
    steps = (number - 1, number)  # it begins once the profiler runs, within what counts to the step before
    took = sum(line["seconds"] for line in lines if line["event"] == "step" and line["step"] in steps)
    assert {"forward", "backward", "step", "reduce blocks.2", "update <root>"} <= {name for _, name, _, _ in spans}
    assert all(0 <= begin <= end < took for _, _, begin, end in spans)
    assert [name for _, name, _, _ in spans if name == "forward"] == ["forward"]
