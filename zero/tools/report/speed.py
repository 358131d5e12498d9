"""The speed of the Adam step, compared with the memory bandwidth measured in the same two seconds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import psutil
import torch

from zero.kernels.formulas import Adam
from zero.kernels.moments import Moment
from zero.kernels.step import step

SECONDS = 2.0
ROUNDS = 3  # at least, however long they take
NUMEL = 1 << 25  # arrays of 128 MiB in fp32: more than a cache holds
# Per parameter. Update: m += x. Mixed: gradient bf16, parameter bf16 and its remainder, moments fp32 (the last four
# read and written).
COPY, UPDATE, FP32, MIXED = 8, 12, 28, 26
_HELD = 22  # bytes per parameter of all arrays


def measure(seconds: float = SECONDS, numel: int = NUMEL) -> dict[str, float]:
    """Take turns for about `seconds` with arrays of `numel` elements (fewer where memory is short).

    GB/s (1e9 bytes) of what was read and written, medians over rounds in which all took turns: "copy" and "update" are
    torch's ``a.copy_(b)`` and ``a.add_(b)`` in fp32, "mixed" and "fp32" the steps. Their shares, in percent, are of the
    faster of those two.
    """
    numel = min(numel, int(psutil.virtual_memory().available // (4 * _HELD)))
    turns = _turns(numel)
    times: dict[str, list[float]] = {name: [] for name in turns}
    for run in turns.values():
        run()  # the first touch of the pages, and of the threads
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times["mixed"]) < ROUNDS:
        for name, run in turns.items():
            begin = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - begin)

    def rate(name: str, nbytes: int) -> float:
        return numel * nbytes / statistics.median(times[name]) / 1e9

    copy, update = rate("copy", COPY), rate("update", UPDATE)
    mixed, fp32 = rate("mixed", MIXED), rate("fp32", FP32)
    share = 100 / max(copy, update)
    found = {"numel": numel, "threads": torch.get_num_threads(), "rounds": len(times["mixed"])}
    found |= {"copy": copy, "update": update, "mixed": mixed, "mixed_share": mixed * share}
    return found | {"fp32": fp32, "fp32_share": fp32 * share}


def _turns(numel: int) -> dict[str, Callable[[], None]]:
    """What is timed. The arrays are shared: what one leaves in them is as good to the next as anything."""
    # Not zeros: pages of zeros that were never written are one page of memory, and reading them is free.
    master, first, second, grad = (torch.full((numel,), value) for value in (0.5, 1e-3, 1e-6, 1e-3))
    param, grad16 = (torch.full((numel,), value, dtype=torch.bfloat16) for value in (0.5, 1e-3))
    remainder = torch.full((numel,), 1, dtype=torch.int16)
    moments = (Moment(first), Moment(second))
    formula = Adam(1e-3, 0.9, 0.999, 1e-8, 0.01)
    return {
        "copy": lambda: first.copy_(grad),
        "update": lambda: second.add_(grad, alpha=1e-3),
        "mixed": lambda: step(formula, remainder, moments, grad16, param, step=100, grad_scale=1.0),
        "fp32": lambda: step(formula, master, moments, grad, None, step=100, grad_scale=1.0),
    }
