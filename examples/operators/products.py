"""Two products in a row, of which each is cut over four ranks by a strategy of its own, and what travels between them.

    zero run --num_gpus 4 examples/operators/products.py

The first net cuts the rows of X and then the columns of V: one all-gather lies between. The second cuts a contraction,
and then the rows of what comes: the parts of the sum are added up where they go, by one reduce-scatter.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import zero

ROWS, WIDTH = 32, 64


class Net(nn.Module):
    """Z = f(X W) V, with f the identity or relu."""

    def __init__(self, first: object, second: object, relu: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w, self.v = (nn.Parameter(torch.randn(WIDTH, WIDTH) / 8) for _ in range(2))
        self.one = zero.shard(torch.matmul, first)
        self.two = zero.shard(torch.relu if relu else torch.matmul, second)
        self.relu = relu

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The mean squared error of Z beside `y`."""
        z = self.one(x, self.w)
        self.between = zero.layout(z)
        z = self.two(z) @ self.v if self.relu else self.two(z, self.v)
        return (z - y).square().mean()


def main() -> None:
    """Train both nets, and print what was between the products and how often each operator had something moved."""
    config = {
        "train_micro_batch_size_per_gpu": ROWS // 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 3},
        "zero": {"full_batch": True},
        "comms_logger": {"enabled": True},
    }
    torch.manual_seed(1)
    x, y = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    nets = {
        "rows, then columns": Net([[4, 1], [1, 1]], [[1, 1], [1, 4]], relu=False),
        "contraction, then rows": Net([[1, 4], [4, 1]], [[4, 1]], relu=True),
    }
    for name, net in nets.items():
        engine, *_ = zero.initialize(model=net, config=config)
        for _ in range(20):
            loss = engine(x.to(engine.device), y.to(engine.device))
            engine.backward(loss)
            engine.step()
        mean = engine.reduce(loss.item())
        moved = engine.log_comms_summary()["redistribution"].count
        engine.print(f"{name}: {net.between}; {moved} redistributions; loss {mean:.4f}")
        engine.destroy()


if __name__ == "__main__":
    main()
