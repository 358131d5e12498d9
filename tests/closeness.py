"""One yardstick for numbers whose sums have another order than plain torch's: our error and the one that is allowed.

The truth is fp64. Plain torch's own error in the same precision may be small, or nothing, by luck on one CPU, and what
it is depends on how that CPU rounds. So it counts no less than some units in the last place of the quantity.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

Values = Mapping[str, Any] | Iterable[Any]  # tensors, or (rows of) numbers


def pairs(found: Values, exact: Values) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Both in fp64, side by side; of mappings the keys of `exact`."""
    if isinstance(exact, Mapping):
        found, exact = [found[name] for name in exact], exact.values()
    sides = ([torch.as_tensor(value, dtype=torch.float64) for value in side] for side in (found, exact))
    return [pair for pair in zip(*sides, strict=True) if pair[1].numel()]


def error(found: Values, exact: Values) -> float:
    """The largest difference of any element; NaN if there is one."""
    return torch.stack([(mine - right).abs().max() for mine, right in pairs(found, exact)]).max().item()


def ulps(count: float, values: Values) -> float:
    """`count` units in the last place of fp32 at the largest magnitude of `values`."""
    return count * torch.finfo(torch.float32).eps * max(value.abs().max().item() for value, _ in pairs(values, values))


def allowed(plain: Values, exact: Values, count: float = 8) -> float:
    """What our error may be: twice that of `plain`, or `count` ulps of fp32, whichever is larger."""
    return max(2 * error(plain, exact), ulps(count, exact))
