"""What it costs to mark what a step changes, and what generation costs inside `gathered_for_generation`.

    python benchmarks/weights_out.py

By turns on one rank; the median of the ratios of neighbours. The model has 6 blocks of width 512, in bf16.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import zero
from zero.kernels.formulas import Adam
from zero.kernels.marks import nbytes
from zero.kernels.moments import Moment
from zero.kernels.remainder import split
from zero.kernels.step import step

NUMEL, TURNS = 8_000_000, 25


def seconds(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def ratio(one: Callable[[], Any], other: Callable[[], Any]) -> str:
    """Seconds of `one`, and how many times as long `other` takes."""
    pairs = [(seconds(one), seconds(other)) for _ in range(TURNS)][3:]
    times = statistics.median(b / a for a, b in pairs)
    return f"{statistics.median(a for a, _ in pairs) * 1000:.2f} ms, x {times:.3f}"


def kernel(fmt: str) -> str:
    param, master = split(torch.randn(NUMEL))
    moments = tuple(Moment.filled(NUMEL, fmt) for _ in range(2))
    grad, marks = torch.randn(NUMEL).bfloat16(), torch.zeros(nbytes(NUMEL), dtype=torch.uint8)

    def call(*more: Any) -> None:
        kept = {"marks": more[0]} if more else {}
        step(Adam(1e-6, 0.9, 0.999, 1e-8, 0.0), master, moments, grad, param, step=100, grad_scale=1.0, **kept)

    return ratio(call, lambda: call(marks))


class Model(nn.Module):
    def __init__(self, width: int = 512, layers: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, width)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(width, 8, 4 * width, 0.0) for _ in range(layers))
        self.head = nn.Linear(width, 1000)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    @torch.no_grad()
    def generate(self, tokens: torch.Tensor, length: int = 8) -> torch.Tensor:
        for _ in range(length):
            tokens = torch.cat([tokens, self(tokens)[:, -1:].argmax(-1)], 1)
        return tokens


def engine(stage: int, track: bool) -> Any:
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-6}},
        "zero": {"track_updates": track},
        "steps_per_print": 10**9,
    }
    if stage == 3:  # on one rank parameters are cut only where they rest elsewhere
        config["zero_optimization"]["offload_param"] = {"device": "cpu"}
    return zero.initialize(model=Model(), config=config)[0]


def whole_step() -> str:
    plain, marked = engine(1, False), engine(1, True)
    tokens = torch.arange(256).view(4, 64)

    def train(one: Any) -> None:
        one.backward(one(tokens).float().square().mean())
        one.step()

    return ratio(lambda: train(plain), lambda: train(marked))


def generation() -> str:
    torch.manual_seed(0)
    module, ours = Model().bfloat16().eval(), engine(3, False)
    ours.eval()
    prompt = torch.arange(16).view(1, 16)
    with ours.gathered_for_generation() as gathered:
        return ratio(lambda: module.generate(prompt), lambda: gathered.generate(prompt))


def main() -> None:
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="29611")
    for fmt in ("fp32", "bf16", "8bit"):
        print(f"optimizer step of {NUMEL:,} elements, remainder masters, {fmt} moments; with marks: {kernel(fmt)}")
    print(f"training step; with marks: {whole_step()}")
    print(f"generate of a plain module; inside gathered_for_generation: {generation()}")


if __name__ == "__main__":
    main()
