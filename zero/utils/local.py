"""This rank's piece of one parameter, without the others: flat fp32 [n], n may be 0.

The pieces of all ranks of one shard axis, in order of ranks, are the whole parameter; at stage 0 each rank's piece
is all of it. Getters are not collective and return copies; None for a frozen parameter or one of no engine. Setters
raise ValueError there, and for a value of another size. Where every rank has the whole (stage 0), all must set the
same.
"""

from __future__ import annotations

import torch

from zero.core import comm
from zero.core.owner import Owner
from zero.core.values import agree_on, check_idle, exact_piece, piece, write_exact
from zero.utils.trained import require_trained, trained_param


@torch.no_grad()
def safe_get_local_fp32_param(param: torch.Tensor) -> torch.Tensor | None:
    """This rank's piece of the exact value."""
    trained = trained_param(param)
    if trained is None:
        return None
    _raise(check_idle(trained.owner, "safe_get_local_fp32_param"))
    return exact_piece(trained.owner)


@torch.no_grad()
def safe_set_local_fp32_param(param: torch.Tensor, value: torch.Tensor) -> None:
    """Replace this rank's piece of the exact value by `value`; the 16-bit parameter follows at once.

    A collective, unlike the other local ones: the other ranks may hold the parameter whole, and must not see the
    old values. A rank whose piece is empty gives an empty tensor.
    """
    what = "safe_set_local_fp32_param"
    trained = require_trained(param, what)
    owner = trained.owner
    problem = trained.value_error(what, value, (piece(owner).numel,))
    agree_on(owner, what, problem or check_idle(owner, what))
    own = value.to(device=owner.unit.buffer.full.device, dtype=torch.float32, copy=True)
    if own.numel():
        comm.broadcast(own, 0, owner.unit.mesh.replica)
    write_exact(owner, own)


@torch.no_grad()
def safe_get_local_optimizer_state(param: torch.Tensor, optim_state_key: str) -> torch.Tensor | int | float | None:
    """This rank's piece of a state; keys and numbers as in `safe_get_full_optimizer_state`."""
    trained, what = trained_param(param), "safe_get_local_optimizer_state"
    if trained is None:
        return None
    _raise(check_idle(trained.owner, what) or trained.key_error(what, optim_state_key))
    return trained.read(optim_state_key)


@torch.no_grad()
def safe_set_local_optimizer_state(param: torch.Tensor, value: torch.Tensor | float, optim_state_key: str) -> None:
    """Replace this rank's piece of a state. A number ("step") must be set to the same on all ranks."""
    what = "safe_set_local_optimizer_state"
    trained = require_trained(param, what)
    shape = (piece(trained.owner).numel,)
    _raise(check_idle(trained.owner, what) or trained.state_error(what, optim_state_key, value, shape))
    if not trained.is_number(optim_state_key):
        value = value.to(trained.owner.unit.buffer.full.device, torch.float32)
    trained.write(optim_state_key, value)


@torch.no_grad()
def safe_get_local_grad(param: torch.Tensor) -> torch.Tensor | None:
    """This rank's piece of the averaged gradient, as in `safe_get_full_grad`; None before a backward.

    Raises RuntimeError while gradients are still those of this rank alone: stages 0 and 1 before the boundary.
    """
    trained = trained_param(param)
    if trained is None:
        return None
    reduced = _reduced(trained.owner, "safe_get_local_grad")
    return None if reduced is None else reduced * trained.optimizer.factor_of(trained.owner.unit)


@torch.no_grad()
def safe_set_local_grad(param: torch.Tensor, value: torch.Tensor) -> None:
    """Replace this rank's piece of the averaged gradient.

    Raises RuntimeError where there is none, or none that is reduced yet.
    """
    what = "safe_set_local_grad"
    trained = require_trained(param, what)
    owner = trained.owner
    _raise(trained.value_error(what, value, (piece(owner).numel,)))
    reduced = _reduced(owner, what)
    if reduced is None:
        raise RuntimeError(f"{what}: parameter '{owner.name}' has no gradient; set it between backward() and step()")
    reduced.copy_(value.to(reduced.device, torch.float32) / trained.optimizer.factor_of(trained.owner.unit))


def _raise(problem: Exception | None) -> None:
    if problem is not None:
        raise problem


def _reduced(owner: Owner, what: str) -> torch.Tensor | None:
    """This rank's piece of the sum, the storage itself."""
    _raise(check_idle(owner, what))
    grads = owner.unit.gradients
    if grads.flat is not None:
        raise RuntimeError(
            f"{what}: the gradient of parameter '{owner.name}' is not reduced before the accumulation boundary "
            "on this stage; use safe_get_full_grad or safe_set_full_grad, which are collectives"
        )
    if grads.shard is None:
        return None
    part = piece(owner)
    return grads.shard.narrow(0, part.at, part.numel)
