"""The promise: the log says how training goes, in short lines of rank 0's, which cost nothing in between."""

from __future__ import annotations

import gc
import io
import logging
import math
import re
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import batch, config, make_net, share
from nodes import environment
from ranks import listening
from scenario import run
from tqdm import tqdm

import zero
from zero.log import logger

LINE = re.compile(
    r"step (?P<step>\d+) \| (loss (?P<loss>\S+) \| )?norm (?P<norm>\S+) \| lr (?P<lr>[^|]+) \| "
    r"(loss scale (?P<scale>\S+) \| )?(skipped (?P<skipped>\d+) \| )?(loss not finite (?P<bad>\d+) \| )?"
    r"(?P<rate>[\d.,e+]+ \w+)/s \| [\d.,e+]+ ms/step \| (GPU )?memory [\d,.]+ [MG]iB"
    r"( \| (?P<shares>forward \d+%, backward \d+%, step \d+%, other \d+%))?"
)


def said(run: Any) -> list[str]:
    """The lines that `run()` logs on this rank."""
    with listening(logging.INFO) as lines:
        run()
    return lines


def steps_of(lines: list[str]) -> list[dict[str, str]]:
    found = [line for line in lines if re.match(r"step \d", line)]
    matches = [LINE.fullmatch(line) for line in found]
    assert all(matches), found
    return [match.groupdict() for match in matches]


def train(count: int, json: Any = 1, **more: Any) -> tuple[list[str], list[float]]:
    """What `count` optimizer steps log, on this rank's share of the batches, and the losses [micro-steps] here."""
    with listening(logging.INFO) as lines:
        losses = run("dealt", json, count, **more).losses
    return lines, losses


def test_a_line_every_so_many_steps_and_one_at_the_end():
    lines, losses = train(4, steps_per_print=2)
    rows = steps_of(lines)
    assert [row["step"] for row in rows] == ["2", "4"]
    assert [row["loss"] for row in rows] == [f"{losses[1]:.4g}", f"{losses[3]:.4g}"]
    assert all(row["lr"] == "0.01" and row["rate"].endswith(" samples") and row["shares"] is None for row in rows)
    assert not any(row["scale"] or row["skipped"] or row["bad"] for row in rows)
    assert "mom" not in "".join(lines)
    assert re.fullmatch(
        r"4 steps, 8 samples in [\d.]+ s: forward \d+%, backward \d+%, step \d+%, other \d+%", lines[-1]
    )


@pytest.mark.ranks(2)
def test_the_loss_is_that_of_the_global_batch_and_rank_0_alone_speaks():
    lines, losses = train(2, steps_per_print=1, accumulation=2)
    own = torch.tensor(losses).double().view(2, 2).mean(1)
    dist.all_reduce(own)
    rows = steps_of(lines)
    assert [row["loss"] for row in rows] == ([f"{loss:.4g}" for loss in own / 2] if dist.get_rank() == 0 else [])
    assert dist.get_rank() == 0 or lines == []


@pytest.mark.ranks(2)
def test_tokens_of_all_ranks_are_counted_instead_of_samples(monkeypatch):
    clock = iter(range(10**6))
    monkeypatch.setattr("zero.engine.recorder.time.perf_counter", lambda: float(next(clock)))
    rates = {}
    for name, count in {"number": 1000, "tensor": torch.tensor(1000)}.items():
        engine, *_ = zero.initialize(model=make_net(), config=config(1, 2, steps_per_print=1))
        tokens = count * (1 + dist.get_rank())  # ranks need not have as many
        lines = said(lambda: (engine.backward(engine(*share(0)), tokens=tokens), engine.step()))  # noqa: B023
        rates[name] = [row["rate"] for row in steps_of(lines)]
        engine.destroy()
    if dist.get_rank() == 0:
        rate, what = rates["number"][0].split()
        assert what == "tokens" and float(rate.replace(",", "")) >= 100, "3000 in a few ticks of a second"
    assert rates["number"] == rates["tensor"]


def of_torch(engine: Any, number: int, inputs: Any) -> torch.Tensor:
    """The backward of torch."""
    (loss := engine(*inputs)).backward()
    return loss


def test_what_a_line_has_follows_what_there_is():
    plain = steps_of(train(1, loop=of_torch, steps_per_print=1)[0])
    assert plain[0]["loss"] is None, "it was given to nobody"
    scaled = {"enabled": True, "loss_scale": 64}
    assert steps_of(train(1, steps_per_print=1, fp16=scaled)[0])[0]["scale"] == "64"
    shares = steps_of(train(1, steps_per_print=1, wall_clock_breakdown=True)[0])[0]["shares"]
    assert sum(map(int, re.findall(r"(\d+)%", shares))) in range(97, 104)
    assert [line for line in train(2, steps_per_print=math.inf)[0] if "step" in line] == []


def test_learning_rates_that_differ_and_losses_that_are_not_finite():
    net = make_net()
    groups = [{"params": net.head.parameters(), "lr": 0.1}, {"params": net.blocks.parameters(), "lr": 1e-3}]
    settings = config(0, 1, steps_per_print=1)
    engine, *_ = zero.initialize(model=net, model_parameters=groups, config=settings)

    def run() -> None:
        engine.backward(engine(*batch(0, 2)) * math.nan)
        engine.step()

    (row,) = steps_of(said(run))
    assert (row["lr"], row["loss"], row["skipped"], row["bad"]) == ("0.001 to 0.1", "nan", "1", "1")


def test_an_engine_that_is_dropped_says_its_last_line_too():
    def run() -> None:
        engine, *_ = zero.initialize(model=make_net(), config=config(0, 1, steps_per_print=1000))
        engine.backward(engine(*batch(0, 2)))
        engine.step()
        assert engine._recorder._printer._end.atexit, "and so one that is there when the program ends"
        del engine
        gc.collect()

    gc.collect()  # engines of other tests
    assert said(run)[-1].startswith("1 step, 2 samples in ")


def test_a_progress_bar_is_not_torn(monkeypatch):
    screen = io.StringIO()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    with tqdm(total=2, file=screen) as bar:
        bar.refresh()
        logger.warning("hello")
    lines = screen.getvalue().split("\n")
    assert lines[0].endswith("\r[zero] warning: hello"), "the bar was not cleared before it"
    assert "0/2" in lines[1], "nor drawn again behind it"


@pytest.mark.parametrize(
    ("asked", "wanted"),
    [
        ("", ["[zero] told", "[zero] warning: wrong"]),
        ("warning", ["[zero] warning: wrong"]),
        ("ERROR", []),
        (
            "loud",
            [
                "[zero] warning: ZERO_LOG: got 'loud', wanted one of debug, info, warning, error, critical",
                *("[zero] told", "[zero] warning: wrong"),
            ],
        ),
    ],
)
def test_the_environment_says_what_is_logged(asked, wanted):
    text = "from zero.log import logger, set_level; set_level('info'); logger.info('told'); logger.warning('wrong')"
    given = environment(ZERO_LOG=asked, RANK="0")
    ended = subprocess.run([sys.executable, "-c", text], env=given, capture_output=True, text=True, check=True)
    assert ended.stderr.splitlines() == wanted


@pytest.mark.ranks(2)
def test_the_breakdown_tells_what_the_loop_stood_still_for() -> None:
    lines, _ = train(4, steps_per_print=2, wall_clock_breakdown=True)
    waits = r"other \d+% \(waiting for (gathers|reductions|others) \d+%(, \w+ \d+%)*\)"
    found = [line for line in lines if re.search(waits, line)]
    assert len(found) == (3 if dist.get_rank() == 0 else 0)  # at steps 2 and 4, and at the end
