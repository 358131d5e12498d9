"""The optimizer step over one contiguous shard: gradient in, master, moments and parameter updated, in one pass.

With gradient g (times ``grad_scale``), master p and step t counted from 1, all in fp32::

    weight decay    decoupled (Adam decoupled, Lion):  p = p * (1 - lr * weight_decay)
                    L2 (all others):                   g = g + p * weight_decay

    Adam            m = m + (1 - beta1) * (g - m)
                    v = beta2 * v + (1 - beta2) * g * g
                    p = p - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
    Lion            p = p - lr * sign(beta1 * m + (1 - beta1) * g)
                    m = beta2 * m + (1 - beta2) * g
    SGD             b = momentum * b + (1 - dampening) * g          (b = g in the first step; without momentum always)
                    p = p - lr * b                                  (nesterov: g + momentum * b in place of b)
    Adagrad         s = s + g * g
                    p = p - lr / (1 + (t - 1) * lr_decay) * g / (sqrt(s) + eps)

and without bias correction both ``1 - beta^t`` are 1. Sources: zero/kernels/formulas.py. It is what ``torch.optim``
computes without amsgrad, centered, maximize and the like.

The master is either fp32, with or without a parameter copy in another dtype, or the remainder beside a bf16 parameter
(zero/kernels/remainder.py); both give the same parameters. Moments come in the formats of zero/kernels/moments.py.

The compiled kernels (csrc/step_math.h, csrc/format_math.h) and :func:`step_reference` round every operation alone and
in the same order, so they give the same bits, on every instruction set, thread count and cut of the shard.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from zero.kernels import cuda
from zero.kernels.checks import address_on, check_apart, check_flat, check_tensor, describe
from zero.kernels.formulas import Adagrad, Adam, Formula, Lion, Sgd
from zero.kernels.moments import BLOCK, FORMATS, Moment, blocks_of, random_bits
from zero.kernels.native import DTYPE_CODES, NO_TENSOR, load
from zero.kernels.remainder import join, round_bf16, split

# Elements that the reference treats at a time: its temporaries stay small beside the shard. A multiple of BLOCK.
REFERENCE_CHUNK = 1 << 22

_BYTES = (4, 2, 2)  # of an element, by dtype code
_BF16 = DTYPE_CODES[torch.bfloat16]
_STATE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.uint8: 2}
_STATE_BYTES = (4, 2, 1)


def check_counters(step: int, key: int, first: int) -> None:
    """Raise the ValueError of :func:`step` that is due for its counters, if one is."""
    if not 1 <= step < 1 << 63:
        raise ValueError(f"step: got {step}; wanted an integer counted from 1")
    if not 0 <= key < 1 << 63:
        raise ValueError(f"key: got {key}; wanted an integer, 0 or above")
    if first < 0 or first % BLOCK != 0:
        raise ValueError(f"first: got {first}; wanted a multiple of {BLOCK}, 0 or above")


def _check_moments(formula: Formula, moments: tuple[Moment, ...], master: Tensor, named: dict[str, Tensor]) -> None:
    """Check the moments, and add their tensors to `named`."""
    names, numel, device = formula.state_names, master.numel(), master.device
    if len(moments) != len(names):
        wanted = f"{len(names)} ({', '.join(names)})" if names else "none"
        raise ValueError(f"moments: got {len(moments)} for {formula}; wanted {wanted}")
    for name, moment in zip(names, moments, strict=True):
        if not isinstance(moment, Moment):
            raise ValueError(f"{name}: got {describe(moment)}; wanted a Moment")
        if moment.format != moments[0].format:
            raise ValueError(f"{name}: got {moment.format}, and {names[0]} is {moments[0].format}; wanted one format")
        dtypes = (torch.float64,) if master.dtype == torch.float64 else tuple(_STATE_CODES)
        check_flat(name, moment.values, numel, device, dtypes)
        named[name] = moment.values
        if moment.scales is not None:
            check_flat(f"scales of {name}", moment.scales, blocks_of(numel), device, (torch.float32,))
            named[f"scales of {name}"] = moment.scales


def check_arguments(
    formula: Formula, master: Tensor, moments: tuple[Moment, ...], grad: Tensor, param: Tensor | None
) -> None:
    """Raise the ValueError of :func:`step` that is due, if one is."""
    if not isinstance(formula, Formula):
        raise ValueError(f"formula: got {type(formula).__name__}; wanted one of zero.kernels.formulas")
    check_tensor("master", master, (torch.float32, torch.float64, torch.int16))
    if master.ndim != 1:
        raise ValueError(f"master: got {describe(master)}; wanted 1-D")
    numel, device = master.numel(), master.device
    dtypes = (*DTYPE_CODES, *((torch.float64,) if master.dtype == torch.float64 else ()))
    named = {"master": master, "grad": grad}
    check_flat("grad", grad, numel, device, dtypes)
    if master.dtype == torch.int16:
        if param is None:
            raise ValueError("param: got None beside a remainder (int16) as master; wanted the bfloat16 parameter")
        dtypes = (torch.bfloat16,)
    if param is not None:
        check_flat("param", param, numel, device, dtypes)
        named["param"] = param
    _check_moments(formula, moments, master, named)
    check_apart(named)


def _state_arguments(
    formula: Formula, moments: tuple[Moment, ...], shape: tuple[int, ...], device: torch.device
) -> tuple[list[int], int, list[tuple[int, int]]] | None:
    """(address of values, then of scales, for two states; format code; their spans in memory) as `kernel_arguments`."""
    if len(moments) != len(formula.state_names):
        return None
    addresses, spans, code, numel = [0, 0, 0, 0], [], 0, shape[0]
    for index, moment in enumerate(moments):
        if not isinstance(moment, Moment):
            return None
        values, scales = moment.values, moment.scales
        address, own = address_on(device, values, shape), _STATE_CODES.get(values.dtype)
        if not address or own is None or (index and own != code):
            return None
        code = own
        addresses[2 * index] = address
        spans.append((address, address + numel * _STATE_BYTES[own]))
        if own == 2:
            blocks = blocks_of(numel)
            address = address_on(device, scales, (blocks,))
            if not address or scales.dtype is not torch.float32:
                return None
            addresses[2 * index + 1] = address
            spans.append((address, address + 4 * blocks))
    return addresses, code, spans


def kernel_arguments(
    formula: Formula, master: Tensor, moments: tuple[Moment, ...], grad: Tensor, param: Tensor | None
) -> tuple[int, ...] | None:
    """The arguments of ``_cpu.step`` from master to numel; None where no compiled kernel applies (checked or not)."""
    if not (isinstance(master, Tensor) and master.ndim == 1 and isinstance(formula, Formula)):
        return None
    shape = master.shape
    device, kind, numel = master.device, master.dtype, shape[0]
    p, g = address_on(device, master, shape), address_on(device, grad, shape)
    if not (p and g):
        return None
    grad_code, out, out_code = DTYPE_CODES.get(grad.dtype), 0, NO_TENSOR
    if param is not None:
        out = address_on(device, param, shape)
        if not out:
            return None
        out_code = DTYPE_CODES.get(param.dtype)
    if grad_code is None or out_code is None:
        return None
    remainder = kind is torch.int16
    if not (out_code == _BF16 if remainder else kind is torch.float32):
        return None
    states = _state_arguments(formula, moments, shape, device)
    if states is None:
        return None
    addresses, state_code, spans = states
    spans.append((p, p + numel * (2 if remainder else 4)))
    spans.append((g, g + numel * _BYTES[grad_code]))
    if out:
        spans.append((out, out + numel * _BYTES[out_code]))
    spans.sort()
    end = 0
    for start, stop in spans:
        if start < end:
            return None
        end = stop
    masters = (0, p) if remainder else (p, 0)
    return *masters, out, out_code, g, grad_code, *addresses, state_code, numel


def step(
    formula: Formula,
    master: Tensor,
    moments: tuple[Moment, ...],
    grad: Tensor,
    param: Tensor | None,
    *,
    step: int,
    grad_scale: float,
    key: int = 0,
    first: int = 0,
    threads: int | None = None,
) -> None:
    """Take one optimizer step in place on a shard of n elements; the formulas are at the top of this file.

    Args:
        formula: which optimizer, with its hyperparameters.
        master: parameters, shape [n]. float32 (or float64, which runs as plain torch), or int16: the remainder beside
            ``param``. Updated.
        moments: the formula's states in the order of its ``state_names``, [n] each, all of one format. Updated.
            Beside a float64 master they are float64.
        grad: shape [n], float32, bfloat16 or float16. Read only, and so not scaled in place.
        param: shape [n], float32, bfloat16 or float16. Gets the new parameters rounded to its dtype, to nearest (ties
            to even, but in bfloat16 away from zero); None when ``master`` is the parameter. Beside a remainder it is
            bfloat16, and read as well.
        step: which step this is, counted from 1.
        grad_scale: the one factor on the gradient: unscaling times clipping; 1.0 for none.
        key: which unit this is, for the random bits that round moments in bf16 and 8bit; two units with one key would
            be rounded by the same bits.
        first: index of the first element in the unit, a multiple of 256: so a shard, and every piece of it, is rounded
            as in the whole unit.
        threads: how many threads share the work on a CPU; None for torch's number. No bit depends on it.

    The tensors are written through their addresses: autograd's version counters do not move.

    Raises:
        ValueError: for tensors that differ in size or device, overlap, are not 1-D and contiguous or of another dtype,
            or whose storage was released; and for counters out of range. Nothing was written then.
    """
    check_counters(step, key, first)
    arguments = kernel_arguments(formula, master, moments, grad, param)
    if arguments is not None and master.is_cpu:
        module = load()
        if module is not None:
            threads = threads or torch.get_num_threads()
            module.step(formula.native(), step, grad_scale, (*arguments, key, first), threads)
            return
    elif arguments is not None and (module := cuda.kernels(master.device)) is not None:
        cuda.launch(module.step, master.device, formula.native(), step, grad_scale, (*arguments, key, first))
        return
    if arguments is None:
        check_arguments(formula, master, moments, grad, param)
    _reference(formula, master, moments, grad, param, step, grad_scale, key, first)


def step_reference(
    formula: Formula,
    master: Tensor,
    moments: tuple[Moment, ...],
    grad: Tensor,
    param: Tensor | None,
    *,
    step: int,
    grad_scale: float,
    key: int = 0,
    first: int = 0,
) -> None:
    """:func:`step` as plain torch operations, on any device: the fallback, and the oracle of the tests.

    The same arguments, errors and, but for float64 masters, bits (up to the payload of a NaN).
    """
    check_counters(step, key, first)
    check_arguments(formula, master, moments, grad, param)
    _reference(formula, master, moments, grad, param, step, grad_scale, key, first)


@torch.no_grad()
def _reference(
    formula: Formula,
    master: Tensor,
    moments: tuple[Moment, ...],
    grad: Tensor,
    param: Tensor | None,
    step: int,
    grad_scale: float,
    key: int,
    first: int,
) -> None:
    numel, signs = master.numel(), formula.signed
    for begin in range(0, numel, REFERENCE_CHUNK):
        size = min(REFERENCE_CHUNK, numel - begin)
        low, out = master[begin : begin + size], None if param is None else param[begin : begin + size]
        p = join(out, low) if low.dtype == torch.int16 else low.clone()
        parts = [moment.narrow(begin, size) for moment in moments]
        states = [part.decode(signed) for part, signed in zip(parts, signs, strict=True)]
        p, states = _update(formula, p, grad[begin : begin + size].to(p.dtype) * grad_scale, states, step)
        halves: tuple[Tensor | None, ...] = (None, None)
        if parts and parts[0].format != FORMATS[0]:
            random = random_bits(size, key=key, step=step, first=first + begin, device=master.device)
            halves = (random & 0xFFFF, random >> 16)
        for part, state, signed, half in zip(parts, states, signs, halves, strict=False):
            part.write(state, signed, half)
        _write(p, low, out)


def _write(p: Tensor, master: Tensor, param: Tensor | None) -> None:
    if master.dtype == torch.int16 and param is not None:
        upper, lower = split(p)
        param.copy_(upper)
        master.copy_(lower)
        return
    master.copy_(p)
    if param is not None:
        param.copy_(round_bf16(p.float()) if param.dtype == torch.bfloat16 else p)


# The formulas. One operation per line, none that multiplies and adds at once (lerp_, addcmul_, alpha=): those round
# differently on each device. No division by a number either: CUDA multiplies by its inverse. Numbers are computed in
# double and rounded once, by torch, to the dtype of the tensor.


def _update(formula: Formula, p: Tensor, g: Tensor, states: list[Tensor], step: int) -> tuple[Tensor, list[Tensor]]:
    """New (master, states) from the old ones and the scaled gradient; p and g are overwritten, states are not."""
    decay = formula.weight_decay
    if isinstance(formula, Lion) or (isinstance(formula, Adam) and formula.decoupled):
        p *= 1.0 - formula.lr * decay
    elif decay != 0.0:
        g += p * decay
    if isinstance(formula, Adam):
        return _adam(formula, p, g, *states, step)
    if isinstance(formula, Lion):
        return _lion(formula, p, g, *states)
    if isinstance(formula, Adagrad):
        return _adagrad(formula, p, g, *states, step)
    return _sgd(formula, p, g, states, step)


def _sqrt(x: Tensor) -> Tensor:
    # torch's fp32 sqrt may be one ulp off on the CPU. Taken in fp64 and rounded, it is right: the root of a 24-bit
    # number stays at least 4 fp64 ulp away from the middle between two fp32 numbers.
    return x.double().sqrt().to(x.dtype)


def _adam(formula: Adam, p: Tensor, g: Tensor, m: Tensor, v: Tensor, step: int) -> tuple[Tensor, list[Tensor]]:
    corrected, weight = formula.bias_correction, 1.0 - formula.beta1
    correction1 = 1.0 - formula.beta1**step if corrected else 1.0
    correction2 = 1.0 - formula.beta2**step if corrected else 1.0
    # Interpolated from the near end, so that beta1 = 0 gives m = g exactly.
    near, weight = (g, weight - 1.0) if weight >= 0.5 else (m, weight)
    change = (g - m) * weight
    m = near + change
    square = g * (1.0 - formula.beta2)
    square *= g
    v = v * formula.beta2
    v += square
    denom = _sqrt(v)
    denom *= 1.0 / math.sqrt(correction2)
    denom += formula.eps
    update = m * (-formula.lr / correction1)
    update /= denom
    p += update
    return p, [m, v]


def _lion(formula: Lion, p: Tensor, g: Tensor, m: Tensor) -> tuple[Tensor, list[Tensor]]:
    direction = m * formula.beta1
    direction += g * (1.0 - formula.beta1)
    # torch.sign makes a zero of NaN, and would hide it.
    sign = torch.ones_like(direction).copysign_(direction)
    sign = torch.where((direction == 0.0) | direction.isnan(), direction, sign)
    p += sign * -formula.lr
    m = m * formula.beta2
    m += g * (1.0 - formula.beta2)
    return p, [m]


def _sgd(formula: Sgd, p: Tensor, g: Tensor, states: list[Tensor], step: int) -> tuple[Tensor, list[Tensor]]:
    direction = g
    if states:
        buffer = states[0] * formula.momentum
        buffer += g * (1.0 - formula.dampening if step > 1 else 1.0)
        states = [buffer]
        direction = g + buffer * formula.momentum if formula.nesterov else buffer
    p += direction * -formula.lr
    return p, states


def _adagrad(formula: Adagrad, p: Tensor, g: Tensor, s: Tensor, step: int) -> tuple[Tensor, list[Tensor]]:
    s = s + g * g
    denom = _sqrt(s)
    denom += formula.eps
    update = g * -(formula.lr / (1.0 + (step - 1) * formula.lr_decay))
    update /= denom
    p += update
    return p, [s]
