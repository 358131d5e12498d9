"""The promise: `zero plan` names the fastest configuration that fits, writes one that runs, and says whether more ranks
pay."""

from __future__ import annotations

import argparse
import json
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
from marks import longer
from models import config, make_net, share
from test_import import fresh

import zero
from zero.__main__ import main
from zero.config import load
from zero.config.override import apply
from zero.launch.args.tools import add_plan
from zero.sizes.choice import CHOICES, StageChoice
from zero.sizes.cost import POLICIES, shape_cost
from zero.sizes.estimate import DEFAULT
from zero.sizes.rates import DEVICES
from zero.sizes.shape import Shape
from zero.tools.plan.plan_command import PlannedModel, _check
from zero.tools.plan.search import Search, Setup

SMALL = ["plan", "--params", "2e7", "--sequence", "64", "--device", "a100"]


def printed(capsys: pytest.CaptureFixture, *words: str) -> str:
    """What is printed, lines that were cut in one."""
    assert main([*SMALL, *words]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 100
    return re.sub(r"\n {4}(?=\S)", " ", text)


def test_the_table_names_what_is_best(capsys: pytest.CaptureFixture) -> None:
    text = printed(capsys, "--world", "16", "--nodes", "2")
    rows = [line for line in text.splitlines() if re.match(r"[0-3](,.*)?  ", line)]
    assert len(rows) == (len(CHOICES) + 4) * len(POLICIES), "the best of each choice, HSDP and hpZ, and each policy"
    assert re.search(r"^stage +micro-batch  s/step +tokens/s +peak", text, re.MULTILINE)
    first, size, *_ = re.split("  +", rows[0])
    assert f"fastest that fits: stage {first}, micro-batch {size}; " in text
    assert "largest micro-batch: " in text and "longest sequence: " in text and "twice the ranks pays" in text
    whole = printed(capsys, "--world", "16", "--nodes", "2", "--all")
    assert len([line for line in whole.splitlines() if re.match(r"[0-3](,.*)?  ", line)]) > 4 * len(rows)
    heads = {name for line in whole.splitlines() if line.startswith("stage  ") for name in re.split("  +", line)}
    assert {"peak", "host", "drive", "parameters", "activations", "in host", "host link", "drive link"} < heads


def test_the_fastest_rows_come_first(capsys: pytest.CaptureFixture) -> None:
    """Those within a hundredth of the fastest are alike: the plainest of them are first."""
    assert main(["plan", "--params", "7e9", "--device", "h100", "--world", "16"]) == 0
    cells = [re.split("  +", line) for line in capsys.readouterr().out.splitlines() if re.match(r"[0-3](,.*)?  ", line)]
    paces = [float(row[3].replace(",", "")) for row in cells if row[2] != "-"]
    slower = [pace for pace in paces if pace < 0.99 * max(paces)]
    assert len(slower) > 20 and slower == sorted(slower, reverse=True) and paces[-len(slower) :] == slower


def test_ranks_that_share_sequences_hold_what_attention_exchanges(tmp_path: Path) -> None:
    parser, ring = argparse.ArgumentParser(), tmp_path / "ring.json"
    add_plan(parser)
    ring.write_text(json.dumps(DEFAULT | {"zero": {"context": {"mode": "ring"}}}))
    held = []
    for words in ((), ("--cp", "4"), ("--sp", "4", "--config", str(ring))):
        given = parser.parse_args([*SMALL[1:], "--world", "8", *words])
        _check(given)
        setup = PlannedModel(given).setup()
        assert (setup.ranks, setup.settings.world_size) == (8, 2 if words else 8)
        assert any("attention's messages" in note for note in setup.cost.notes) == bool(words)
        held.append([(unit.working, unit.saved["full"]) for unit in setup.cost.units])
    for (working, stream), ulysses, ring in zip(*held, strict=True):
        assert (ulysses, ring) == ((working + 4 * stream, stream), (working + 2 * stream, stream))
    assert any(stream for _, stream in held[0])


def test_what_does_not_fit_says_why(capsys: pytest.CaptureFixture) -> None:
    large = ["plan", "--params", "1e12", "--device", "a100"]
    assert main([*large, "--world", "8", "--json"]) == 2
    said = capsys.readouterr()
    verdict = "nothing fits; the least has stage 3, optimizer and parameters on host, recompute host, micro-batch"
    assert said.out.startswith(verdict) and "host: 2,031.0 GB of 256.0" in said.out.splitlines()[1]
    assert re.search(r"^0 +1 +- +device  16,638\b", said.out, re.MULTILINE)
    assert max(map(len, said.out.splitlines())) <= 100
    assert "--json: nothing fits, so there is no configuration to write" in said.err
    assert main([*large, "--world", "4,8"]) == 0
    said = capsys.readouterr()
    assert said.out.startswith(verdict) and said.out.count(": nothing fits; ") == 2


ROWS = [
    (StageChoice(2),),
    *longer((StageChoice(3, "cpu", "cpu"),), (StageChoice(1, "cpu"),), (StageChoice(3, shard_size=1),)),
]


def trains(settings: dict[str, Any] | str) -> tuple[int, list[str]]:
    engine, *_ = zero.initialize(model=make_net(), config=settings)
    for step in range(engine.gradient_accumulation_steps()):
        engine.backward(engine(*share(step)))
        engine.step()
    policies = [each.forward.policy.value for each in engine.module.modules() if hasattr(each.forward, "policy")]
    stage = engine.zero_optimization_stage()
    engine.destroy()
    return stage, policies


@pytest.mark.parametrize(("choice",), ROWS)
@pytest.mark.parametrize("policy", ["selective", *longer("none", "full", "host")])
def test_a_row_makes_a_configuration_that_runs(pool, choice: StageChoice, policy: str) -> None:
    values = config(1, 2, accumulation=2)
    shape = Shape(3, 12, 25, 17)
    made = Setup(shape, shape_cost(shape, 5), load(values, 2), DEVICES["h100"], 2)
    settings = apply(values, Search(made, choice).row(policy, 2).sets)
    wanted = choice.stage, [] if policy == "none" else ["full" if policy == "host" else policy] * 3
    assert pool.run(2, trains, settings) == [wanted] * 2


MODULE = """
    import torch
    from models import Net

    def make():
        tokens = torch.zeros(2, 5, dtype=torch.long)
        return Net(blocks=4), (tokens, tokens)
"""


def test_a_model_of_ones_own_is_planned_and_an_engine_takes_the_very_file(
    pool, capsys: pytest.CaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "planned_model.py").write_text(textwrap.dedent(MODULE))
    given, made = tmp_path / "given.json", tmp_path / "made.json"
    given.write_text(json.dumps(config(1, 2, zero={"timeout": 99})))
    words = ["plan", "planned_model:make", "--world", "2", "--config", str(given)]
    assert main([*words, "--device", "a100", "--json", str(made)]) == 0
    written, text = load(made, 2), re.sub(r"\n {4}(?=\S)", " ", capsys.readouterr().out)  # lines that were cut
    stage, policy = written.zero_optimization.stage, written.zero.recompute.policy
    numel = sum(param.numel() for param in make_net(blocks=4).parameters())
    assert text.startswith(f"{numel:,} parameters of Net, in fp32; samples of 5 tokens")
    assert f"wrote {made}: stage {stage}," in text and written.zero.timeout == 99
    assert f"micro-batch {written.train_micro_batch_size_per_gpu}" in text.splitlines()[-1]
    ran = pool.run(2, trains, str(made))
    assert ran == [(stage, [policy] * len(ran[0][1]))] * 2


# Numbers of ranks.


def test_worlds_are_compared(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    path = tmp_path / "zero.json"
    path.write_text(json.dumps({"train_batch_size": 512, "bf16": {"enabled": True}}))
    text = printed(capsys, "--world", "8,64,512", "--ranks-per-host", "4", "--config", str(path))
    rows = [line.split() for line in text.splitlines() if line.split()[0] in ("8", "64", "512")]
    assert all(f"\n  {ranks}: stage " in text for ranks in (8, 64, 512)), "the best of each"
    waits = [float(row[5].rstrip("%")) for row in rows]
    assert len(rows) == 3 and waits == sorted(waits) and waits[-1] > 50, "a small model on many ranks communicates"
    *_, last = text.splitlines()
    assert last.startswith(f"more ranks pay up to 8: on 64, ranks would wait for messages for {rows[1][5]} of a step")
    one = printed(capsys, "--world", "64", "--ranks-per-host", "4", "--config", str(path))
    travel, wait = rows[1][4:6]
    assert f"messages travel for {travel} of a step, and ranks wait for them for {wait} of it" in one, "the same words"


def test_without_a_number_of_ranks_powers_of_two_are_compared(capsys: pytest.CaptureFixture) -> None:
    text = printed(capsys)
    found = [line.split()[0] for line in text.splitlines() if line.split()[0].replace(",", "").isdigit()]
    assert found == [f"{1 << bit:,}" for bit in range(11)]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--device", "abacus", "--world", "2"], "--device: got 'abacus', wanted one of measured, b200"),
        (["--groups"], "one of them at a time"),
        (["train:make"], "one of them at a time"),
        (["--params", "1e30"], "number of parameters: got 1e+30, wanted at least 1000 and at most 1e+15, such as 7e9"),
        (
            ["--width", "1"],
            "layers: got 1,666,667, wanted at most 1,024, as 2e+07 parameters of width 1 make; give the",
        ),
        (["--device", "measured"], "--world: --device measured wants the number of ranks"),
        (["--world", "6", "--cp", "4"], "sequence_parallel_size: got 4, wanted a divisor of world size 6"),
        (["--world", "3", "--nodes", "2"], "--nodes: got 2, wanted a divisor of the 3 ranks of --world"),
        (["--world", "2,4", "--nodes", "2"], "--nodes: wants one number of ranks, in --world"),
        (["--json"], "--json: wants one number of ranks, in --world"),
        (["--world", "2", "--json", "/dev/null/a.json"], "--json: cannot write '/dev/null/a.json': Not a directory"),
    ],
)
def test_what_cannot_be_planned_is_said(capsys: pytest.CaptureFixture, words: list[str], text: str) -> None:
    try:
        status = main([*SMALL, *words])
    except SystemExit as error:  # of argparse
        status = error.code
    said = capsys.readouterr()
    assert (status, said.out) == (2, "") and text in said.err


def test_a_large_plan_needs_no_torch() -> None:
    code = """
        import json
        from zero.__main__ import main
        main(["plan", "--params", "1e12", "--world", "4096", "--device", "h200"])
        print(json.dumps(0))
    """
    assert fresh(code, ("torch", "numpy", "zero._cpu", "zero._cuda")) == 0
