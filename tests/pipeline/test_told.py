"""The promise: an engine says which stages it has and how its schedule runs, and an estimate what a rank takes."""

from __future__ import annotations

from json import dumps
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pipelines import ROWS, WIDTH, batches, chain, json_of

import zero
from zero.__main__ import main
from zero.config import load
from zero.parallel.pipeline.schedule import of_section
from zero.plan.pipeline import Kind


def described(json: dict[str, Any]) -> tuple[str, str, dict[str, int], float]:
    engine = zero.initialize(model=chain(), config=json, loss_fn=F.cross_entropy)[0]
    said = engine.describe()
    engine.train_batch(batches(engine.get_data_parallel_rank()))
    alive = engine.state_nbytes()
    engine.destroy()
    return str(said).splitlines()[0], said.schedule, alive._asdict(), sum(each.numel for each in said.units)


def test_an_engine_describes_its_stages(pool):
    json = json_of(1, 1, 8, pipeline={"stages": 2})
    first, second = pool.run(2, described, json)
    assert first[0] == "stage 0 of 2; 1f1b of 8 micro-batches, at most 2 alive here; bubble 11.1 %"
    assert second[0] == "stage 1 of 2; 1f1b of 8 micro-batches, at most 1 alive here; bubble 11.1 %"
    assert first[1] == second[1] == of_section(load(json, 2)).text()
    assert first[1].splitlines()[0].startswith("pp 0: 0UNSHARD 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0")


@pytest.mark.parametrize("gather", ["step", "use"])
@pytest.mark.parametrize("stage", [1, 3])
def test_an_estimate_is_of_the_rank_that_has_the_most(pool, stage, gather):
    json = json_of(stage, 2, 4, pipeline={"stages": 2, "gather": gather, "partition": [2, 6]})
    estimate = zero.estimate(chain(), json, 4, device="cpu")
    row = estimate.configured.device
    assert "1f1b of 4 micro-batches: bubble 20.0 %, at most 2 alive on the first rank" in " ".join(
        str(estimate).split()
    )
    found = pool.run(4, described, json)
    assert max(each["parameters"] for _, _, each, _ in found) == row.parameters
    # Gathered once, whole parameters and gradients are there for the whole step.
    if stage == 3 and gather == "step":
        assert row.gathered >= 4 * max(numel for *_, numel in found)
    assert row.gradients == row.parameters * (2 if stage == 3 and gather == "step" else 1)


def planned() -> tuple[torch.nn.Module, Any]:
    return chain(), (torch.zeros(ROWS, WIDTH),)


def plan(folder: Path, section: dict[str, Any] | None, *words: str) -> int:
    """The status of `zero plan` with eight micro-batches, and this section of the JSON."""
    path = folder / "zero.json"
    path.write_text(dumps(json_of(1, 1, 8) | ({} if section is None else {"pipeline": section})))
    return main(["plan", *words, "--config", str(path)])


MODEL = (f"{__name__}:planned", "--world", "4")


@pytest.mark.parametrize(
    ("section", "words", "text"),
    [
        ({"stages": 2}, [], "1f1b of 8 micro-batches: bubble 11.1 %, at most 2 alive"),
        ({"stages": 2}, ["--pp", "2"], "1f1b of 8 micro-batches: bubble 11.1 %, at most 2 alive"),
        (None, ["--pp", "2"], "1f1b of 8 micro-batches: bubble 11.1 %, at most 2 alive"),
        (None, ["--pp", "4"], "1f1b of 8 micro-batches: bubble 27.3 %, at most 4 alive"),
        ({"stages": "auto", "schedule": "gpipe"}, ["--pp", "2"], "gpipe of 8 micro-batches: bubble 11.1 %, at most 8"),
        ({"schedule": "zbv"}, ["--pp", "2"], "zbv of 8 micro-batches: bubble 2.0 %, at most 4 alive"),
    ],
)
def test_a_plan_says_what_an_estimate_does(capsys, tmp_path, section, words, text):
    for device in ("cuda", "cpu"):
        assert plan(tmp_path, section, *MODEL, *words, "--device", device) == 0
        said = capsys.readouterr().out
        stages = {"stages": int(words[1]) if words else 2}
        found = zero.estimate(chain(), json_of(1, 1, 8, pipeline=(section or {}) | stages), 4, device=device)
        assert said == f"{found}\n" and text in " ".join(said.split())
    assert "Bytes are those of the stage that has the most." in " ".join(said.split())


NO_TIME = "got 2, wanted 1, as the time of pipelines is not predicted; for bytes and the bubble of a model say --device"


@pytest.mark.parametrize(
    ("section", "words", "text"),
    [
        ({"stages": 2}, [*MODEL, "--pp", "4"], "--pp: got 4, but pipeline.stages is 2 in "),
        ({"stages": 2}, [*MODEL, "--pp", "1"], "zero.json; keep one of the two"),
        (None, [*MODEL, "--pp", "3"], "pipeline.stages: pp 3 = 3 does not divide the 4 ranks"),
        ({"stages": 2}, [*MODEL, "--device", "h100"], f"pipeline.stages: {NO_TIME}"),
        (None, [*MODEL, "--device", "h100", "--pp", "2"], f"--pp: {NO_TIME}"),
        (None, [*MODEL, "--pp", "2", "--json"], f"--pp: {NO_TIME}"),
        ({"stages": 2}, [MODEL[0]], f"pipeline.stages: {NO_TIME}"),
        (None, ["--params", "1e7", "--world", "4", "--pp", "2"], "no layers are known; give a model"),
        (None, [*MODEL, "--tp", "2", "--pp", "2"], "is not planned together with pipeline.stages 2"),
    ],
)
def test_a_plan_that_cannot_be_says_why(capsys, tmp_path, section, words, text):
    assert plan(tmp_path, section, *words) == 2
    said = capsys.readouterr()
    assert text in said.err and not said.out


def test_a_key_that_is_given_twice_is_seen_beside_stages_of_the_command_line(capsys, tmp_path):
    path = tmp_path / "twice.json"
    path.write_text('{"gradient_accumulation_steps": 8, "gradient_accumulation_steps": 4}')
    assert main(["plan", *MODEL, "--pp", "2", "--config", str(path)]) == 2
    assert "key 'gradient_accumulation_steps' is given twice" in capsys.readouterr().err


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("stages", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("micro_batches", [1, 2, 5, 8, 16])
def test_bubbles_are_what_the_papers_say(schedule, stages, micro_batches):
    json = json_of(0, 1, micro_batches, pipeline={"stages": stages, "schedule": schedule})
    found = of_section(load(json, stages))
    assert found.bubble() == pytest.approx((stages - 1) / (micro_batches + stages - 1))
    assert found.alive(0) == (micro_batches if schedule == "gpipe" else min(stages, micro_batches))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zero_bubble", "zbv", "dualpipev"])
@pytest.mark.parametrize("stages", [2, 4])
def test_every_micro_batch_goes_through_every_stage_once_and_in_order(schedule, stages):
    """In the backward, too: that is the order in which gradients add up."""
    json = json_of(0, 1, 16, pipeline={"stages": stages, "schedule": schedule})
    found = of_section(load(json, stages))
    for place, order in enumerate(found.orders):
        for stage in found.stages(place):
            done = {kind: [each.micro_batch for each in order if each[:2] == (kind, stage)] for kind in Kind}
            assert done[Kind.FORWARD] == list(range(16))
            assert sorted(done[Kind.BACKWARD] + done[Kind.BACKWARD_INPUT]) == list(range(16))
            landed = [
                each.micro_batch
                for each in order
                if each.stage == stage and each.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
            ]
            assert landed == list(range(16))
    assert found.bubble() < (stages - 1) / (16 + stages - 1) or schedule in ("gpipe", "1f1b")
