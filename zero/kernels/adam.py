"""The Adam step over one contiguous shard: gradient in, master and moments updated, parameter copy out, in one pass.

With gradient g (times ``grad_scale``), master p, moments m and v, step t counted from 1, all in fp32::

    decoupled (AdamW):  p = p * (1 - lr * weight_decay)        otherwise (L2):  g = g + weight_decay * p
    m = m + (1 - beta1) * (g - m)
    v = beta2 * v + (1 - beta2) * g * g
    p = p - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)

and without bias correction both ``1 - beta^t`` are 1. Sources: Kingma & Ba, "Adam: A Method for Stochastic
Optimization", ICLR 2015, algorithm 1; Loshchilov & Hutter, "Decoupled Weight Decay Regularization", ICLR 2019,
algorithm 2. It is what ``torch.optim.AdamW`` and ``torch.optim.Adam`` compute without amsgrad and maximize.

The compiled kernel (csrc/adam_math.h) and :func:`adam_step_reference` round every operation alone and in the same
order, so they give the same bits, on every instruction set, thread count and cut of the shard.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from zero.kernels.checks import check_flat, check_tensor, cpu_address, describe
from zero.kernels.native import DTYPE_CODES, NO_TENSOR, load

# Elements that the reference treats at a time: its temporaries stay small beside the shard.
REFERENCE_CHUNK = 1 << 22


class _Coefficients(NamedTuple):
    """What is the same for all elements, in double; in the order of the compiled kernel's arguments."""

    grad_scale: float
    weight_decay: float
    decay: float
    lerp_weight: float
    lerp_from_grad: bool
    beta2: float
    one_minus_beta2: float
    inv_sqrt_correction2: float
    eps: float
    neg_step_size: float
    l2: bool


def _coefficients(
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    decoupled: bool,
    bias_correction: bool,
    grad_scale: float,
) -> _Coefficients:
    if not (0.0 <= beta1 < 1.0 and 0.0 <= beta2 < 1.0):
        raise ValueError(f"beta1, beta2: got {beta1}, {beta2}; wanted both in [0, 1)")
    if not (eps >= 0.0 and weight_decay >= 0.0 and lr >= 0.0):
        raise ValueError(f"lr, eps, weight_decay: got {lr}, {eps}, {weight_decay}; wanted none below 0")
    if step < 1:
        raise ValueError(f"step: got {step}; wanted an integer counted from 1")
    weight = 1.0 - beta1
    from_grad = weight >= 0.5
    correction1, correction2 = (1.0 - beta1**step, 1.0 - beta2**step) if bias_correction else (1.0, 1.0)
    return _Coefficients(
        grad_scale,
        weight_decay,
        1.0 - lr * weight_decay if decoupled else 1.0,
        weight - 1.0 if from_grad else weight,
        from_grad,
        beta2,
        1.0 - beta2,
        1.0 / math.sqrt(correction2),
        eps,
        -lr / correction1,
        not decoupled and weight_decay != 0.0,
    )


def _check(master: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, grad: Tensor, param_out: Tensor | None) -> None:
    check_tensor("master", master)
    if master.ndim != 1 or master.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"master: got {describe(master)}; wanted 1-D, torch.float32 or torch.float64")
    numel, device = master.numel(), master.device
    for name, moment in (("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq)):
        check_flat(name, moment, numel, device)
        if moment.dtype != master.dtype:
            raise ValueError(f"{name}: got {describe(moment)}; wanted the dtype of master, {master.dtype}")
    check_flat("grad", grad, numel, device)
    if param_out is not None:
        check_flat("param_out", param_out, numel, device)


def _native_arguments(
    master: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, grad: Tensor, param_out: Tensor | None
) -> tuple[int, ...] | None:
    """Addresses, dtype codes and numel for the compiled kernel; None where it does not apply (checked or not)."""
    shape = master.shape if isinstance(master, Tensor) else ()
    p, m = cpu_address(master, shape), cpu_address(exp_avg, shape)
    v, g = cpu_address(exp_avg_sq, shape), cpu_address(grad, shape)
    if not (p and m and v and g and len(shape) == 1):
        return None
    if not (master.dtype is exp_avg.dtype is exp_avg_sq.dtype is torch.float32):
        return None
    grad_code = DTYPE_CODES.get(grad.dtype)
    out, out_code = 0, NO_TENSOR
    if param_out is not None:
        out = cpu_address(param_out, shape)
        if not out:
            return None
        out_code = DTYPE_CODES.get(param_out.dtype)
    if grad_code is None or out_code is None:
        return None
    return p, m, v, g, grad_code, out, out_code, shape[0]


def adam_step(
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    param_out: Tensor | None,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    decoupled: bool,
    bias_correction: bool,
    grad_scale: float,
) -> None:
    """Take one Adam step in place on a shard of n elements; the formula stands at the top of this file.

    Args:
        master: parameters, shape [n], float32 (or float64, which runs as plain torch). Updated.
        exp_avg: first moment, shape and dtype of ``master``. Updated.
        exp_avg_sq: second moment, shape and dtype of ``master``. Updated.
        grad: shape [n], float32, bfloat16 or float16. Read only, and so not scaled in place.
        param_out: shape [n], gets the new parameters rounded to its dtype; None when ``master`` is the parameter.
        lr: learning rate.
        beta1: decay of ``exp_avg``, in [0, 1).
        beta2: decay of ``exp_avg_sq``, in [0, 1).
        eps: added to the root of the second moment.
        weight_decay: 0 for none.
        step: which step this is, counted from 1.
        decoupled: True for AdamW, False for Adam with L2 (weight decay added to the gradient).
        bias_correction: whether to divide the moments by ``1 - beta^step``.
        grad_scale: the one factor on the gradient: unscaling times clipping; 1.0 for none.

    The tensors must not overlap. They are written through their addresses: autograd's version counters do not move.

    Raises:
        ValueError: for tensors that differ in size or device, or are not 1-D, contiguous and floating, or whose
            storage was released; and for hyperparameters out of range. Nothing was written then.
    """
    coef = _coefficients(lr, beta1, beta2, eps, weight_decay, step, decoupled, bias_correction, grad_scale)
    module = load()
    addresses = None if module is None else _native_arguments(master, exp_avg, exp_avg_sq, grad, param_out)
    if addresses is None:
        _check(master, exp_avg, exp_avg_sq, grad, param_out)
        _reference(master, exp_avg, exp_avg_sq, grad, param_out, coef)
    else:
        p, m, v, g, grad_code, out, out_code, numel = addresses
        hyper = (0, lr, beta1, beta2, eps, weight_decay, 0.0, 0.0, 0.0, int(decoupled) | 2 * int(bias_correction))
        module.step(*hyper, step, grad_scale, p, 0, out, out_code, g, grad_code, m, 0, v, 0, 0, numel, 0, 0, torch.get_num_threads())


def adam_step_reference(
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    param_out: Tensor | None,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    decoupled: bool,
    bias_correction: bool,
    grad_scale: float,
) -> None:
    """:func:`adam_step` as plain torch operations, on any device: the fallback, and the oracle of the tests.

    The same arguments, errors and, for float32 masters, bits (up to the payload of a NaN).
    """
    _check(master, exp_avg, exp_avg_sq, grad, param_out)
    coef = _coefficients(lr, beta1, beta2, eps, weight_decay, step, decoupled, bias_correction, grad_scale)
    _reference(master, exp_avg, exp_avg_sq, grad, param_out, coef)


@torch.no_grad()
def _reference(
    master: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, grad: Tensor, param_out: Tensor | None, coef: _Coefficients
) -> None:
    for begin in range(0, master.numel(), REFERENCE_CHUNK):
        part = slice(begin, begin + REFERENCE_CHUNK)
        _reference_chunk(master[part], exp_avg[part], exp_avg_sq[part], grad[part], coef)
        if param_out is not None:
            param_out[part].copy_(master[part])


def _reference_chunk(p: Tensor, m: Tensor, v: Tensor, grad: Tensor, coef: _Coefficients) -> None:
    # One operation per line, none that multiplies and adds at once (lerp_, addcmul_, alpha=): those round
    # differently on each device. No division by a number either: CUDA multiplies by its inverse.
    g = grad.to(p.dtype) * coef.grad_scale
    if coef.l2:
        g += p * coef.weight_decay
    else:
        p *= coef.decay
    change = (g - m) * coef.lerp_weight
    if coef.lerp_from_grad:
        torch.add(g, change, out=m)
    else:
        m += change
    square = g * coef.one_minus_beta2
    square *= g
    v *= coef.beta2
    v += square
    # torch's fp32 sqrt may be one ulp off on the CPU. Taken in fp64 and rounded, it is right: the root of a 24-bit
    # number stays at least 4 fp64 ulp away from the middle between two fp32 numbers.
    denom = v.double().sqrt().to(p.dtype)
    denom *= coef.inv_sqrt_correction2
    denom += coef.eps
    update = m * coef.neg_step_size
    update /= denom
    p += update
