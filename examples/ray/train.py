"""Train under Ray Train, which starts the ranks, and starts them again from the last checkpoint where one is lost.

    pip install "zero[clusters]"
    python examples/ray/train.py FOLDER

FOLDER is one that all hosts of the cluster see: ranks write their parts of a checkpoint there, and Ray copies nothing.
Called again with the same folder, it goes on from its last checkpoint.
The model guesses the next byte of the documentation of Python from the 16 before.
"""

from __future__ import annotations

import sys
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import ray.train
import torch
from ray.train.torch import TorchTrainer
from torch import nn
from torch.utils.data import TensorDataset

import zero

CONFIG = {"train_batch_size": 64, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 2}}


def train(run: dict[str, Any]) -> None:
    """On each rank: to step `steps`, from the last reported checkpoint if there is one, with `folder` for new ones."""
    text = torch.frombuffer(bytearray(topics["class"], "utf8"), dtype=torch.uint8).long()
    windows = text.unfold(0, 17, 1)
    zero.seed_everything(0)
    model = nn.Sequential(nn.Embedding(256, 32), nn.Flatten(), nn.Linear(512, 128), nn.GELU(), nn.Linear(128, 256))
    engine, _, loader, _ = zero.initialize(
        model=model, config=CONFIG, training_data=TensorDataset(windows[:, :16], windows[:, 16])
    )  # joins the process group that Ray has made
    if reported := ray.train.get_checkpoint():
        engine.load_checkpoint(reported.path)
        engine.print(f"goes on behind step {engine.global_steps}")
    for context, byte in zero.RepeatingLoader(loader):
        loss = nn.functional.cross_entropy(engine(context.to(engine.device)), byte.to(engine.device))
        engine.backward(loss)
        engine.step()
        if engine.global_steps % 5 == 0:
            folder = Path(run["folder"], f"step{engine.global_steps}")
            engine.save_checkpoint(folder)  # all ranks write, one reports
            ray.train.report(
                {"loss": engine.reduce(loss.item()), "step": engine.global_steps},
                checkpoint=ray.train.Checkpoint(str(folder)) if engine.global_rank == 0 else None,
                checkpoint_upload_mode=ray.train.CheckpointUploadMode.NO_UPLOAD,
            )
        if engine.global_steps >= run["steps"]:
            break
    engine.destroy()


def main(folder: str, steps: int = 40, workers: int = 2) -> None:
    """Train on so many ranks, which may be lost three times; Ray keeps the last two checkpoints."""
    result = TorchTrainer(
        train,
        train_loop_config={"folder": folder, "steps": steps},
        scaling_config=ray.train.ScalingConfig(num_workers=workers, use_gpu=torch.cuda.is_available()),
        run_config=ray.train.RunConfig(
            storage_path=str(Path(folder).parent),
            name=Path(folder).name,
            failure_config=ray.train.FailureConfig(max_failures=3),
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=2),
        ),
    ).fit()
    print(result.metrics, result.checkpoint)


if __name__ == "__main__":
    main(str(Path(sys.argv[1]).resolve()), *map(int, sys.argv[2:]))
