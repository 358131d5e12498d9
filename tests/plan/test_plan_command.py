"""The promise: `zero plan` names the fastest configuration that fits and writes one that runs, says whether more ranks
pay, and answers what people ask."""

from __future__ import annotations

import json
import re
import sys
import textwrap
from dataclasses import replace
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
from zero.sizes import command, search, table
from zero.sizes.choice import CHOICES, Choice
from zero.sizes.cost import POLICIES, shape_cost
from zero.sizes.rates import DEVICES
from zero.sizes.search import Search, Setup, candidates
from zero.sizes.shape import Shape, shape_of

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


def test_speed_is_shown_in_a_unit_in_which_it_is_not_nothing(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ", 140.4 TFLOP/s reached" in printed(capsys, "--world", "2,4")
    slow = replace(DEVICES["a100"], flops={"bf16": 35e9})
    monkeypatch.setattr(command, "DEVICES", {"a100": slow})
    assert ", 35.0 GFLOP/s reached" in printed(capsys, "--world", "2,4")


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


def test_the_longest_names_stay_within_the_width(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    path = tmp_path / "zero.json"
    places = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "nvme", "nvme_path": "/x"}}
    batches = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 128}
    section = {"zero_optimization": {"stage": 3, **places}, "zero": {"shard_size": 1024}}
    path.write_text(json.dumps({**batches, **section, "bf16": {"enabled": True}}))
    for words in ("--all",):
        printed(capsys, "--world", "2048", "--config", str(path), words)
    assert max(map(len, str(zero.estimate(1e12, path, 2048)).splitlines())) <= 100


ROWS = [(Choice(2),), *longer((Choice(3, "cpu", "cpu"),), (Choice(1, "cpu"),), (Choice(3, shard_size=1),))]


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
def test_a_row_makes_a_configuration_that_runs(pool, choice: Choice, policy: str) -> None:
    values = config(1, 2, accumulation=2)
    shape = Shape(3, 12, 25, 17)
    made = Setup(shape, shape_cost(shape, 5), load(values, 2), DEVICES["h100"], 2)
    settings = apply(values, Search(made, choice).row(policy, 2).overrides())
    wanted = choice.stage, [] if policy == "none" else ["full" if policy == "host" else policy] * 3
    assert pool.run(2, trains, settings) == [wanted] * 2


def test_what_is_written_is_the_fastest(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    given, path = tmp_path / "given.json", tmp_path / "made.json"
    given.write_text(json.dumps({"train_batch_size": 64, "zero": {"timeout": 99}, "fp16": {"enabled": True}}))
    text = printed(capsys, "--world", "4", "--config", str(given), "--json", str(path))
    found = load(path, 4)
    assert found.train_batch_size == 64 and found.zero.timeout == 99 and found.fp16.enabled
    assert f"wrote {path}: stage {found.zero_optimization.stage}," in text
    assert f"micro-batch {found.train_micro_batch_size_per_gpu}" in text.splitlines()[-1]
    there = printed(capsys, "--world", "4", "--config", str(given), "--json")
    assert json.loads(there[there.index("\n{") :]) == json.loads(path.read_text())


MODULE = """
    import torch
    from models import Net

    def make():
        tokens = torch.zeros(2, 5, dtype=torch.long)
        return Net(blocks=4), (tokens, tokens)
"""


def test_a_model_of_ones_own_is_planned(
    capsys: pytest.CaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_model.py").write_text(textwrap.dedent(MODULE))
    path, numel = tmp_path / "zero.json", sum(param.numel() for param in make_net(blocks=4).parameters())
    path.write_text(json.dumps(config(3, 2)))
    words = ["plan", "own_model:make", "--world", "2", "--config", str(path)]
    assert main([*words, "--device", "a100"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"{numel:,} parameters of Net, in fp32; samples of 5 tokens")
    assert re.search(r"^3, recompute full +2 ", text, re.MULTILINE)
    assert main(words) == 0
    assert capsys.readouterr().out == f"{zero.estimate(make_net(blocks=4), path, 2)}\n"
    assert main([*words, "--trace"]) == 0
    assert {"addmm", "mm"} <= {line.split()[0] for line in capsys.readouterr().out.splitlines()}
    assert main([*words, "--shardable"]) == 0
    assert "blocks.*.up x 4 (Linear): column" in capsys.readouterr().out


def test_an_engine_takes_the_very_file(pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "planned_model.py").write_text(textwrap.dedent(MODULE))
    given, made = tmp_path / "given.json", tmp_path / "made.json"
    given.write_text(json.dumps(config(1, 2)))
    words = ["planned_model:make", "--world", "2", "--config", str(given), "--device", "a100", "--json", str(made)]
    assert main(["plan", *words]) == 0
    written = load(made, 2)
    policy = written.zero.recompute.policy
    ran = pool.run(2, trains, str(made))
    assert ran == [(written.zero_optimization.stage, [policy] * len(ran[0][1]))] * 2


# Numbers of ranks.


def test_the_smallest_number_of_ranks_fits_and_one_less_does_not(capsys: pytest.CaptureFixture) -> None:
    assert main(["plan", "--params", "30e9", "--device", "a100", "--sequence", "2048"]) == 0
    lines = capsys.readouterr().out.splitlines()
    line = next(line for line in lines if line.startswith("stage 3  "))
    count = int(line.split()[2])
    assert f"{count} ({1 << (count - 1).bit_length()})" in line
    shape = shape_of(30e9)
    for ranks, fits in ((count, True), (count - 1, False)):
        settings = load({"bf16": {"enabled": True}, "optimizer": {"type": "AdamW"}}, ranks, filled=False)
        made = Setup(shape, shape_cost(shape, 2048), settings, DEVICES["a100"])
        assert (Search(made, Choice(3)).row("none", 1).lacks == ()) is fits
    assert any(line.startswith("stage 0") and "never" in line for line in lines)


def test_units_are_laid_out_anew_for_other_ranks_and_not_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    shape, settings = shape_of(1e9), [load({"bf16": {"enabled": True}}, ranks, filled=False) for ranks in (2, 6)]
    two, six = (Setup(shape, shape_cost(shape, 2048), each, DEVICES["a100"]) for each in settings)
    assert six.units != two.units
    monkeypatch.setattr(search, "units_of", None)
    assert two.on(6).units == six.units


def test_worlds_are_compared(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    path = tmp_path / "zero.json"
    path.write_text(json.dumps({"train_batch_size": 512, "bf16": {"enabled": True}}))
    text = printed(capsys, "--world", "8,64,512", "--ranks-per-host", "4", "--config", str(path))
    rows = [line.split() for line in text.splitlines() if line.split()[0] in ("8", "64", "512")]
    assert all(f"\n  {ranks}: stage " in text for ranks in (8, 64, 512)), "the best of each"
    waits = [float(row[5].rstrip("%")) for row in rows]
    assert len(rows) == 3 and waits == sorted(waits) and waits[-1] > 50, "a small model on many ranks communicates"
    assert text.splitlines()[-1].startswith(f"more ranks pay up to 8: on 64, {rows[1][5]} of a step")


def test_the_verdict_follows_from_the_speeds() -> None:
    def said(*speeds: tuple[int, float, float]) -> str:
        return table.verdict([(ranks, speed, table.Waits(share, 1.0)) for ranks, speed, share in speeds])

    assert said((8, 100, 0.1), (16, 190, 0.2), (32, 200, 0.7)) == (
        "more ranks pay up to 16: on 32, 70% of a step would be communication, and 2 x the ranks would give 1.05 x the "
        "speed"
    )
    assert said((8, 100, 0.1), (32, 380, 0.1)).startswith("more ranks pay up to 32 and perhaps beyond: 3.8 x the speed")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--device", "abacus", "--world", "2"], "--device: got 'abacus', wanted one of measured, b200"),
        (["--groups"], "one of them at a time"),
        (["train:make"], "one of them at a time"),
        (["--trace"], "give a model, as module:function"),
        (["--params", "1e30"], "number of parameters: got 1e+30, wanted at least 1000 and at most 1e+15, such as 7e9"),
        (["--params", "nan"], "--params: got 'nan', wanted a number above 0"),
        (["--layers", "99999999"], "layers: got 99,999,999, wanted at most 1,024"),
        (
            ["--width", "1"],
            "layers: got 1,666,667, wanted at most 1,024, as 2e+07 parameters of width 1 make; give the",
        ),
        (["--world", "0"], "--world: got '0', wanted an integer of at least 1 and at most 1,048,576"),
        (["--world", "2,x"], "--world: got 'x', wanted an integer"),
        (["--world", "2", "--nodes", "0"], "--nodes: got '0', wanted an integer of at least 1"),
        (["--world", "3", "--nodes", "2"], "--nodes: got 2, wanted a divisor of the 3 ranks of --world"),
        (["--world", "3", "--nodes", "2", "--device", "cuda"], "--nodes: got 2, wanted a divisor of the 3 ranks"),
        (["--world", "2,4", "--nodes", "2"], "--nodes: wants one number of ranks, in --world"),
        (["--sequence", "0"], "--sequence: got '0', wanted an integer of at least 1"),
        (["--json"], "--json: wants one number of ranks, in --world"),
        (["--world", "2", "--json", "/dev/null/a.json"], "--json: cannot write '/dev/null/a.json': Not a directory"),
        (["a" * 500], "one of them at a time"),
    ],
)
def test_what_cannot_be_planned_is_said(capsys: pytest.CaptureFixture, words: list[str], text: str) -> None:
    try:
        status = main([*SMALL, *words])
    except SystemExit as error:  # of argparse
        status = error.code
    said = capsys.readouterr()
    assert (status, said.out) == (2, "") and text in said.err


def test_the_deepest_model_is_planned_and_the_work_grows_with_its_layers_only() -> None:
    shape, small = shape_of(1e15), Shape(3, 12, 25, 17)
    assert shape.layers == 1024 and shape.numel == pytest.approx(1e15, rel=1e-3)
    assert small.numel == sum(spec.numel for spec in small.specs("fp32"))

    def calls(layers: int) -> int:
        found = 0

        def count(*_: Any) -> None:
            nonlocal found
            found += 1

        sys.setprofile(count)
        try:
            zero.estimate(1e9, ranks=8, layers=layers)
        finally:
            sys.setprofile(None)
        return found

    calls(1)  # imports
    assert calls(80) < 5 * calls(20)


def test_a_large_plan_is_little_work_and_needs_no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """1e12 parameters on 4,096 ranks: state is worked out once for a choice, and a row is one simulation."""
    calls = {"predict": 0, "state_row": 0}
    for name in calls:
        real = getattr(search, name)

        def counted(*args: Any, name: str = name, real: Any = real, **kwargs: Any) -> Any:
            calls[name] += 1
            return real(*args, **kwargs)

        monkeypatch.setattr(search, name, counted)
    shape = shape_of(1e12)
    settings = load({"bf16": {"enabled": True}, "optimizer": {"type": "AdamW"}}, 4096, filled=False)
    rows = candidates(Setup(shape, shape_cost(shape, 4096), settings, DEVICES["h200"]))
    assert calls == {"predict": len(rows), "state_row": len(CHOICES) + 4} and len(rows) > 60
    code = """
        import json
        from zero.__main__ import main
        main(["plan", "--params", "1e12", "--world", "4096", "--device", "h200"])
        print(json.dumps(0))
    """
    assert fresh(code, ("torch", "numpy", "zero._cpu", "zero._cuda")) == 0
