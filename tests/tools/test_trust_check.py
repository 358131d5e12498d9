"""The promise: a check of the user's own model finds what is wrong, names it, and says so when nothing is.

`engine.check` runs on real ranks and leaves the engine as it was; `zero check` runs a script in processes of its own.
"""

from __future__ import annotations

import argparse
import random
import re
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
from nodes import environment
from planted import ERRORS, MODELS, Dropping, alarms, planted, verdicts
from scenario import run, same
from torch import nn

import zero
from zero.engine.check.compare import Yardstick, judge
from zero.engine.check.plain_engine import Step
from zero.engine.check.recording import RunRecord
from zero.engine.check.runs import CheckRun, RunKind
from zero.launch.args.scripts import add_check, check_request

CLIPS = "torch.nn.utils.clip_grad_norm_(p, 1)"
FEW = {"steps": 2, "accumulations": (1,)}
FORMS = {  # beside those of tests/planted.py
    "autocast, sent in bf16": {"torch_autocast": {"enabled": True}, "communication_data_type": "bf16"},
    "LAMB": {"optimizer": {"type": "Lamb", "params": {"lr": 1e-2, "weight_decay": 0.1}}},
    "Muon": {"optimizer": {"type": "Muon", "params": {"lr": 1e-2, "weight_decay": 0.1}}},
}


def checked(model: nn.Module, data: Any, stage: int, more: dict[str, Any], make: Any = None, **how: Any) -> Any:
    """Whether all is well, the verdicts and the report; with a client's optimizer, which `make` makes of the model."""
    settings, optimizer = config(stage, dist.get_world_size(), **more), None
    if make is not None:
        del settings["optimizer"]
        optimizer = make(model)
    engine, *_ = zero.initialize(model=model, optimizer=optimizer, config=settings)
    report = engine.check(data, **how)
    engine.destroy()
    return report.ok, [row.verdict for row in report.rows], str(report)


def rmsprop(net: nn.Module) -> torch.optim.Optimizer:
    """Groups with their own lr, one of them frozen in part."""
    net.norm.bias.requires_grad_(False)
    groups = [{"params": list(net.blocks.parameters()), "lr": 1e-3}, {"params": list(net.norm.parameters())}]
    return torch.optim.RMSprop(groups, lr=1e-2)


CLIENTS = {
    "RMSprop": rmsprop,
    "Muon": lambda net: torch.optim.Muon([param for param in net.parameters() if param.ndim == 2], lr=1e-2),
    "FusedOptimizer": lambda net: zero.FusedOptimizer(net.parameters(), "AdamW", lr=1e-2, betas=(0.8, 0.9)),
}


def all_forms(stage: int) -> dict[str, Any]:
    data, few = [share(0), share(1)], {**FEW, "stages": (0, 3)}
    found = {name: checked(make_net(), data, stage, more, **few) for name, more in FORMS.items()}
    found |= {f"client's {name}": checked(make_net(), data, stage, {}, make, **few) for name, make in CLIENTS.items()}
    torch.manual_seed(3)
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))
    return found | {"awkward": checked(Dropping(), {"x": x}, stage, {})}


@pytest.mark.long
def test_a_right_model_is_well(pool):
    for forms in pool.run(2, all_forms, 3):
        for name, (ok, rows, text) in forms.items():
            assert ok, f"{name}\n{text}"
            assert len(rows) == (8 if name == "awkward" else 2)
            assert set(rows) <= {"same bits", "within rounding"}
            assert "agree among themselves in every bit (accumulation 1)" in text


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("stage", "precision"), [(2, "bf16"), (3, "fp32"), *longer((0, "fp32"))])
def test_training_goes_on_as_if_there_had_been_no_check(stage, precision):
    runs, numbers = [], []
    for with_check in (True, False):
        torch.manual_seed(dist.get_rank())
        random.seed(1)

        def loop(engine: Any, number: int, inputs: Any, with_check: bool = with_check) -> torch.Tensor:
            engine.backward(loss := engine(*inputs))
            if with_check and number == 2:  # in the middle of a window
                assert engine.check(share(0), steps=1, stages=(1, 3), accumulations=(1,)).ok
            numbers.append((torch.rand(1).item(), random.random()))
            return loss

        runs.append(run("net", stage, precision=precision, accumulation=2, loop=loop))
    assert same(*runs)
    assert numbers[:6] == numbers[6:]


@pytest.mark.ranks(2)
def test_a_wrong_gradient_on_one_rank_is_found():
    error = next(error for error in ERRORS if "on one rank" in error.name)
    right, wrong = verdicts("Net", "AdamW", 0, 1, [None, error])
    assert right in ("same bits", "within rounding")
    assert wrong == "DIFFERS: first in the gradient of 'blocks.0.norm.weight' at step 1"


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_every_planted_error_is_found_and_no_right_model_is_blamed(pool, seed):
    """Three seeds, the first one with every third model."""
    models = list(MODELS) if seed else list(MODELS)[::3]
    assert pool.run(1 if seed == 2 else 2, alarms, seed, models)[0] == dict.fromkeys(models)
    found = pool.run(2, planted, list(MODELS)[5 * seed % len(MODELS)], seed)[0]
    assert len(found) == len(ERRORS)
    assert all(found.values()), found


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
    ok, rows, text = checked(Remembering(), torch.randn(2, WIDTH), 2, {}, **FEW, stages=(2,))
    assert not ok
    why = "plain torch does not repeat itself: the loss depends on more than weights, batch and seed"
    assert rows == [f"DIFFERS: {why}"]
    assert text.endswith("NOT all is well.")


def test_an_optimizer_of_the_script_beside_auto_in_the_file():
    net = make_net()
    given = {"optimizer": torch.optim.SGD(net.parameters(), lr=0.1), "config": config(1, 1) | {"optimizer": "auto"}}
    engine, *_ = zero.initialize(model=net, **given)
    assert engine.check(share(0), steps=1, stages=(1,), accumulations=(1,))
    engine.destroy()


def test_the_loss_is_asked_for_and_wrong_arguments_are_named():
    engine, *_ = zero.initialize(model=nn.Linear(WIDTH, 3), config=config(0, 1))
    x = torch.randn(2, WIDTH)
    with pytest.raises(ValueError, match=r"the model returned Tensor, in which no loss was found .* pass loss_fn="):
        engine.check(x)
    assert engine.check(x, steps=1, loss_fn=lambda model, given: model(given).square().mean())
    for wrong in ({"steps": 0}, {"stages": (4,)}, {"accumulations": (0,)}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            engine.check(x, **wrong)
    with pytest.raises(ValueError, match="empty list"):
        engine.check([])


def test_runs_that_begin_with_other_weights_are_not_compared():
    """An unseeded script: its runs are as far apart as can be, and what lies between is not rounding."""
    step = Step({"w": torch.ones(1)}, {"w": torch.ones(1)}, {})
    one, other = (RunRecord([[1.0]], [1.0], [step], None, "fp32", {"w": begin}) for begin in (1, 2))
    run, measure = CheckRun(RunKind.ENGINE, 1, 1, 3), Yardstick(0.0, {"w": 0.0}, 0.0)
    assert judge(run, one, one, measure).good
    row = judge(run, other, one, measure)
    assert not row.good
    wanted = "DIFFERS: parameter 'w' before the first step; does the script seed its random numbers?"
    assert row.verdict == wanted


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

    def run(text: str, *args: str) -> subprocess.CompletedProcess:
        path = tmp_path / "script.py"
        path.write_text(textwrap.dedent(text))
        words = (str(path) if arg == "script" else arg for arg in args)
        given = environment(OMP_NUM_THREADS="1")
        return launchers.run("check", "--nproc", "1", *words, environment=given, seconds=400)

    return run


def table_of(ended: subprocess.CompletedProcess) -> dict[str, str]:
    return {line[:7]: line for line in ended.stdout.splitlines() if line.startswith("stage")}


@pytest.mark.long
def test_a_script_that_depends_on_the_stage(command):
    ended = command(SCRIPT, "--steps", "2", "--accumulation", "1", "--stages", "2,3", "script", "50")
    assert ended.returncode == 1, ended.stderr
    table = table_of(ended)
    assert table["stage 2"].endswith("FAILED: exit status 1")
    assert table["stage 3"].endswith("DIFFERS: first in the gradient of 'norm.weight' at step 1")
    assert "NOT all is well." in ended.stdout
    # The output of the script is shown for the run that failed only.
    assert ended.stderr.count("hello from the script") == 1
    assert "zero check: stage 2, accumulation 1: exit status 1; the end of its output:" in ended.stderr
    assert "ArithmeticError: stage 2 is not for me" in ended.stderr
    assert "never reached" not in ended.stdout + ended.stderr
    assert ended.stderr.startswith("zero check: some 5 runs of ")
    assert re.search(r"^zero check: plain torch, accumulation 1: \d+\.\d s$", ended.stderr, re.MULTILINE)


TWO_ENGINES = """
    import torch
    import zero
    from models import Block, config

    torch.manual_seed(1)
    with zero.Init():
        late = Block()
    engines = [zero.initialize(model=model, config=config(0, 1))[0] for model in (Block(), late)]
    for step in range(50):
        x = torch.randn(2, 12)
        for engine, update in zip(engines, (engines[0].step, engines[1].optimizer.step)):
            x = engine(x.detach())
            engine.backward(x.square().mean() * (1 + 0.1 * (engine is engines[-1] and STAGE == 3)))
            update()
"""


@pytest.mark.long
def test_a_script_with_two_engines(command):
    """One is built under `zero.Init`, and stepped by its optimizer."""
    text = TWO_ENGINES.replace("STAGE", "engine.zero_optimization_stage()")
    ended = command(text, "--steps", "2", "--accumulation", "1", "--stages", "1,3", "script")
    table = table_of(ended)
    assert table["stage 1"].endswith(("same bits", "within rounding")), ended.stdout + ended.stderr
    assert table["stage 3"].endswith("DIFFERS: first in the gradient of 'engine 1: norm.weight' at step 1")


UNEQUAL = """
    import torch
    import zero
    from models import batch, config, make_net

    more = {"zero": {"mean": "tokens"}, "managed_gradient_accumulation": False}
    engine, *_ = zero.initialize(model=make_net(), config=config(0, 2, **more))
    for step in range(50):
        for index in range(2 * ((step + engine.global_rank) % 2)):
            loss = engine(*batch(100 * step + 10 * index + engine.global_rank, 2))
            engine.backward(loss, tokens=3 + 4 * index)
        engine.step()
"""


@pytest.mark.long
def test_a_script_whose_ranks_run_different_numbers_of_micro_batches(command):
    ended = command(UNEQUAL, "--nproc", "2", "--steps", "2", "--accumulation", "1", "--stages", "1,3", "script")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert all(line.endswith("within rounding") for line in table_of(ended).values())


SHARED = """
    import torch
    import zero
    from models import config

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.qkv, self.head = torch.nn.Embedding(32, 8), torch.nn.Linear(8, 24), torch.nn.Linear(8, 32)

        def forward(self, tokens, targets, position_ids=None):
            query, key, value = self.qkv(self.embed(tokens)).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
            seen = zero.attention(query, key, value).transpose(1, 2).flatten(2)
            return torch.nn.functional.cross_entropy(self.head(seen).flatten(0, 1), targets.flatten())

    torch.manual_seed(1)
    more = {"sequence_parallel_size": 2, "zero": {"context": {"mode": "ring"}}}
    engine, *_ = zero.initialize(model=Model(), config=config(0, 1, **more))
    for step in range(50):
        tokens = torch.randint(32, (2, 11), generator=torch.Generator().manual_seed(step))
        engine.backward(engine(tokens, tokens.roll(-1, 1)))
        engine.step()
"""


@pytest.mark.long
def test_a_script_whose_ranks_share_sequences(command):
    """Beside each process with whole sequences."""
    ended = command(SHARED, "--nproc", "2", "--steps", "2", "--accumulation", "1", "--stages", "1,3", "script")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert all(line.endswith("within rounding") for line in table_of(ended).values())


@pytest.mark.parametrize(
    ("text", "words", "said"),
    [
        (SCRIPT, ("script", "1"), "the script ended after 1 of 3 optimizer steps; --steps says how many are wanted"),
        *longer(
            (
                f"import time; time.sleep(600); {CLIPS}",
                ("--timeout", "0.5", "script"),
                "not done after 0.5 s (--timeout)",
            )
        ),
        *longer(("pass", ("script",), "the script ended without a call of zero.initialize, and it printed nothing")),
    ],
)
def test_a_script_that_gives_nothing_to_compare(command, text, words, said):
    ended = command(text, *words)
    assert ended.returncode == 1
    assert said in ended.stderr
    assert "there is nothing to compare with" in ended.stderr
    assert ended.stderr.count("script.py:1: torch.nn.utils.clip_grad_norm_ and the like find no") == (CLIPS in text)


def test_options_behind_the_script_are_pointed_out():
    parser = argparse.ArgumentParser()
    add_check(parser)
    given = check_request(parser.parse_args(["--steps", "2", "script.py", "--nproc", "2", "--stages=1", "--lr", "3"]))
    assert given.stray_options == ("--nproc", "--stages=1")
    given = check_request(
        parser.parse_args(["--config", "a.json", "--set", "fp16.enabled=true", "script.py", "--config=b"])
    )
    words = ["--config=a.json", "--set=fp16.enabled=true", "--", "script.py", "--config=b"]
    assert given.command() == ["run", "--hostfile", "", *words] and not given.stray_options
