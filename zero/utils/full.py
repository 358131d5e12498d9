"""Whole values of one parameter on every rank: collectives, with DeepSpeed's names and order of arguments.

Each returns or takes the parameter's own shape, on its device. What is returned is a copy. For a frozen
parameter, or one of no engine, a getter returns None and a setter raises ValueError. All ranks must call with the
same parameters in the same order, between forward and backward or between steps. Setters take rank 0's value.
A wrong argument on one rank raises on all, before anything is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from zero.core.values import (
    agree_on,
    assemble,
    check_idle,
    cut_out,
    exact_piece,
    gradient,
    own_part,
    reduced_piece,
    same_everywhere,
    with_parts,
    write_exact,
)
from zero.utils.trained import require_trained, trained_param


@torch.no_grad()
def safe_get_full_fp32_param(param: torch.Tensor) -> torch.Tensor | None:
    """The exact value of a trained parameter, fp32: the master where it is kept in 16 bit."""
    trained, what = trained_param(param), "safe_get_full_fp32_param"
    if trained is None:
        return None
    owner = trained.owner
    agree_on(owner, what, check_idle(owner, what))
    return with_parts(owner, assemble(owner, exact_piece(owner))).view(trained.shape)


@torch.no_grad()
def safe_set_full_fp32_param(param: torch.Tensor, value: torch.Tensor) -> None:
    """Replace the exact value by `value`, any floating dtype; the 16-bit parameter follows at once."""
    what = "safe_set_full_fp32_param"
    trained = require_trained(param, what)
    owner = trained.owner
    agree_on(owner, what, trained.value_error(what, value, trained.shape) or check_idle(owner, what))
    whole = own_part(owner, same_everywhere(owner, value.to(torch.float32)))
    write_exact(owner, cut_out(owner, whole), whole)


@torch.no_grad()
def safe_get_full_optimizer_state(param: torch.Tensor, optim_state_key: str) -> torch.Tensor | int | float | None:
    """State `optim_state_key` under torch's name (exp_avg, exp_avg_sq, momentum_buffer, sum, ...), fp32.

    Before the first step it is what that step begins with. "step" is an int: how many steps the parameter's unit
    has seen; other single numbers (NAdam's mu_product) are floats. They are those of all parameters of the unit.
    """
    trained, what = trained_param(param), "safe_get_full_optimizer_state"
    if trained is None:
        return None
    owner = trained.owner
    problem = check_idle(owner, what) or trained.key_error(what, optim_state_key)
    agree_on(owner, f"{what} {optim_state_key}", problem)
    state = trained.read(optim_state_key)
    if not isinstance(state, torch.Tensor):
        return state
    return with_parts(owner, assemble(owner, state)).view(trained.shape)


@torch.no_grad()
def safe_set_full_optimizer_state(param: torch.Tensor, value: torch.Tensor | float, optim_state_key: str) -> None:
    """Replace a state; in bf16 or 8-bit it is rounded to nearest. "step" sets that of the parameter's whole unit."""
    what = "safe_set_full_optimizer_state"
    trained = require_trained(param, what)
    owner = trained.owner
    problem = check_idle(owner, what) or trained.state_error(what, optim_state_key, value, trained.shape)
    agree_on(owner, f"{what} {optim_state_key}", problem)
    if trained.is_number(optim_state_key):
        trained.write(optim_state_key, same_everywhere(owner, torch.as_tensor(value, dtype=torch.float64)).item())
    else:
        trained.write(optim_state_key, cut_out(owner, own_part(owner, same_everywhere(owner, value.to(torch.float32)))))


@torch.no_grad()
def safe_get_full_grad(param: torch.Tensor) -> torch.Tensor | None:
    """The gradient as the next step would take it, fp32, before clipping: averaged over ranks and micro-batches.

    It may be read from the first `backward()` of a step to `step()`; None outside of that. Before the accumulation
    boundary it is the sum of what there is, divided as at the boundary. A loss scale is taken out. Zeros where the
    parameter got no gradient but others did.
    """
    trained = trained_param(param)
    if trained is None:
        return None
    total = gradient(trained.owner, "safe_get_full_grad")
    if total is None:
        return None
    total.mul_(trained.optimizer.factor_of(trained.owner.unit, together=True))
    return with_parts(trained.owner, total).view(trained.shape)


@torch.no_grad()
def safe_set_full_grad(param: torch.Tensor, value: torch.Tensor) -> None:
    """Replace the gradient, in the units of `safe_get_full_grad`; later micro-batches add to it.

    Raises RuntimeError where there is none to replace: before a backward, after the step.
    """
    what = "safe_set_full_grad"
    trained = require_trained(param, what)
    storage = reduced_piece(trained.owner, what, trained.value_error(what, value, trained.shape))
    whole = own_part(trained.owner, same_everywhere(trained.owner, value.to(torch.float32)))
    storage.copy_(cut_out(trained.owner, whole) / trained.optimizer.factor_of(trained.owner.unit, together=True))


def safe_update_full_grad_vectorized(
    param_list: Iterable[torch.nn.Parameter], update_func: Callable[[torch.Tensor, torch.nn.Parameter], torch.Tensor]
) -> None:
    """Replace each parameter's gradient by `update_func(gradient, parameter)`; those without one are passed over.

    The function gets what `safe_get_full_grad` returns, one parameter at a time, so one whole gradient is in memory.
    """
    for param in param_list:
        grad = safe_get_full_grad(param)
        if grad is not None:
            safe_set_full_grad(param, update_func(grad, param))
