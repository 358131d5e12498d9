"""The promise: Lightning's checkpoints under ZeroStrategy go on bit for bit, also at another number of ranks.

The script of docs/lightning.md trains as it stands, on every stage, whoever starts its processes.
"""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launching import ROOT
from marks import longer, needs
from nodes import environment
from ports import free_port
from ranks import Pool

pytestmark = needs("lightning")

EPOCHS = 3
WHEN = {
    "epoch": {"save_on_train_epoch_end": True, "every_n_epochs": 1},
    "validation": {"monitor": "val"},
    "inside an epoch": {"every_n_train_steps": 3},
    "seldom": {"every_n_train_steps": 5},
}


def saved(folder: str, **options: Any) -> Any:
    """A callback that keeps all checkpoints in `folder`, by their steps."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    return ModelCheckpoint(dirpath=folder, filename="{step}", **{"save_top_k": -1, **options})


def interrupted(number: int, folder: str, when: list[str]) -> dict[str, int]:
    """From the first and the last checkpoint of a run with dropout, train on, to the same bits; how many there were."""
    from lightning_runs import Resumable, data, seeded, trainer, weights

    counts = {}
    for name in when:
        inside = name != "epoch"
        loader = (lambda: data(Resumable)) if inside else (lambda: data(shuffle=True))
        options = {"max_epochs": EPOCHS, "enable_checkpointing": True, "val_check_interval": 2 if inside else 1.0}
        place = f"{folder}/{name}"
        net = seeded(dropout=0.3)
        trainer(number, callbacks=[saved(place, **WHEN[name])], **options).fit(net, loader(), data())
        wanted = weights(net)
        found = sorted(Path(place).glob("*.ckpt"))
        for checkpoint in (found[0], found[-1]):
            other = seeded(dropout=0.3)
            torch.manual_seed(99)  # nothing of now counts
            again = saved(f"{folder}/again {name}", **WHEN[name])
            trainer(number, callbacks=[again], **options).fit(other, loader(), data(), ckpt_path=str(checkpoint))
            steps = int(re.search(r"\d+", checkpoint.name)[0])
            assert other.losses == net.losses[steps:], (name, checkpoint.name)
            assert all(map(torch.equal, weights(other), wanted)), (name, checkpoint.name)
        counts[name] = len(found)
    return counts


@pytest.mark.long
@pytest.mark.parametrize(
    ("world", "number", "when"), [(2, 3, ["inside an epoch", "validation"]), (2, 1, ["seldom"]), (1, 3, ["epoch"])]
)
def test_a_run_goes_on_bit_for_bit(pool: Any, tmp_path: Path, world: int, number: int, when: list[str]) -> None:
    steps = EPOCHS * 8 // world
    expected = {"epoch": EPOCHS, "validation": steps // 2, "inside an epoch": steps // 3, "seldom": steps // 5}
    assert pool.run(world, interrupted, number, str(tmp_path), when)[0] == {name: expected[name] for name in when}


def part(number: int, epochs: int, size: int, folder: str, start: str | None) -> list[float]:
    """Train up to `epochs` and save; the parameters, in a row, and the lr."""
    from lightning_runs import Net, data, trainer, weights

    loader = torch.utils.data.DataLoader(data().dataset, batch_size=size)
    net, run = Net(), trainer(number, max_epochs=epochs)
    run.fit(net, loader, ckpt_path=start)
    run.save_checkpoint(f"{folder}/{epochs}.ckpt")  # the engine is still there
    lr = run.lr_scheduler_configs[0].scheduler.get_last_lr()
    return [*torch.cat([value.flatten() for value in weights(net)]).tolist(), *lr]


@pytest.mark.parametrize(("first", "then"), [(3, 1), pytest.param(1, 3, marks=pytest.mark.long)])
def test_it_goes_on_at_another_number_of_ranks_and_stage(pool: Any, tmp_path: Path, first: int, then: int) -> None:
    """With the same samples in each step."""
    straight = pool.run(2, part, first, 2, 4, f"{tmp_path}/straight", None)[0]
    half = pool.run(2, part, first, 1, 4, str(tmp_path), None)[0]
    on = pool.run(1, part, then, 2, 8, str(tmp_path), f"{tmp_path}/1.ckpt")[0]
    assert on == pytest.approx(straight, rel=1e-4, abs=1e-6)
    assert half != pytest.approx(straight, rel=1e-2, abs=1e-3)


def weights_only(number: int, folder: str) -> list[str]:
    """The best of a run by `save_weights_only`, into plain Lightning, into an engine, and a file of DDP's into one."""
    from lightning_runs import Net, data, seeded, trainer, weights

    import zero

    net, keep = seeded(), saved(folder, save_weights_only=True, monitor="val", save_top_k=1)
    run = trainer(number, callbacks=[keep], enable_checkpointing=True)
    run.fit(net, data(), data())
    dist.barrier()  # rank 0 removes them
    assert [path.name for path in Path(folder).iterdir()] == [Path(keep.best_model_path).name], "others are removed"
    value = run.validate(net, data(), ckpt_path="best", verbose=False)[0]["val"]
    best = weights(net)
    assert value == pytest.approx(float(keep.best_model_score), rel=1e-6)
    plain = Net.load_from_checkpoint(keep.best_model_path)
    assert all(map(torch.equal, plain.state_dict().values(), best))

    run.save_checkpoint(f"{folder}/whole.ckpt")
    if dist.get_rank() == 0:  # a folder of the engine's, into a plain module
        whole = Net()
        zero.load_weights(whole, f"{folder}/whole.ckpt")
        assert all(map(torch.equal, whole.state_dict().values(), best))
    dist.barrier()

    ddp = trainer("ddp", max_epochs=1)
    ddp.fit(seeded(), data())
    ddp.save_checkpoint(f"{folder}/ddp.ckpt")
    other, run = Net(), trainer(number, max_epochs=1)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        run.fit(other, data(), ckpt_path=f"{folder}/ddp.ckpt")
    assert not other.losses, "the epoch is over"
    wanted = Net.load_from_checkpoint(f"{folder}/ddp.ckpt")
    assert all(map(torch.equal, wanted.parameters(), weights(other)))
    return [str(each.message) for each in said]


@pytest.mark.long
def test_weights_are_for_everybody(pool: Any, tmp_path: Path) -> None:
    said = pool.run(2, weights_only, 3, str(tmp_path / "best"))[0]
    assert any("the checkpoint is a file of Lightning's; the optimizer begins anew" in text for text in said)


class Odd:
    """What JSON and tensors cannot tell."""

    def __repr__(self) -> str:
        return "an odd thing"


def unplain(folder: str) -> list[str]:
    """Hyper-parameters and a callback's state that have no plain form; a save inside of a window."""
    import lightning
    from lightning_runs import Net, data, trainer

    class Sized(Net):
        def __init__(self, odd: Odd, size: float) -> None:
            super().__init__()
            self.save_hyperparameters()

    class Keeps(lightning.Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"what": Odd()}

    class Saves(lightning.Callback):
        def on_train_batch_end(self, trainer: lightning.Trainer, *_: Any) -> None:
            trainer.save_checkpoint(f"{folder}/window.ckpt")

    said, run = [], trainer(1, max_epochs=1)
    run.fit(Sized(Odd(), 2.5), data())
    run.save_checkpoint(f"{folder}/odd.ckpt")
    kept = run.strategy.load_checkpoint(f"{folder}/odd.ckpt")["hyper_parameters"]
    said.append(str(kept))
    for callback in (Keeps(), Saves()):
        try:
            run = trainer(1, max_epochs=1, callbacks=[callback], accumulate_grad_batches=2)
            run.fit(Net(), data())
            run.save_checkpoint(f"{folder}/callback.ckpt")
        except (ValueError, RuntimeError) as error:
            said.append(str(error))
    return said


def test_what_cannot_be_saved_is_said(pool: Any, tmp_path: Path) -> None:
    kept, callback, window = pool.run(1, unplain, str(tmp_path))[0]
    assert kept == "{'odd': 'an odd thing', 'size': 2.5}"
    assert re.search(r"client_state\['callbacks'\]\['.*Keeps'\]\['what'\]: got an Odd; wanted JSON values", callback)
    assert "in the middle of an accumulation window: 1 of 2 micro-batches are in" in window


# --- the script of the page ------------------------------------------------------------------------------------------


def run(script: str, stage: int, out: str) -> float:
    """Run it as this rank's own script; the metric of its validation."""
    argv, sys.argv = sys.argv, [script, str(stage), out]
    try:
        trainer = runpy.run_path(script, run_name="__main__")["trainer"]
    finally:
        sys.argv = argv
    value = trainer.callback_metrics["val"].item()
    trainer.strategy.engine.destroy()
    return value


@pytest.fixture
def script(tmp_path: Path) -> Path:
    page = (ROOT / "docs" / "lightning.md").read_text()
    path = tmp_path / "train.py"
    path.write_text(re.search(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)[1])
    return path


def check(value: float, out: Path) -> None:
    assert value < 1.0, "it starts at 8"
    assert sorted(path.name for path in out.iterdir()) == ["best.ckpt", "weights.ckpt"]
    weights = torch.load(out / "weights.ckpt", weights_only=True)["state_dict"]
    assert {tuple(weight.shape) for weight in weights.values()} == {(64, 64), (64,), (1, 64), (1,)}


@pytest.mark.parametrize("stage", [3, *longer(1, 2)])
def test_the_script_of_the_page(pool: Pool, tmp_path: Path, script: Path, stage: int) -> None:
    first, second = pool.run(2, run, str(script), stage, str(tmp_path / "out"))
    assert first == second
    check(first, tmp_path / "out")


@pytest.mark.long
@pytest.mark.parametrize("by_zero", [True, False])
def test_whoever_starts_its_processes(launchers: Any, tmp_path: Path, script: Path, by_zero: bool) -> None:
    words, there = (str(script), "3", str(tmp_path / "out")), environment(OMP_NUM_THREADS="1")
    if by_zero:
        done = launchers.run("run", "--num_gpus", "2", *words, environment=there, folder=tmp_path)
    else:
        how = {"cwd": tmp_path, "capture_output": True, "text": True, "timeout": 240, "check": False}
        done = subprocess.run([sys.executable, *words], env=there | {"MASTER_PORT": str(free_port())}, **how)
    assert done.returncode == 0, done.stderr
    check(float(re.findall(r"\bval\b[^\d\n]*([\d.]+)", done.stdout)[-1]), tmp_path / "out")
