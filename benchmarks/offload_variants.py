"""Ways to train one GPT with state off the device: ours by placement, FSDP2's and DeepSpeed's offload."""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import AdamW
from torch.utils.checkpoint import checkpoint
from variants import ADAMW, Setup, gpt

import zero
from zero.optim.norm import RankReport, global_norm


@dataclass(frozen=True)
class Sizes(Setup):
    """`Setup` with what only this benchmark varies."""

    device: str = "cpu"
    moments: str = "fp32"
    folder: str | None = None
    recompute: bool = False

    def made(self, device: str) -> gpt.GPT:
        """The model on `device`, where its weights are drawn, too: a billion of them take long on a CPU."""
        with torch.device(device):
            model = self.model()
        for block in model.blocks if self.recompute else ():
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
        return model

    def batch_of(self, step: int, rank: int) -> tuple[Tensor, Tensor]:
        x, y = self.data(step, rank)
        return x.to(self.device), y.to(self.device)


@dataclass
class Update:
    """When the host's updates ran, in seconds of `time.perf_counter`."""

    begun: float = 0.0
    busy: list[float] = field(default_factory=list)

    def seen(self, what: str, unit: str) -> None:
        now = time.perf_counter()
        if what == "update":
            self.begun = now
        else:
            self.busy.append(now - self.begun)


class Driven:
    """What an engine drives: ours and DeepSpeed's have the same three calls."""

    engine: Any

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.engine(x, y)

    def backward(self, loss: Tensor) -> None:
        self.engine.backward(loss)

    def step(self) -> None:
        self.engine.step()


class Ours(Driven):
    """The engine from a JSON; `section` is its `zero_optimization`."""

    def __init__(self, sizes: Sizes, section: dict[str, Any], moments: str | None = None) -> None:
        optimizer = {**ADAMW, "betas": list(ADAMW["betas"]), "zero": {"moments": moments or sizes.moments}}
        config = {
            "train_micro_batch_size_per_gpu": sizes.batch,
            "steps_per_print": 10**9,
            "optimizer": {"type": "AdamW", "params": optimizer},
            "gradient_clipping": 1.0,
            "bf16": {"enabled": sizes.bf16},
            "zero_optimization": section,
        }
        self.engine, *_ = zero.initialize(model=sizes.made(sizes.device), config=config)
        self.update = Update()
        updates = self.engine.optimizer._updater
        if updates is not None:
            updates.on_update = self.update.seen

    def settle(self) -> None:
        """Wait for all that runs beside the loop."""
        self.engine.optimizer.settle()

    def norm(self) -> None:
        """Compute the global norm once, outside of a step."""
        sharded = self.engine._sharded
        global_norm(sharded.trained, sharded.world, RankReport(), 1.0)

    def close(self) -> None:
        self.settle()
        self.engine.destroy()


class Fsdp2:
    """`fully_shard` by block with `CPUOffloadPolicy`; the optimizer is torch's fused AdamW on the CPU.

    Without clipping: its gradients lie in host memory, where NCCL cannot add up their norm.
    """

    def __init__(self, sizes: Sizes) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        mesh = init_device_mesh("cuda", (dist.get_world_size(),))
        options: dict[str, Any] = {"mesh": mesh, "offload_policy": CPUOffloadPolicy(pin_memory=True)}
        options |= {"mp_policy": policy} if sizes.bf16 else {}
        self.module = sizes.made("cpu")
        for block in self.module.blocks:
            fully_shard(block, **options)
        fully_shard(self.module, **options)
        for name, buffer in self.module.named_buffers():
            setattr(self.module, name, buffer.to(sizes.device))
        self.optimizer = AdamW(self.module.parameters(), fused=True, **ADAMW)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.module(x, y)

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def settle(self) -> None: ...

    def close(self) -> None: ...


class DeepSpeed(Driven):
    """DeepSpeed's engine with the optimizer on the CPU; stage 3 keeps its parameters on the device, its fastest way."""

    def __init__(self, sizes: Sizes, stage: int) -> None:
        import deepspeed

        section = {"stage": stage, "offload_optimizer": {"device": "cpu", "pin_memory": True}}
        config = {
            "train_micro_batch_size_per_gpu": sizes.batch,
            "steps_per_print": 10**9,
            "optimizer": {"type": "AdamW", "params": {**ADAMW, "betas": list(ADAMW["betas"])}},
            "gradient_clipping": 1.0,
            "bf16": {"enabled": sizes.bf16},
            "zero_optimization": section,
        }
        self.engine, *_ = deepspeed.initialize(model=sizes.made(sizes.device), config=config)

    def settle(self) -> None: ...

    def close(self) -> None:
        self.engine.destroy()


def _section(
    stage: int, optimizer: str = "none", params: str = "none", ratio: Any = 1.0, update: str = "host"
) -> Callable[[Sizes], Any]:
    def section(sizes: Sizes) -> dict[str, Any]:
        folder = {"nvme_path": sizes.folder}
        more = {"ratio": ratio, "zero": {"update": update}, **(folder if optimizer == "nvme" else {})}
        return {
            "stage": stage,
            "offload_optimizer": {"device": optimizer, **more},
            "offload_param": {"device": params, **(folder if params == "nvme" else {})},
        }

    return section


OURS: dict[str, tuple[str, Callable[[Sizes], Any], str | None]] = {
    "none2": ("zero stage 2, no offload", _section(2), None),
    "cpu2": ("zero stage 2, optimizer cpu", _section(2, "cpu"), None),
    "cpu2-8bit": ("zero stage 2, optimizer cpu, 8bit moments", _section(2, "cpu"), "8bit"),
    "gpu2": ("zero stage 2, optimizer cpu, updated on the GPU", _section(2, "cpu", update="gpu"), None),
    "gpu2-8bit": ("the same, 8bit moments", _section(2, "cpu", update="gpu"), "8bit"),
    "half2": ("zero stage 2, optimizer cpu, ratio 0.5", _section(2, "cpu", ratio=0.5), None),
    "auto2": ("zero stage 2, optimizer cpu, ratio auto", _section(2, "cpu", ratio="auto"), None),
    "nvme2": ("zero stage 2, optimizer nvme", _section(2, "nvme"), None),
    "none3": ("zero stage 3, no offload", _section(3), None),
    "cpu3": ("zero stage 3, optimizer and params cpu", _section(3, "cpu", "cpu"), None),
    "nvme3": ("zero stage 3, optimizer and params nvme", _section(3, "nvme", "nvme"), None),
}
PEERS = {
    "fsdp2": "FSDP2 + CPUOffloadPolicy",
    "ds2": "DeepSpeed stage 2 + CPU optimizer",
    "ds3": "DeepSpeed stage 3 + CPU optimizer",
}
TITLES = {**{name: title for name, (title, _, _) in OURS.items()}, **PEERS}


def absent(name: str, sizes: Sizes) -> str | None:
    """Why this variant cannot run here, or None."""
    if name.startswith("nvme") and sizes.folder is None:
        return "no --nvme folder given"
    if (name == "fsdp2" or name.startswith("gpu")) and sizes.device == "cpu":
        return "not on a CPU"
    if name.startswith("ds") and importlib.util.find_spec("deepspeed") is None:
        return "not installed"
    return None


def make(name: str, sizes: Sizes) -> Any:
    """The variant of this name; collective."""
    if name in OURS:
        _, section, moments = OURS[name]
        return Ours(sizes, section(sizes), moments)
    if name == "fsdp2":
        return Fsdp2(sizes)
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if sizes.device == "cuda" else "cpu")
    # ninja, with which it builds its C++, stands beside this Python, which may not be on the PATH.
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return DeepSpeed(sizes, int(name.removeprefix("ds")))
