"""Train a small language model, and keep a server's copy of it up to date: by a file, then through shared memory.

    zero run --num_gpus 2 examples/serve/train.py

The server is another process, with a plain module and no engine. It gets all weights once, in a safetensors file, and
after every few steps what has changed since, in shared memory. It answers with a checksum of its weights and a text.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path
from typing import IO, Any, cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

import zero

TEXT = (b"The quick brown fox jumps over the lazy dog. " * 40)[:1024]
CONFIG = {
    "train_micro_batch_size_per_gpu": 8,
    "zero_optimization": {"stage": 3},
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-6}},
    "steps_per_print": 10**9,
}


class Speaker(nn.Module):
    """Says the next byte from the eight before."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(nn.Linear(8 * width, 8 * width) for _ in range(2))
        self.head = nn.Linear(8 * width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits (batch, 256) of int64 tokens (batch, 8)."""
        x = self.embed(tokens).flatten(1)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(x)

    @torch.no_grad()
    def generate(self, text: bytes, length: int) -> bytes:
        """Return `text` with `length` more bytes."""
        for _ in range(length):
            text += bytes([int(self(torch.tensor([list(text[-8:])])).argmax())])
        return text


def checksum(weights: dict[str, Tensor]) -> int:
    """Return a number that two models share only if all their bits are the same."""
    value = 0
    for name in sorted(weights):
        value = zlib.crc32(weights[name].contiguous().view(torch.uint8).numpy().tobytes(), value)
    return value


def serve() -> None:
    """Take the weights or the updates in each file that a line names; answer with a checksum and a text."""
    weights = (model := Speaker().to(torch.bfloat16)).state_dict()
    for line in sys.stdin:
        tensors = load_file(line.strip())
        for key, values in tensors.items():
            name, _, kind = key.rpartition(":")
            if kind == "values":
                zero.WeightUpdate(name, tensors.get(f"{name}:where"), values).apply_to(weights[name])
        print(checksum(weights), model.generate(b"The quick", 20), flush=True)  # as a bytes literal: one line, ASCII


def train(engine: Any, steps: int, random: torch.Generator) -> None:
    """Take so many steps on this rank's windows of the text."""
    text = torch.tensor(list(TEXT))
    for _ in range(steps):
        begin = torch.randint(len(text) - 8, (8,), generator=random)
        windows = torch.stack([text[at : at + 9] for at in begin]).to(engine.device)
        engine.backward(F.cross_entropy(engine(windows[:, :8]).float(), windows[:, 8]))
        engine.step()


def collect(engine: Any, since: int | None) -> tuple[int, dict[str, Tensor]]:
    """Return the step of now, and, on rank 0, what has changed since a step, or all weights."""
    tensors = {}
    for update in engine.weight_updates(since, rank0_only=True):
        tensors[f"{update.name}:values"] = update.values.to("cpu", copy=True)
        if update.where is not None:
            tensors[f"{update.name}:where"] = update.where.cpu()
    return engine.global_steps, tensors


def tell(server: subprocess.Popen[str], tensors: dict[str, Tensor], folder: str) -> tuple[int, str]:
    """Put these into a file of a folder, and return the server's answer to it."""
    path = Path(folder) / "weights.safetensors"
    save_file(tensors, path)
    print(path, file=server.stdin, flush=True)
    value, _, text = cast("IO[str]", server.stdout).readline().strip().partition(" ")
    path.unlink()
    return int(value), text


def main(argv: list[str] | None = None) -> None:
    """Train and serve."""
    parser = argparse.ArgumentParser(description="keep another process's weights up to date")
    parser.add_argument("--rounds", type=int, default=5, help="how often the server gets updates")
    parser.add_argument("--steps", type=int, default=2, help="optimizer steps between two of them")
    parser.add_argument("--serve", action="store_true", help="be the server")
    args = parser.parse_args(argv)
    if args.serve:
        serve()
        return
    torch.manual_seed(0)
    engine, *_ = zero.initialize(model=Speaker(), config=CONFIG)
    random = torch.Generator().manual_seed(engine.global_rank)
    since, server = None, None
    if engine.global_rank == 0:
        command = [sys.executable, __file__, "--serve"]
        server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None  # files there are shared memory
    with tempfile.TemporaryDirectory() as on_disk, tempfile.TemporaryDirectory(dir=memory) as shared:
        for _ in range(1 + args.rounds):
            train(engine, args.steps, random)
            folder = on_disk if since is None else shared
            since, tensors = collect(engine, since)
            ours = {name: tensor.cpu().clone() for name, tensor in engine.stream_weights(rank0_only=True)}
            if server is not None:
                theirs, text = tell(server, tensors, folder)
                if theirs != checksum(ours):
                    raise SystemExit(f"step {since}: the server has other weights")
                nbytes = sum(tensor.nbytes for tensor in tensors.values())
                print(f"step {since}: {nbytes} bytes; the server says {text}", flush=True)
    if server is not None:
        server.communicate()
    engine.destroy()


if __name__ == "__main__":
    main()
