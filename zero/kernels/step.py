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

The compiled kernels (csrc/step_math.h, csrc/format_math.h) and the plain torch operations here round every operation
alone and in the same order, so they give the same bits, on every instruction set, thread count and cut of the shard.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from zero.kernels import cuda
from zero.kernels.checks import FLOATING, address_of, check_apart, describe
from zero.kernels.formulas import Adagrad, Adam, Formula, Lion, Sgd
from zero.kernels.marks import mark, nbytes
from zero.kernels.moments import BLOCK, FORMATS, Moment, blocks_of, random_bits
from zero.kernels.native import DTYPE_CODES, NO_TENSOR, load
from zero.kernels.remainder import join, round_bf16, split

# Elements that the reference treats at a time: its temporaries stay small beside the shard. A multiple of BLOCK.
REFERENCE_CHUNK = 1 << 22

_MASTERS = (torch.float32, torch.float64, torch.int16)
_STATE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.uint8: 2}
_STATES, _SCALES, _NARROW = tuple(_STATE_CODES), (torch.float32,), tuple(DTYPE_CODES)


def _state_addresses(
    formula: Formula, moments: tuple[Moment, ...], master: Tensor, spans: list[tuple[int, int, str]]
) -> list[int]:
    """Address of values, then of scales, for two states, 0 for none; adds their spans of memory to `spans`."""
    names, shape, device = formula.state_names, master.shape, master.device
    dtypes = (torch.float64,) if master.dtype is torch.float64 else _STATES
    if len(moments) != len(names):
        wanted = f"{len(names)} ({', '.join(names)})" if names else "none"
        raise ValueError(f"moments: got {len(moments)} for {formula}; wanted {wanted}")
    addresses = [0, 0, 0, 0]
    for index, (name, moment) in enumerate(zip(names, moments, strict=True)):
        if not isinstance(moment, Moment):
            raise ValueError(f"{name}: got {describe(moment)}; wanted a Moment")
        values, scales = moment.values, moment.scales
        if index and values.dtype is not moments[0].values.dtype:
            raise ValueError(f"{name}: got {moment.format}, and {names[0]} is {moments[0].format}; wanted one format")
        addresses[2 * index] = address = address_of(name, values, dtypes, shape, device)
        spans.append((address, address + values.nbytes, name))
        if values.dtype is torch.uint8:
            name, blocks = f"scales of {name}", (blocks_of(shape[0]),)
            addresses[2 * index + 1] = address = address_of(name, scales, _SCALES, blocks, device)
            spans.append((address, address + scales.nbytes, name))
    return addresses


def kernel_arguments(
    formula: Formula,
    master: Tensor,
    moments: tuple[Moment, ...],
    grad: Tensor,
    param: Tensor | None,
    key: int,
    first: int,
    marks: Tensor | None,
) -> tuple | None:
    """The shard as ``_cpu.step`` takes it, with the address of `marks` if given; None if no kernel applies.

    Raises the ValueErrors of :func:`step`.
    """
    if not isinstance(formula, Formula):
        raise ValueError(f"formula: got {type(formula).__name__}; wanted one of zero.kernels.formulas")
    p = address_of("master", master, _MASTERS)
    if master.ndim != 1:
        raise ValueError(f"master: got {describe(master)}; wanted 1-D")
    shape, device, remainder = master.shape, master.device, master.dtype is torch.int16
    dtypes = FLOATING if master.dtype is torch.float64 else _NARROW
    g, out, out_code = address_of("grad", grad, dtypes, shape, device), 0, NO_TENSOR
    spans = [(p, p + master.nbytes, "master"), (g, g + grad.nbytes, "grad")]
    if param is not None:
        out = address_of("param", param, (torch.bfloat16,) if remainder else dtypes, shape, device)
        out_code = DTYPE_CODES.get(param.dtype, NO_TENSOR)
        spans.append((out, out + param.nbytes, "param"))
    elif remainder:
        raise ValueError("param: got None beside a remainder (int16) as master; wanted the bfloat16 parameter")
    addresses = _state_addresses(formula, moments, master, spans)
    seen = 0 if marks is None else address_of("marks", marks, (torch.uint8,), (nbytes(shape[0]),), device)
    spans += [] if marks is None else [(seen, seen + marks.nbytes, "marks")]
    check_apart(spans)
    if master.dtype is torch.float64 or shape[0] == 0:
        return None
    masters = (0, p) if remainder else (p, 0)
    state_code = _STATE_CODES[moments[0].values.dtype] if moments else 0
    shard = (*masters, out, out_code, g, DTYPE_CODES[grad.dtype], *addresses, state_code, shape[0], key, first)
    return shard if marks is None else (shard, seen)


def step(
    formula: Formula,
    master: Tensor,
    moments: tuple[Moment, ...],
    grad: Tensor,
    param: Tensor | None,
    *,
    step: int,
    grad_scale: float | Tensor,
    key: int = 0,
    first: int = 0,
    threads: int | None = None,
    marks: Tensor | None = None,
    compiled: bool = True,
) -> None:
    """Take one optimizer step in place on a shard of n elements; the formulas are at the top of this file.

    master: [n], float32 (or float64, which runs as plain torch), or int16: the remainder beside `param`. Updated.
    moments: the formula's states in the order of its `state_names`, [n] each, all of one format; float64 beside a
        float64 master. Updated.
    grad: [n], float32, bfloat16 or float16. Read only, so not scaled in place.
    param: of the same dtypes. Gets the new parameters rounded to nearest (ties to even, but in bfloat16 away from
        zero); None when `master` is the parameter. Beside a remainder it is bfloat16, and read as well.
    step: which step this is, counted from 1.
    grad_scale: the one factor on the gradient: unscaling times clipping. Or one float64 number on the master's device,
        NaN to change nothing: kernels read it there, so that the host need not wait for it.
    key: which unit this is, for the random bits that round moments in bf16 and 8bit: others for each unit.
    first: index of the first element in the unit, a multiple of 256: so every piece of it is rounded as in the whole.
    threads: of a CPU; None for torch's number. No bit depends on it.
    marks: uint8 [n / 8, rounded up]; the bit of each element (zero/kernels/marks.py) of `param`, or of `master` where
        that is None, that changes in any bit is set, others stay.
    compiled: False for plain torch operations, on any device: the fallback, and the oracle of the tests. They give the
        same bits, but for float64 masters (up to the payload of a NaN).

    With kernels the tensors are written through their addresses: autograd's version counters do not move. Raises
    ValueError, before anything is written, for tensors that differ in size or device, overlap, are not 1-D and
    contiguous, have another dtype, or have a released storage; and for counters out of range.
    """
    if not 1 <= step < 1 << 63:
        raise ValueError(f"step: got {step}; wanted an integer counted from 1")
    if not 0 <= key < 1 << 63:
        raise ValueError(f"key: got {key}; wanted an integer, 0 or above")
    if first < 0 or first % BLOCK != 0:
        raise ValueError(f"first: got {first}; wanted a multiple of {BLOCK}, 0 or above")
    shard, there = kernel_arguments(formula, master, moments, grad, param, key, first, marks), 0
    if isinstance(grad_scale, Tensor):
        there = address_of("grad_scale", grad_scale, (torch.float64,), device=master.device)
        if grad_scale.numel() != 1:
            raise ValueError(f"grad_scale: got {describe(grad_scale)}; wanted one number")
    if compiled and shard is not None and (module := cuda.kernels(master.device)) is not None:
        numbers = formula.native(), step, 1.0 if there else grad_scale, there
        cuda.launch(module.step, master.device, *numbers, shard)
        return
    if there and math.isnan(grad_scale := float(grad_scale)):
        return
    if compiled and shard is not None and master.is_cpu and (module := load()) is not None:
        threads = threads or torch.get_num_threads()
        module.step(formula.native(), step, grad_scale, shard, threads)
        return
    _reference(formula, master, moments, grad, param, step, grad_scale, key, first, marks)


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
    marks: Tensor | None,
) -> None:
    seen = master if param is None else param
    before = None if marks is None else seen.clone()
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
        if low.dtype == torch.int16:
            for part, values in zip((out, low), split(p), strict=True):
                part.copy_(values)
            continue
        low.copy_(p)
        if out is not None:
            out.copy_(round_bf16(p.float()) if out.dtype == torch.bfloat16 else p)
    if marks is not None:
        mark(marks, before, seen)


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
