"""The promise: a trace names each unit and what is done with it, changes no number, and leaves nothing behind."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from models import config, make_net, step

import zero
from zero.monitor.timeline import MESSAGES, Span, exposed, kernel_spans, summary

VERBS = {"gather", "reduce", "sum", "update", "release"}
EVERYTHING = {
    "comms_logger": {"enabled": True},
    "flops_profiler": {"enabled": True, "profile_step": 2},
    "wall_clock_breakdown": True,
    "steps_per_print": 2,
}
STEPS = 5


def parts(engine: Any) -> list[Any]:
    """What the profiles replace methods of."""
    sharded = engine._sharded
    found = [sharded.world.watchdog, engine.optimizer.shard_optimizer, *sharded.module.modules()]
    for unit in sharded.units:
        found += [unit, unit.gradients, unit.masters, unit.placement.state_store, unit.placement.shard_store]
    return found


def replaced(watched: list[Any]) -> set[str]:
    """Methods that stand in front of those of the class; `_apply` is that of every engine's modules."""
    return {name for part in watched for name in vars(part) if callable(getattr(type(part), name, None))} - {"_apply"}


def losses(settings: dict[str, Any], profiled: bool) -> tuple[list[float], Any]:
    model = make_net()
    engine: Any = zero.initialize(model=model, config=settings)[0]
    watched = parts(engine)
    assert bool(replaced(watched) - {"forward"}) == profiled  # that may be of what is recomputed
    found = [step(engine, number).item() for number in range(STEPS)]
    engine.destroy()
    assert not replaced(watched)
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    return found, [param.detach().clone() for param in model.parameters()]


def names_in(path: Path) -> set[str]:
    events = json.loads(path.read_text())["traceEvents"]
    return {event["name"].removeprefix("zero: ") for event in events if event.get("name", "").startswith("zero: ")}


def check(stage: int, world: int, folder: Path, verbs: set[str], **more: Any) -> None:
    again = {"recompute": {"modules": ["blocks.1"]}}
    profile = {"profile": {"steps": [2, 4], "dir": str(folder)}, **again}
    plain, weights = losses(config(stage, world, zero=again, **more), False)
    profiled, same = losses(config(stage, world, zero=profile, **EVERYTHING, **more), True)
    assert profiled == plain
    assert all(torch.equal(one, other) for one, other in zip(weights, same, strict=True))
    rank = torch.distributed.get_rank() if world > 1 else 0
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
    check(3, 2, tmp_path, VERBS)


@pytest.mark.long
@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_so_it_is_at_other_stages(stage: int, tmp_path: Path) -> None:
    check(stage, 2, tmp_path, {"gather", "reduce", "sum", "update"})


@pytest.mark.long
@pytest.mark.ranks(2)
@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_what_moves_off_the_device_has_names_too(device: str, tmp_path: Path) -> None:
    where = {"device": device, "nvme_path": str(tmp_path)}
    section = {"stage": 3, "offload_optimizer": where, "offload_param": where}
    moves = {"copy"} if device == "cpu" else {"copy", "wait read", "write"}
    check(3, 2, tmp_path, VERBS | moves, zero_optimization=section)


def test_of_given_ranks_only(tmp_path: Path) -> None:
    profile = {"profile": {"steps": [1, 1], "dir": str(tmp_path), "ranks": [1]}}
    engine: Any = zero.initialize(model=make_net(), config=config(0, 1, zero=profile))[0]
    step(engine, 0)
    engine.destroy()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"steps": [4, 2]}, r"zero\.profile\.steps: got \[4, 2\], wanted the first step and then the last"),
        ({"dir": "x"}, r"zero\.profile\.steps: is missing"),
        ({"steps": [0, 2]}, r"zero\.profile\.steps: .*wanted a list of two integers of at least 1"),
    ],
)
def test_steps_that_are_none_are_refused(section: dict[str, Any], said: str) -> None:
    with pytest.raises(zero.ConfigError, match=said):
        zero.initialize(model=make_net(), config=config(0, 1, zero={"profile": section}))


def test_a_span_inside_another_is_taken_from_it() -> None:
    spans = [
        Span("main", "wait gather a", 2.0, 3.0),
        Span("main", "gather a", 1.5, 4.0),
        Span("main", "forward", 0.0, 10.0),
        Span("main", "update a", 10.0, 12.0),
        Span(MESSAGES, "gather a", 1.0, 3.0),
        Span(MESSAGES, "reduce a", 2.0, 3.0),
    ]
    sums = summary(spans)
    assert sums["main"] == {"compute": 7.5, "gather": 1.5, "waits": 1.0, "update": 2.0}
    assert sums[MESSAGES] == {"gather": 2.0, "reduce": 1.0}


def test_streams_of_a_gpu() -> None:
    """Of invented events: this machine may have no GPU."""
    names = ["gemm", "gemm", "ncclDevKernel_AllGather_RING", "Memcpy HtoD (Pinned -> Device)", "gemm"]
    times = [(0, 100), (110, 200), (150, 400), (500, 600), (550, 700)]
    streams = [7, 7, 20, 21, 7]
    kind = torch.autograd.DeviceType
    events = [
        SimpleNamespace(
            name=name,
            device_type=kind.CUDA,
            device_resource_id=stream,
            time_range=SimpleNamespace(start=begin, end=end),
        )
        for name, (begin, end), stream in zip(names, times, streams, strict=True)
    ]
    host = SimpleNamespace(name="aten::mm", device_type=kind.CPU, time_range=SimpleNamespace(start=0, end=900))
    spans = kernel_spans([host, *events], later=1.0)
    assert [(span.stream[-2:].strip(), span.name) for span in spans] == [
        ("7", "kernels"), ("20", "gather"), ("21", "copy"), ("7", "kernels"),
    ]  # fmt: skip
    assert spans[0][2:] == (pytest.approx(1.0), pytest.approx(1.0002))  # two kernels close to each other
    assert exposed(spans) == pytest.approx(200e-6 + 50e-6)


def test_a_folder_that_cannot_be_written_ends_no_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    folder = str(tmp_path / "file" / "below")
    sections = {"zero": {"profile": {"steps": [1, 1], "dir": folder}}}
    sections["flops_profiler"] = {"enabled": True, "profile_step": 0, "output_file": f"{folder}/flops.txt"}
    engine: Any = zero.initialize(model=make_net(), config=config(0, 1, **sections))[0]
    for number in range(3):
        step(engine, number)
    assert engine.global_steps == 3
    engine.destroy()


def test_a_profiler_of_the_script_goes_on(tmp_path: Path) -> None:
    profile = {"profile": {"steps": [1, 1], "dir": str(tmp_path)}}
    with torch.profiler.profile() as profiler:
        engine: Any = zero.initialize(model=make_net(), config=config(0, 1, zero=profile))[0]
        step(engine, 0)
        engine.destroy()
    assert list(tmp_path.iterdir()) == []
    assert any("addmm" in event.name for event in profiler.events())


@pytest.mark.parametrize(("given", "number"), [({}, 5), ({"profile": {"steps": [2, 3]}}, 2)])
def test_the_report_has_the_timeline_of_one_step(given: dict[str, Any], number: int, tmp_path: Path) -> None:
    for section in given.values():
        section["dir"] = str(tmp_path / "traces")
    engine: Any = zero.initialize(model=make_net(), config=config(1, 1, zero={"report": str(tmp_path), **given}))[0]
    engine.monitor.at_end.clear()  # no page: tests/monitor/test_report_at_end.py
    for index in range(6):
        step(engine, index)
    engine.destroy()
    lines = [json.loads(line) for line in (tmp_path / "rank-0.jsonl").read_text().splitlines()]
    (timeline,) = [line for line in lines if line["event"] == "timeline"]
    assert timeline["step"] == number
    took = next(line["seconds"] for line in lines if line["event"] == "step" and line["step"] == number)
    spans = timeline["spans"]
    assert {"forward", "backward", "step", "reduce blocks.2", "update <root>"} <= {name for _, name, _, _ in spans}
    assert all(0 <= begin <= end < took for _, _, begin, end in spans)
    assert [name for _, name, _, _ in spans if name == "forward"] == ["forward"]
