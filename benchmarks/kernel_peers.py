"""What a user of torch or DeepSpeed runs for the Adam step of this benchmark, on the same arrays as ours."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

ADAMW: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
TORCH, DEEPSPEED = "torch AdamW(fused)", "DeepSpeedCPUAdam"
Make = Callable[[nn.Parameter], torch.optim.Optimizer]


def torch_fused(param: nn.Parameter) -> torch.optim.Optimizer:
    return torch.optim.AdamW([param], fused=True, **ADAMW)


def deepspeed_cpu(param: nn.Parameter) -> torch.optim.Optimizer:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return DeepSpeedCPUAdam([param], adamw_mode=True, **ADAMW)


def available() -> dict[str, Make]:
    """The peers that are installed; builds DeepSpeed's C++ where that was not done (minutes)."""
    peers: dict[str, Make] = {TORCH: torch_fused}
    if importlib.util.find_spec("deepspeed") is None:
        return peers
    # `make peers` builds it there too. ninja stands beside this Python, which may not be on the PATH.
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(Path(sys.prefix) / "extensions"))
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return {**peers, DEEPSPEED: deepspeed_cpu}


def fp32_step(make: Make, master: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, grad: Tensor) -> Callable[[], Any]:
    """The optimizer's step over fp32 arrays [n], which are used in place."""
    param = nn.Parameter(master)
    param.grad = grad
    optimizer = make(param)
    fused = isinstance(optimizer, torch.optim.AdamW)
    step = torch.tensor(9.0) if fused else 9  # as ours, which take the tenth
    optimizer.state[param].update(step=step, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq)
    return optimizer.step


def mixed_step(
    make: Make, master: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, grad: Tensor, grad16: Tensor, param16: Tensor
) -> Callable[[], None]:
    """The same around bf16 gradients and parameters: cast to fp32, step, cast to bf16; `grad` is room for the first."""
    step = fp32_step(make, master, exp_avg, exp_avg_sq, grad)

    def run() -> None:
        grad.copy_(grad16)
        step()
        param16.copy_(master)

    return run


if __name__ == "__main__":  # so that `make peers` builds all that is built on first use
    made = [make(nn.Parameter(torch.zeros(16))) for make in available().values()]
    print(", ".join(type(optimizer).__name__ for optimizer in made))
