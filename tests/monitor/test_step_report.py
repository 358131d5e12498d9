"""One value of a step: its line in the run folder is strict JSON, and its events have DeepSpeed's names."""

from __future__ import annotations

import json
import math

from zero.monitor.step_report import StepReport


def made(**more: object) -> StepReport:
    return StepReport(step=3, time=1.5, seconds=0.25, samples=8, tokens=0.0, global_samples=24, skipped=False, **more)


def test_the_line_has_what_is_known_and_null_for_what_is_not_finite():
    line = made(loss=math.inf, lr=(0.1, math.nan), phases={"forward": 0.5}, values={"accuracy": 0.75}).line()
    read = json.loads(json.dumps(line, allow_nan=False))
    assert read == {
        "event": "step", "step": 3, "time": 1.5, "seconds": 0.25, "samples": 8, "tokens": 0.0, "global_samples": 24,
        "skipped": False, "loss": None, "lr": [0.1, None], "phases": {"forward": 0.5}, "values": {"accuracy": 0.75},
    }  # fmt: skip


def test_the_events_have_deepspeeds_names_over_samples():
    report = made(loss=2.0, lr=(0.1, 0.2), scale=128.0, norm=0.5, phases={"forward": 0.002}, values={"accuracy": 0.75})
    assert report.events() == [
        ("Train/Samples/train_loss", 2.0, 24),
        ("Train/Samples/lr", 0.1, 24),
        ("Train/Samples/loss_scale", 128.0, 24),
        ("Train/Samples/grad_norm", 0.5, 24),
        ("Train/Samples/elapsed_time_ms_forward", 2.0, 24),
        ("Train/Samples/accuracy", 0.75, 24),
    ]
    assert [name for name, *_ in made().events()] == []
