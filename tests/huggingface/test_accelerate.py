"""The promise: a loop written for Accelerate trains, saves its state and goes on from it, at other ranks too."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_cases import opened, settings
from ranks import Pool

LONG = pytest.mark.long
STEPS = 8
ROWS = 8  # of all ranks, for one micro-batch


def prepared(config: dict[str, Any]) -> tuple[Any, ...]:
    """Accelerate's things around a small model whose optimizer and schedule are those of the script."""
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.utils import set_seed

    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
    set_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Dropout(0.1), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    inputs = torch.randn(STEPS * ROWS, 8)
    data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
    loader = torch.utils.data.DataLoader(data, batch_size=ROWS // accelerator.num_processes)
    return accelerator, *accelerator.prepare(model, optimizer, schedule, loader)


def looped(config: dict[str, Any], save: str | None, load: str | None) -> Any:
    """The losses of all ranks' micro-batches, of the second half where state is loaded; then what is left."""
    with opened():
        accelerator, model, optimizer, schedule, loader = prepared(config)
        losses = []
        for number, (inputs, targets) in enumerate(loader):
            if load is not None and number < STEPS // 2:
                continue
            if number == STEPS // 2:  # here, as a loader that starts takes a random number
                for folder, act in ((save, accelerator.save_state), (load, accelerator.load_state)):
                    if folder is not None:
                        act(folder)
            with accelerator.accumulate(model):
                loss = torch.nn.functional.mse_loss(model(inputs), targets)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach()).mean().item())
        weights = accelerator.get_state_dict(model)
        state = {name: value.tolist() for name, value in (weights or {}).items()}
        kind = type(optimizer.optimizer.shard_optimizer).__name__
        accelerator.free_memory()
        return losses, state, kind


@pytest.mark.long
@pytest.mark.parametrize("number", [0, 3])
def test_a_loop_goes_on_bit_for_bit(door: Pool, tmp_path: Path, number: int) -> None:
    folder = str(tmp_path / "state")
    (losses, state, _), (_, elsewhere, _) = door.run(2, looped, settings(number), folder, None)
    assert bool(elsewhere) == (number < 3)
    half, again, _ = door.run(2, looped, settings(number), None, folder)[0]
    assert (half, again) == (losses[STEPS // 2 :], state)
    assert os.path.exists(f"{folder}/pytorch_model/index.json")


@pytest.mark.long
def test_an_optimizer_whose_state_is_offloaded_runs_fused_with_the_same_numbers(door: Pool) -> None:
    """Accelerate puts DeepSpeedCPUAdam in the place of torch's."""
    here, there = (settings(2), settings(2, offload_optimizer={"device": "cpu"}))
    losses, state, kind = door.run(2, looped, here, None, None)[0]
    offloaded, state_there, kind_there = door.run(2, looped, there, None, None)[0]
    assert (kind, kind_there) == ("TorchShardOptimizer", "FusedShardOptimizer")
    assert offloaded == pytest.approx(losses, rel=1e-5)
    for name, values in state.items():
        torch.testing.assert_close(torch.tensor(state_there[name]), torch.tensor(values), rtol=1e-4, atol=1e-6)


def looked_into(number: int) -> tuple[list[float | None], list[tuple[torch.dtype, int]]]:
    """Norms of a step whose gradients are not finite and of one whose are; dtypes and sizes of the exact values."""
    with opened():
        import deepspeed

        config = {"train_batch_size": 2, "fp16": {"enabled": True}, "optimizer": {"type": "AdamW"}}
        model = torch.nn.Linear(3, 5)
        engine, optimizer, _, _ = deepspeed.initialize(
            model=model, config={**config, "zero_optimization": {"stage": number}}
        )
        norms = []
        for factor in (1e30, 1e-5):
            engine.backward(engine(torch.ones(1, 3, dtype=torch.float16)).float().sum() * factor)
            engine.step()
            norms.append(engine.get_global_grad_norm())
        masters = optimizer.single_partition_of_fp32_groups
        return norms, [(each.dtype, each.numel()) for each in masters]


@pytest.mark.parametrize("number", [3, pytest.param(0, marks=LONG)])
def test_a_step_that_was_skipped_has_no_norm_and_masters_are_fp32(door: Pool, number: int) -> None:
    results = door.run(2, looked_into, number)
    for (skipped, taken), masters in results:
        assert skipped is None and taken == pytest.approx(20**0.5 * 1e-5, rel=1e-2)
        assert [dtype for dtype, _ in masters] == [torch.float32]
    assert sum(size for _, masters in results for _, size in masters) == (20 if number else 40)
