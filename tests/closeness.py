"""One yardstick for numbers whose sums have another order than plain torch's: our error and the one that is allowed.

The truth is fp64. How large plain torch's own error in the same precision is depends on how a CPU rounds: it may be
nothing by luck, and Adam makes much of a rounding where terms of a gradient cancel. So trainings run once more with
other roundings, and no error counts less than some units in the last place of the quantity.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

Values = Mapping[str, Any] | Iterable[Any]  # tensors, or (rows of) numbers
T = TypeVar("T")


def pairs(found: Values, exact: Values) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Both in fp64, side by side; of mappings the keys of `exact`."""
    if isinstance(exact, Mapping):
        found, exact = [found[name] for name in exact], exact.values()
    sides = ([torch.as_tensor(value, dtype=torch.float64, device="cpu") for value in side] for side in (found, exact))
    return [pair for pair in zip(*sides, strict=True) if pair[1].numel()]


def error(found: Values, exact: Values) -> float:
    """The largest difference of any element; NaN if there is one."""
    return torch.stack([(mine - right).abs().max() for mine, right in pairs(found, exact)]).max().item()


def ulps(count: float, values: Values, dtype: torch.dtype = torch.float32) -> float:
    """`count` units in the last place of `dtype` at the largest magnitude of `values`."""
    return count * torch.finfo(dtype).eps * max(value.abs().max().item() for value, _ in pairs(values, values))


def allowed(exact: Values, *plain: Values) -> float:
    """What our error may be: twice the largest of `plain`, or 8 ulps of fp32, whichever is larger."""
    return max([ulps(8, exact), *(2 * error(one, exact) for one in plain)])


def twice(train: Callable[[], T]) -> list[T]:
    """What a training in plain torch gives, as it is and with a rounding more in every gradient that is not 0.

    That rounding is as large as that of the gradient's largest element: sums of terms that cancel are rounded so. A
    factor for all of a gradient would not do, Adam divides by it again.
    """
    generator = torch.Generator().manual_seed(0)

    @torch.no_grad()
    def nudge(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for grad in (param.grad for group in optimizer.param_groups for param in group["params"]):
            if grad is not None and grad.numel():
                way = torch.randint(2, grad.shape, generator=generator).to(grad.device) * 2 - 1
                grad += way * (grad != 0) * ulps(1, [grad])

    found = [train()]
    hook = register_optimizer_step_pre_hook(nudge)
    try:
        return [*found, train()]
    finally:
        hook.remove()
