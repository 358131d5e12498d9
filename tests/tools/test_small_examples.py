"""The promise: the examples for images and for masked language modelling learn, and count each sample once.

The server of the third has the weights of the trainer after each message, of which the later ones are small. A model in
stages learns, too, and the times of one in pieces are drawn. One whose layers are cut has the losses of one process, as
has a mixture whose experts are divided.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import Launchers
from marks import longer
from nodes import environment
from pages import ROOT, run_script
from ports import free_port
from ranks import Pool

import zero

IMAGES, MASKED, SERVE, PIPELINE, TENSORS, EXPERTS = (
    str(ROOT / "examples" / name / "train.py")
    for name in ("images", "masked", "serve", "pipeline", "tensors", "experts")
)


def numbers(pool: Pool, folder: Path, *words: str) -> list[float]:
    """Of the last line that an example prints on two ranks."""
    said = pool.run(2, run_script, str(folder), list(words), free_port())[0]
    return [float(number) for number in re.findall(r"\d+\.?\d*", said.splitlines()[-1])]


def test_the_images_of_a_short_run_are_learnt_and_each_is_counted_once(pool: Pool, tmp_path: Path) -> None:
    epoch, _, share, total = numbers(pool, tmp_path, IMAGES, "--epochs", "2", "--pictures", "777")
    assert (epoch, total) == (2, 777)
    assert share > 34, "chance is 17 %"


@pytest.mark.ranks(2)
def test_the_accuracy_is_that_of_all_images_at_once() -> None:
    parts = runpy.run_path(IMAGES)
    measured = parts["draw"](45, seed=2)
    config = {"train_micro_batch_size_per_gpu": 8, "optimizer": {"type": "AdamW"}}
    torch.manual_seed(0)
    engine, _, loader, _ = zero.initialize(
        model=parts["Classifier"](width=8), config=config, training_data=parts["draw"](32, seed=1)
    )
    for pictures, kinds in loader:  # each rank sees its own, and so has statistics of its own
        engine.backward(torch.nn.functional.cross_entropy(engine(pictures), kinds))
        engine.step()
    share, total = parts["accuracy"](engine, engine.deepspeed_io(measured, batch_size=8, route="eval"))
    pictures, kinds = measured[:]
    with torch.no_grad():
        named = engine.module.eval()(pictures).argmax(dim=1)
    assert (share, total) == ((named == kinds).double().mean().item(), 45)
    statistics = torch.cat([buffer.double().flatten() for buffer in engine.module.buffers()])
    assert torch.equal(engine.reduce(statistics), statistics), "all ranks have the same"
    engine.destroy()


@pytest.mark.parametrize(
    ("steps", "width", "better"), [(24, 32, False), pytest.param(200, 96, True, marks=pytest.mark.long)]
)
def test_gaps_are_filled(pool: Pool, tmp_path: Path, steps: int, width: int, better: bool) -> None:
    share, total, common = numbers(pool, tmp_path, MASKED, "--steps", str(steps), "--width", str(width))
    assert total == 333 * round(0.15 * 96), "each chosen byte of the windows once"
    assert share > (2 * common if better else common / 2)


def test_windows_are_masked_as_bert_masks() -> None:
    parts = runpy.run_path(MASKED)
    gaps = parts["Gaps"](bytes(range(97, 123)) * 50, 200, 5, seed=1)
    for index in range(5):
        seen, targets = gaps[index]
        chosen = targets != parts["IGNORED"]
        assert chosen.sum() == 30 and (seen[chosen] == parts["MASK"]).sum() == 24
        assert (seen[chosen] == targets[chosen]).sum() in range(3, 7), "3 stay, and another byte may be the same"
        assert torch.equal(seen, gaps[index][0]) and not torch.equal(seen, gaps[(index + 1) % 5][0])


@pytest.mark.long
def test_a_server_gets_all_weights_and_then_what_has_changed(pool: Pool, tmp_path: Path) -> None:
    said = pool.run(2, run_script, str(tmp_path), [SERVE, "--rounds", "2"], free_port())[0]
    found = re.findall(r"step (\d+): (\d+) bytes; the server says (b'.*')", said)
    assert [int(step) for step, _, _ in found] == [2, 4, 6]
    assert all(ast.literal_eval(text)[:9] == b"The quick" for _, _, text in found), "whatever bytes it says"
    whole, *parts = (int(nbytes) for _, nbytes, _ in found)
    assert all(0 < nbytes < 0.7 * whole for nbytes in parts)


def test_a_model_in_stages_learns(pool: Pool, tmp_path: Path) -> None:
    words = [PIPELINE, "--steps", "10", "--width", "32", "--layers", "3"]
    first, second = pool.run(2, run_script, str(tmp_path), words, free_port())
    assert "rank 0 has Embedding, Block" in first and second.strip().endswith("Block, LayerNorm, Linear")
    losses = [float(number) for number in re.findall(r"loss[^\d]*([\d.]+)", first)]
    assert len(losses) == 6 and losses[0] > losses[-1] + 0.2


def losses_of(path: str, stage: int, section: str, steps: int, **values: Any) -> tuple[list[float], str]:
    """Of an example, by its JSON with these values in a section."""
    config = json.loads(Path(path).with_name("zero.json").read_text())
    config[section] |= values
    config["zero_optimization"]["stage"] = stage
    with contextlib.redirect_stdout(io.StringIO()) as said:
        losses = runpy.run_path(path)["main"](config, steps)
    return losses, said.getvalue()


def losses_of_cut_layers(tp: int, stage: int, sequences: bool, steps: int) -> tuple[list[float], str]:
    return losses_of(TENSORS, stage, "tensor_parallel", steps, autotp_size=tp, sequence_parallel=sequences)


def losses_of_experts(ep: int, stage: int, steps: int) -> tuple[list[float], str]:
    return losses_of(EXPERTS, stage, "expert_parallel", steps, enabled=ep > 1, autoep_size=ep)


@pytest.mark.parametrize(
    ("steps", "grids"),
    [
        (4, [(2, 2, 3, True)]),
        *longer((16, [(4, 2, 3, True), (2, 2, 1, False), (4, 4, 0, True), (2, 1, 2, False)])),
    ],
)
def test_layers_over_ranks_change_no_loss(pool: Pool, steps: int, grids: list[tuple[int, int, int, bool]]) -> None:
    """By the configuration alone; a rank has little more than its part."""
    ((alone, whole),) = pool.run(1, losses_of_cut_layers, 1, 1, False, steps)
    assert len(alone) == steps and alone[-1] < alone[0] - 0.5 and "rank 0 works with 186,944 of 186,944" in whole
    for world, tp, stage, sequences in grids:
        for losses, said in pool.run(world, losses_of_cut_layers, tp, stage, sequences, steps):
            assert losses == pytest.approx(alone, rel=2e-5)
            here = int(re.findall(r"works with ([\d,]+)", said)[0].replace(",", ""))
            assert 186_944 / tp <= here < 186_944 / tp * 1.4


@pytest.mark.parametrize(
    ("steps", "grids"), [(4, [(2, 2, 3)]), *longer((16, [(4, 2, 3), (2, 2, 1), (4, 4, 0), (4, 2, 2)]))]
)
def test_experts_over_ranks_change_no_loss(pool: Pool, steps: int, grids: list[tuple[int, int, int]]) -> None:
    """By the configuration alone; a rank has its part of the experts, and all else."""
    ((alone, whole),) = pool.run(1, losses_of_experts, 1, 1, steps)
    assert len(alone) == steps and alone[-1] < alone[0] - 0.5 and "rank 0 works with 333,952 of 333,952" in whole
    for world, ep, stage in grids:
        for losses, said in pool.run(world, losses_of_experts, ep, stage, steps):
            assert losses == pytest.approx(alone, rel=2e-5)
            assert f"works with {333_952 - 262_144 + 262_144 // ep:,} of" in said


def losses_of_operators(cut: bool, stage: int, steps: int) -> list[float]:
    config = json.loads((ROOT / "examples" / "operators" / "zero.json").read_text())
    config["zero_optimization"]["stage"] = stage
    return runpy.run_path(TENSORS)["main"](config if cut else config | {"zero": {}}, steps)


@pytest.mark.parametrize(("steps", "stages"), [(4, [3]), *longer((16, [0, 1, 2, 3]))])
def test_operators_over_ranks_change_no_loss(pool: Pool, steps: int, stages: list[int]) -> None:
    """By the configuration alone."""
    (alone,) = pool.run(1, losses_of_operators, False, 1, steps)
    assert len(alone) == steps and alone[-1] < alone[0] - 0.5
    for stage in stages:
        for losses in pool.run(4, losses_of_operators, True, stage, steps):
            assert losses == pytest.approx(alone, rel=1e-5)


def test_two_products_move_what_is_said(pool: Pool, tmp_path: Path) -> None:
    said = pool.run(4, run_script, str(tmp_path), [str(ROOT / "examples" / "operators" / "products.py")], free_port())
    first, second = (line for line in said[0].splitlines() if "redistributions" in line)
    assert "rows, then columns: mesh (4,), placements (cut 0), local (8, 64) of (32, 64)" in first
    assert "contraction, then rows: mesh (4,), placements (partial), local (32, 64) of (32, 64)" in second


@pytest.mark.long
def test_the_times_in_pieces_are_measured_and_drawn(launchers: Launchers, tmp_path: Path) -> None:
    sizes = ["--split-sizes", "20", "60", "--steps", "1", "--width", "4"]
    chart = ["run", "--num_gpus", "2", PIPELINE.replace("train", "chart"), "--out", str(tmp_path), *sizes]
    done = launchers.run(*chart, environment=environment(OMP_NUM_THREADS="1"), folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    times = json.loads((tmp_path / "times.json").read_text())["seconds"]
    assert [*times] == ["one process", "two pieces", "split size 20", "split size 60"]
    assert min(times.values()) > 0
    assert (tmp_path / "times.png").read_bytes().startswith(b"\x89PNG")
