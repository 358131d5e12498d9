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


@pytest.mark.parametrize("number", [3, *(pytest.param(each, marks=LONG) for each in (0, 1, 2))])
def test_a_loop_goes_on_bit_for_bit(door: Pool, tmp_path: Path, number: int) -> None:
    folder = str(tmp_path / "state")
    (losses, state, _), (_, elsewhere, _) = door.run(2, looped, settings(number), folder, None)
    assert bool(elsewhere) == (number < 3)
    half, again, _ = door.run(2, looped, settings(number), None, folder)[0]
    assert (half, again) == (losses[STEPS // 2 :], state)
    assert os.path.exists(f"{folder}/pytorch_model/index.json")


def test_an_optimizer_whose_state_is_offloaded_runs_fused_with_the_same_numbers(door: Pool) -> None:
    """Accelerate puts DeepSpeedCPUAdam in the place of torch's."""
    here, there = (settings(2), settings(2, offload_optimizer={"device": "cpu"}))
    losses, state, kind = door.run(2, looped, here, None, None)[0]
    offloaded, state_there, kind_there = door.run(2, looped, there, None, None)[0]
    assert (kind, kind_there) == ("TorchShardOptimizer", "FusedShardOptimizer")
    assert offloaded == pytest.approx(losses, rel=1e-5)
    for name, values in state.items():
        torch.testing.assert_close(torch.tensor(state_there[name]), torch.tensor(values), rtol=1e-4, atol=1e-6)
