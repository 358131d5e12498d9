"""Packing gradients into a flat buffer: one compiled pass beside torch's passes, by the size of a tensor, on a CPU.

    python benchmarks/packing.py

Microseconds for each tensor, medians of interleaved runs on one thread. Both have the bits of the reference, which is
checked first. The views that torch's passes need are made anew each time, as `Gradients` does.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from zero.kernels.bucket import pack, pack_reference

ROUNDS = 11
KIB = (1, 4, 16, 64, 256, 1024, 4096, 16384)
FP32, BF16 = torch.float32, torch.bfloat16
CASES = (
    ("fp32, set", FP32, FP32, 1.0, False),
    ("bf16 to fp32, set", BF16, FP32, 1.0, False),
    ("bf16 to fp32, times", BF16, FP32, 0.5, False),
    ("bf16 to fp32, add", BF16, FP32, 1.0, True),
)


def passes(tensors: Sequence[Tensor], flat: Tensor, offsets: Sequence[int], scale: float, add: bool) -> None:
    """By torch, as `Gradients` does where there is no compiled pass."""
    views = [flat.narrow(0, at, tensor.numel()) for tensor, at in zip(tensors, offsets, strict=True)]
    if not add:
        torch._foreach_copy_(views, tensors)
        if scale != 1.0:
            torch._foreach_mul_(views, scale)
        return
    if tensors[0].dtype != flat.dtype:
        wide = list(flat.new_empty(sum(map(Tensor.numel, tensors))).split([tensor.numel() for tensor in tensors]))
        torch._foreach_copy_(wide, tensors)
        tensors = wide
    torch._foreach_add_(views, tensors, alpha=scale)


def main() -> None:
    torch.set_num_threads(1)
    print("| what | size of a tensor | tensors | ours, us | torch, us | ratio |\n|---|---|---|---|---|---|")
    for label, source, target, scale, add in CASES:
        for kib in KIB:
            numel, count = kib * 1024 // source.itemsize, max(2, min(64, (32 << 10) // kib))
            tensors = [torch.randn(numel).to(source) for _ in range(count)]
            given = [at * numel for at in range(count)], scale, add
            flat, wanted = (torch.zeros(numel * count, dtype=target) for _ in range(2))
            if not pack(tensors, flat, *given):
                raise RuntimeError("there are no compiled kernels here; nothing was timed")
            pack_reference(tensors, wanted, *given)
            if not torch.equal(flat, wanted):
                raise RuntimeError(f"{label}, {kib} KiB: differs from the reference; nothing was timed")
            repeat, times = max(1, min(20, 1_000_000 // (numel * count))), {pack: [], passes: []}
            for _ in range(ROUNDS):
                for way, found in times.items():
                    begin = time.perf_counter()
                    for _ in range(repeat):
                        way(tensors, flat, *given)
                    found.append(1e6 * (time.perf_counter() - begin) / repeat / count)
            ours, theirs = map(statistics.median, times.values())
            print(
                f"| {label} | {kib:,} KiB | {count} | {ours:,.1f} | {theirs:,.1f} | {ours / theirs:.2f} |", flush=True
            )


if __name__ == "__main__":
    main()
