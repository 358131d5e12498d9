"""The promise: a check of the user's own model finds what is wrong, names it, and says so when nothing is.

`engine.check` runs on real ranks and leaves the engine as it was; `zero check` runs a script in processes of its own.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launching import Launchers
from marks import longer
from models import WIDTH, Block, config, make_net, share
from planted import ERRORS, MODELS, Dropping, alarms, planted
from torch import nn

import zero
from zero.config import load
from zero.core.unit import Unit
from zero.engine.check.assigned import AssignedRun, make_plain
from zero.engine.check.compare import Yardstick, judge
from zero.engine.check.plain import PlainEngine, Step
from zero.engine.check.recording import Outcome, Recorder
from zero.engine.check.runs import Kind, Run
from zero.engine.check.script import _clips
from zero.launch.args.check import OPTIONS, add_arguments, request

ROOT = Path(__file__).parents[2]
CLIPS = "torch.nn.utils.clip_grad_norm_(p, 1)"
BF16 = {"bf16": {"enabled": True}}
FORMS = {
    "AdamW, clipped": {"gradient_clipping": 0.5},
    "bf16": BF16,
    "autocast, sent in bf16": {"torch_autocast": {"enabled": True}, "communication_data_type": "bf16"},
    "Lion": {"optimizer": {"type": "Lion", "params": {"lr": 1e-3, "weight_decay": 0.1}}},
    "LAMB": {"optimizer": {"type": "Lamb", "params": {"lr": 1e-2, "weight_decay": 0.1}}},
    "Muon": {"optimizer": {"type": "Muon", "params": {"lr": 1e-2, "weight_decay": 0.1}}},
    "8bit moments": {**BF16, "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "zero": {"moments": "8bit"}}}},
}


def checked(
    model: nn.Module, data: Any, stage: int, more: dict[str, Any], **kwargs: Any
) -> tuple[bool, list[str], str]:
    engine, *_ = zero.initialize(model=model, config=config(stage, dist.get_world_size(), **more))
    report = engine.check(data, **kwargs)
    engine.destroy()
    return report.ok, [row.verdict for row in report.rows], str(report)


def all_forms(stage: int) -> dict[str, Any]:
    data = [share(0), share(1)]
    few = {"stages": (0, 3), "accumulations": (1,), "steps": 2}
    found = {name: checked(make_net(), data, stage, more, **few) for name, more in FORMS.items()}
    torch.manual_seed(3)
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))
    found["awkward"] = checked(Dropping(), {"x": x}, stage, {})
    found["client's optimizer"] = clients(stage, data, few)
    found["client's Muon"] = clients(stage, data, few, muon=True)
    return found


def clients(stage: int, data: Any, few: dict[str, Any], muon: bool = False) -> tuple[bool, list[str], str]:
    """Groups with their own lr, one of them frozen in part, under an optimizer that the script made."""
    net = make_net()
    net.norm.bias.requires_grad_(False)
    groups = [{"params": list(net.blocks.parameters()), "lr": 1e-3}, {"params": list(net.norm.parameters())}]
    client = torch.optim.RMSprop(groups, lr=1e-2)
    if muon:
        client = torch.optim.Muon([param for param in net.parameters() if param.ndim == 2], lr=1e-2)
    settings = {key: value for key, value in config(stage, 2).items() if key != "optimizer"}
    engine, *_ = zero.initialize(model=net, optimizer=client, config=settings)
    report = engine.check(data, **few)
    assert not muon or [len(group["params"]) for group in engine.optimizer.param_groups if group["use_muon"]] == [8]
    engine.destroy()
    return report.ok, [row.verdict for row in report.rows], str(report)


@pytest.mark.ranks(1)
def test_a_fused_optimizer_of_a_script_is_well():
    net = make_net()
    settings = {key: value for key, value in config(1, 1).items() if key != "optimizer"}
    optimizer = zero.FusedOptimizer(net.parameters(), "AdamW", lr=1e-2, betas=(0.8, 0.9))
    engine, *_ = zero.initialize(model=net, optimizer=optimizer, config=settings)
    report = engine.check(share(0), steps=2, stages=(2,), accumulations=(1,))
    engine.destroy()
    assert report.ok, report


@pytest.mark.long
def test_a_right_model_is_well(pool):
    for forms in pool.run(2, all_forms, 3):
        for name, (ok, verdicts, text) in forms.items():
            assert ok, f"{name}\n{text}"
            assert len(verdicts) == (8 if name == "awkward" else 2)
            assert set(verdicts) <= {"same bits", "within rounding"}
            assert "agree among themselves in every bit (accumulation 1)" in text


def trained(stage: int, with_check: bool, more: dict[str, Any]) -> list[Any]:
    engine, *_ = zero.initialize(model=make_net(), config=config(stage, 2, accumulation=2, **more))
    seen: list[Any] = []
    for number in range(6):
        loss = engine(*share(number))
        engine.backward(loss)
        if with_check and number == 2:  # in the middle of a window
            assert engine.check(share(0), steps=1, stages=(1, 3), accumulations=(1,)).ok
        engine.step()
        seen += [loss.item(), torch.rand(1).item(), random.random() if number == 2 else None]
    engine.destroy()
    return [seen[:8], *(param.detach() for param in engine.module.parameters())]


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("stage", "more"), [(2, BF16), (3, {}), *longer((0, {}))])
def test_training_goes_on_as_if_there_had_been_no_check(stage, more):
    runs = []
    for with_check in (True, False):
        torch.manual_seed(dist.get_rank())
        random.seed(1)
        runs.append(trained(stage, with_check, more))
    (numbers, *params), (wanted_numbers, *wanted) = runs
    assert numbers == wanted_numbers
    assert all(torch.equal(a, b) for a, b in zip(params, wanted, strict=True))


@pytest.mark.ranks(2)
def test_a_wrong_reduction_on_one_rank_is_found():
    """One unit's gradient of rank 1 is a little too large whenever the core reduces it."""
    reduce = Unit.reduce

    def wrong(unit: Unit, leaf: Any) -> None:
        if dist.get_rank() == 1 and unit.plan.name == "blocks.1":
            unit.gradients.flat.mul_(1.001)
        reduce(unit, leaf)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Unit, "reduce", wrong)
        sgd = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
        ok, verdicts, text = checked(make_net(), share(0), 1, sgd, steps=1, stages=(1, 3), accumulations=(1,))
    assert not ok
    assert verdicts == 2 * ["DIFFERS: first in the gradient of 'blocks.1.norm.weight' at step 1"]
    assert text.endswith("NOT all is well.")


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_every_planted_error_is_found_and_no_right_model_is_blamed(pool, seed):
    """Three seeds of tests/sweep_trust.py, the first one with every third model."""
    models = list(MODELS) if seed else list(MODELS)[::3]
    assert pool.run(1 if seed == 2 else 2, alarms, seed, models)[0] == dict.fromkeys(models)
    found = pool.run(2, planted, list(MODELS)[5 * seed], seed)[0]
    assert len({error.name for error in ERRORS}) == 18
    assert len(found) == len(ERRORS)
    assert all(found.values()), found


def test_an_update_may_carry_rounding_where_it_does():
    """Lion takes the sign of a sum: where its terms cancel, rounding decides about twice the learning rate."""
    lion = {"optimizer": {"type": "Lion", "params": {"lr": 1e-3}}}
    settings = load(config(0, 1, **lion), 1)
    model = nn.Linear(2, 1, bias=False)
    weight = model.weight.detach().clone()
    grads = [torch.tensor([[1.0, 1.0]]), torch.tensor([[-0.09, 1.0]])]  # 0.9 x 0.01 x 1 - 0.1 x 0.09 = 0
    engine = make_plain(model, None, None, settings, Kind.BESIDE)
    engine.follow([Step({"weight": grad}, {"weight": weight}, {}) for grad in grads])
    slacks = []
    for _ in grads:
        engine.backward(engine(torch.ones(1, 2)).sum())
        engine.step()
        slacks.append(engine.last.slack["weight"])
        assert torch.equal(model.weight, weight)
    assert float(slacks[0].max()) == 0
    assert float(slacks[1][0, 0]) > 1.9e-3
    assert float(slacks[1][0, 1]) == 0


CALLS: list[int] = []


class Remembering(nn.Module):
    """Its forward depends on how often it was called, which no copy of the module knows."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        CALLS.append(1)
        return (self.block(x) * (1 + 0.01 * len(CALLS) * dist.get_rank())).square().mean()


@pytest.mark.ranks(2)
def test_state_outside_of_the_module_is_found():
    torch.manual_seed(2)
    CALLS.clear()
    few = {"steps": 2, "stages": (2,), "accumulations": (1,)}
    ok, verdicts, _ = checked(Remembering(), torch.randn(2, WIDTH), 2, {}, **few)
    assert not ok
    why = "plain torch does not repeat itself: the loss depends on more than weights, batch and seed"
    assert verdicts == [f"DIFFERS: {why}"]


class Logits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def test_the_loss_is_asked_for():
    engine, *_ = zero.initialize(model=Logits(), config=config(0, 1))
    x = torch.randn(2, WIDTH)
    with pytest.raises(ValueError, match=r"the model returned Tensor, in which no loss was found .* pass loss_fn="):
        engine.check(x)
    assert engine.check(x, steps=1, loss_fn=lambda model, given: model(given).square().mean())


def test_an_optimizer_of_the_script_beside_auto_in_the_file():
    net = make_net()
    given = {"optimizer": torch.optim.SGD(net.parameters(), lr=0.1), "config": config(1, 1) | {"optimizer": "auto"}}
    engine, *_ = zero.initialize(model=net, **given)
    assert engine.check(share(0), steps=1, stages=(1,), accumulations=(1,))
    engine.destroy()


def test_wrong_arguments_are_named():
    engine, *_ = zero.initialize(model=Logits(), config=config(0, 1))
    for wrong in ({"steps": 0}, {"stages": (4,)}, {"accumulations": (0,)}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            engine.check(torch.ones(1, WIDTH), **wrong)
    with pytest.raises(ValueError, match="empty list"):
        engine.check([])


def begin_of(engine: Any) -> dict[str, int]:
    recorder = Recorder(engine)
    recorder.record_begin()
    return recorder.begin


def test_runs_that_begin_with_other_weights_are_not_compared():
    """An unseeded script: its runs are as far apart as can be, and what lies between is not rounding."""
    begins = {}
    for seed in (1, 2):
        settings = load(config(3, 1, **BF16), 1)
        plain = PlainEngine(make_net(seed), settings, Kind.PLAIN, torch.device("cpu"))
        engine, *_ = zero.initialize(model=make_net(seed), config=config(3, 1, **BF16))
        begins[seed] = begin_of(engine)
        assert begins[seed] == begin_of(plain)
        engine.destroy()
    step = Step({"w": torch.ones(1)}, {"w": torch.ones(1)}, {})
    one, other = (Outcome([[1.0]], [1.0], [step], None, "fp32", begins[seed]) for seed in (1, 2))
    run, measure = Run(Kind.ENGINE, 1, 1, 3), Yardstick(0.0, {"w": 0.0}, 0.0)
    assert judge(run, one, one, measure).good
    row = judge(run, other, one, measure)
    assert not row.good
    assert row.verdict == (
        "DIFFERS: parameter 'embed.weight' before the first step; does the script seed its random numbers?"
    )


@pytest.mark.ranks(2)
def test_a_model_that_is_built_cut_is_whole_in_a_plain_run():
    def plain() -> AssignedRun:
        return AssignedRun(Run(Kind.PLAIN, 1, 1), Path("/nowhere"))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("zero.engine.init.assigned_run", plain)
        with zero.Init():
            built = make_net()
    assert all(torch.equal(*pair) for pair in zip(built.parameters(), make_net().parameters(), strict=True))


def test_step_of_the_optimizer_of_a_plain_run_is_a_whole_step():
    settings = load(config(0, 1, accumulation=2), 1)
    engine = make_plain(make_net(), None, None, settings, Kind.PLAIN)
    schedule = torch.optim.lr_scheduler.ConstantLR(engine.optimizer)
    before = [param.detach().clone() for param in engine.module.parameters()]
    for number in range(2):
        assert engine.global_steps == 0
        engine.backward(engine(*share(number)), tokens=10)
        engine.optimizer.step()
    assert (engine.global_steps, engine.micro_steps) == (1, 2)
    assert not any(torch.equal(*pair) for pair in zip(before, engine.module.parameters(), strict=True))
    schedule.step()


# --- the command --------------------------------------------------------------------------------------------

SCRIPT = """
    import gc, sys
    gc.disable()  # nothing is garbage here, and to look for some takes a third of the imports
    import torch
    import zero
    from models import batch, config, make_net
    zero.initialize
    gc.freeze()

    print("hello from the script")
    engine, *_ = zero.initialize(model=make_net(), config=config(0, 1, dataloader_drop_last="auto"))
    for step in range(int(sys.argv[1])):
        loss = engine(*batch(step, 2))
        if engine.zero_optimization_stage() == 3:
            loss = loss + 1e-3 * engine.module.norm.weight.sum()
        if engine.zero_optimization_stage() == 2:
            raise ArithmeticError("stage 2 is not for me")
        engine.backward(loss)
        engine.step()
    print("never reached under a check")
"""


Command = Callable[..., subprocess.CompletedProcess]


@pytest.fixture
def command(launchers: Launchers, tmp_path: Path) -> Command:
    """`zero check` on a script; the words are its own and, before "script", the command's."""
    search = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    kept = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    environment = {**kept, "PYTHONPATH": search, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}

    def run(text: str, *args: str) -> subprocess.CompletedProcess:
        path = tmp_path / "script.py"
        path.write_text(textwrap.dedent(text))
        words = (str(path) if arg == "script" else arg for arg in args)
        return launchers.run("check", *words, environment=environment, seconds=400)

    return run


@pytest.mark.long
def test_a_script_that_depends_on_the_stage(command):
    options = ("--nproc", "1", "--steps", "2", "--accumulation", "1", "--stages", "2,3")
    ended = command(SCRIPT, *options, "script", "50")
    assert ended.returncode == 1, ended.stderr
    table = {line[:7]: line for line in ended.stdout.splitlines() if line.startswith("stage")}
    assert table["stage 2"].endswith("FAILED: exit status 1")
    assert table["stage 3"].endswith("DIFFERS: first in the gradient of 'norm.weight' at step 1")
    assert "NOT all is well." in ended.stdout
    # The output of the script is shown for the run that failed only.
    assert ended.stderr.count("hello from the script") == 1
    assert "zero check: stage 2, accumulation 1: exit status 1; the end of its output:" in ended.stderr
    assert "ArithmeticError: stage 2 is not for me" in ended.stderr
    assert "never reached" not in ended.stdout + ended.stderr


TWO_ENGINES = """
    import torch
    import zero
    from models import Block, config

    torch.manual_seed(1)
    engines = [zero.initialize(model=Block(), config=config(0, 1))[0] for _ in range(2)]
    for step in range(50):
        x = torch.randn(2, 12)
        for engine in engines:
            x = engine(x.detach())
            engine.backward(x.square().mean() * (1 + 0.1 * (engine is engines[-1] and STAGE == 3)))
            engine.step()
"""


@pytest.mark.long
def test_a_script_with_two_engines(command):
    text = TWO_ENGINES.replace("STAGE", "engine.zero_optimization_stage()")
    ended = command(text, "--nproc", "1", "--steps", "2", "--accumulation", "1", "--stages", "1,3", "script")
    table = {line[:7]: line for line in ended.stdout.splitlines() if line.startswith("stage")}
    assert table["stage 1"].endswith(("same bits", "within rounding")), ended.stdout + ended.stderr
    assert table["stage 3"].endswith("DIFFERS: first in the gradient of 'engine 1: norm.weight' at step 1")


@pytest.mark.parametrize(
    ("text", "options", "args", "said"),
    [
        (SCRIPT, (), ("1",), "the script ended after 1 of 3 optimizer steps; --steps says how many are wanted"),
        (f"import time; time.sleep(600); {CLIPS}", ("--timeout", "0.5"), (), "not done after 0.5 s (--timeout)"),
        *longer(("pass", (), (), "the script ended without a call of zero.initialize, and it printed nothing")),
    ],
)
def test_a_script_that_gives_nothing_to_compare(command, text, options, args, said):
    ended = command(text, "--nproc", "1", *options, "script", *args)
    assert ended.returncode == 1
    assert said in ended.stderr
    assert "there is nothing to compare with" in ended.stderr
    assert ended.stderr.count("script.py:1: torch.nn.utils.clip_grad_norm_ and the like find no") == (CLIPS in text)


@pytest.mark.parametrize(
    ("call", "lines"),
    [
        (CLIPS, [2]),
        ("clip_grad_value_(p, 1)", [2]),
        ("nn.utils.clip_grad_norm_(p, 1)", [2]),
        ("accelerator.clip_grad_norm_(p, 1)", []),
        ("torch.nn.utils.clip_grad_norm_", []),
        ("(", []),
    ],
)
def test_calls_that_clip_nothing_are_found(tmp_path, call, lines):
    script = tmp_path / "script.py"
    script.write_text(f"import torch\n{call}")
    assert _clips(script) == lines


def test_options_behind_the_script_are_pointed_out():
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    own = {"--config", "--set"}  # which many scripts have, too
    assert {*OPTIONS, *own, "-h", "--help"} == {word for action in parser._actions for word in action.option_strings}
    given = request(parser.parse_args(["--steps", "2", "script.py", "--nproc", "2", "--stages=1", "--lr", "3"]))
    assert given.stray_options == ("--nproc", "--stages=1")
    given = request(parser.parse_args(["--config", "a.json", "--set", "fp16.enabled=true", "script.py", "--config=b"]))
    words = ["--config=a.json", "--set=fp16.enabled=true", "--", "script.py", "--config=b"]
    assert given.command() == ["run", "--hostfile", "", *words] and not given.stray_options


def test_a_wrong_command_line(command):
    assert "there is no script 'nowhere.py'" in command("", "nowhere.py").stderr
    ended = command("", "--stages", "0,7", "script")
    assert ended.returncode == 2
    assert "stages: got [0, 7], wanted some of 0, 1, 2 and 3" in ended.stderr
