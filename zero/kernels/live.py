"""The scalars of an optimizer step in device memory: lr, gradient factor, step, found-inf.

A step that asks the host for one of these waits for the device, or bakes it into a CUDA graph. Here the clip factor and
the answer to "is every gradient finite" stay where the norm was computed, the device counts its own steps, and only the
learning rate comes from the host, written ahead of the step on the same stream.

One :class:`Live` serves one parameter group. A step of it is::

    sum_squares_into(gradient, total)             for each shard, accumulating; then the all-reduce of `total`
    live.clip(total, mean, limit)                 gradient factor and found-inf
    live.prepare(formula)                         counts the step, computes the formula's coefficients
    live.step(formula, master, moments, ...)      for each shard: one launch, which does nothing where found_inf is set

On the CPU, and on a device without the compiled kernels, the same calls read the numbers back and run
``zero.kernels.step.step``.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import torch
from torch import Tensor

from zero.kernels import cuda
from zero.kernels.checks import address_of, describe
from zero.kernels.formulas import Formula
from zero.kernels.moments import Moment
from zero.kernels.step import check_counters, kernel_arguments, step

# fp64 words, as in csrc/cuda_kernels.cuh: enum Live, then Prepared.
_LR, _GRAD_SCALE, _STEP, _FOUND_INF, _NORM = range(5)
_LIVE_WORDS, _PREPARED_WORDS = 8, 16


class Numbers(NamedTuple):
    """The numbers of a :class:`Live`, read back to the host."""

    lr: float
    grad_scale: float  # unscale times clip, of the step to come or just taken
    step: int  # steps taken
    found_inf: bool
    norm: float  # of the mean gradient, before clipping


class _HostStep(NamedTuple):
    """The numbers of a step that `prepare` began where no kernel does it; lr is in the formula."""

    formula: Formula
    step: int
    grad_scale: float
    skip: bool


class Live:
    """lr, grad_scale, count of steps, found_inf and norm of one parameter group, in fp64 on a device.

    Attributes:
        values: shape [8], float64: the five numbers in this order, then nothing. To be written through the methods,
            or by one's own kernels on the same stream.

    Args:
        device: where the group's shards are.
        lr: learning rate.
        step: steps taken so far, 0 for a new run.
    """

    def __init__(self, device: torch.device | str, lr: float = 0.0, step: int = 0) -> None:
        words = torch.zeros(_LIVE_WORDS + _PREPARED_WORDS, dtype=torch.float64, device=device)
        self.values = words[:_LIVE_WORDS]
        self._prepared = words[_LIVE_WORDS:]
        self._code: int | None = None  # of the formula whose coefficients are in _prepared
        self._host: _HostStep | None = None
        self.write(lr=lr, grad_scale=1.0, step=step, found_inf=False)

    def write(
        self,
        *,
        lr: float | None = None,
        grad_scale: float | None = None,
        step: int | None = None,
        found_inf: bool | None = None,
    ) -> None:
        """Set some of the numbers from the host, in the order of the stream and without waiting for the device.

        Inside the capture of a CUDA graph they would be baked into it: write before a replay.

        Raises:
            ValueError: for a step below 0, or an lr that is negative or not finite.
        """
        if lr is not None and not 0.0 <= lr < math.inf:
            raise ValueError(f"lr: got {lr}; wanted a finite number, not below 0")
        if step is not None and step < 0:
            raise ValueError(f"step: got {step}; wanted the number of steps taken, 0 or more")
        for at, value in ((_LR, lr), (_GRAD_SCALE, grad_scale), (_STEP, step), (_FOUND_INF, found_inf)):
            if value is not None:
                self.values[at].fill_(float(value))  # the number is an argument of the fill kernel

    def read(self) -> Numbers:
        """The numbers as they are when all work on the stream is done; waits for the device."""
        lr, grad_scale, count, found_inf, norm = self.values[:5].tolist()
        return Numbers(lr, grad_scale, int(count), found_inf != 0.0, norm)

    def clip(self, total: Tensor, mean: float, limit: float) -> None:
        """From the gradients' sum of squares to norm, grad_scale and found_inf; does not wait for the device.

        norm = sqrt(total) * mean; grad_scale = mean * min(1, limit / (norm + 1e-6)), without the second factor where
        limit is 0; found_inf says whether the norm is not finite.

        Args:
            total: one float64 number on this device, summed over all shards and ranks.
            mean: what the summed gradients are multiplied with to be the mean, and unscaled.
            limit: largest norm wanted; 0 for no clipping.

        Raises:
            ValueError: for a total of another dtype, size or device.
        """
        address = address_of("total", total, (torch.float64,), device=self.values.device)
        if total.numel() != 1:
            raise ValueError(f"total: got {describe(total)}; wanted one number on {self.values.device}")
        module = cuda.kernels(total.device)
        if module is not None:
            cuda.launch(module.clip, total.device, address, mean, limit, self.values.data_ptr())
            return
        norm = total.detach().reshape(()).sqrt() * mean
        scale = torch.full_like(norm, mean)
        if limit > 0.0:
            factor = torch.full_like(norm, limit) / (norm + 1e-6)  # a number over a tensor would be rounded twice
            scale = torch.where(factor < 1.0, mean * factor, scale)
        self.values[_NORM] = norm
        self.values[_GRAD_SCALE] = scale
        self.values[_FOUND_INF] = (~norm.isfinite()).to(torch.float64)

    def prepare(self, formula: Formula) -> None:
        """Begin a step: count it and compute the formula's coefficients; with found_inf set, only note to skip it.

        Args:
            formula: the group's; its lr is not looked at, that of this object is.
        """
        device = self.values.device
        self._code, self._host = formula.native()[0], None
        module = cuda.kernels(device)
        if module is not None:
            addresses = self.values.data_ptr(), self._prepared.data_ptr()
            cuda.launch(module.prepare, device, formula.native(), *addresses)
        else:
            self._host = self._prepare_on_host(formula)

    def _prepare_on_host(self, formula: Formula) -> _HostStep:
        numbers = self.read()
        if numbers.found_inf:
            return _HostStep(formula, numbers.step, numbers.grad_scale, True)
        self.write(step=numbers.step + 1)
        formula = dataclasses.replace(formula, lr=numbers.lr)
        return _HostStep(formula, numbers.step + 1, numbers.grad_scale, False)

    def step(
        self,
        formula: Formula,
        master: Tensor,
        moments: tuple[Moment, ...],
        grad: Tensor,
        param: Tensor | None,
        *,
        key: int = 0,
        first: int = 0,
    ) -> None:
        """The step that :meth:`prepare` began, on one shard; arguments as of ``zero.kernels.step.step``.

        With kernels for the device it is one launch that waits for nothing.

        Raises:
            ValueError: as ``zero.kernels.step.step``; and without a `prepare` of this formula.
        """
        if self._code is None or formula.native()[0] != self._code:
            raise ValueError(f"formula: got {formula}; wanted the one of prepare(), called before")
        arguments = kernel_arguments(formula, master, moments, grad, param)
        if master.device != self.values.device:
            raise ValueError(f"master: got {describe(master)}; wanted {self.values.device}, where these numbers are")
        if master.numel() == 0:
            return
        if self._host is None and arguments is not None:
            check_counters(1, key, first)
            module, prepared = cuda.kernels(master.device), self._prepared.data_ptr()
            cuda.launch(module.step_live, master.device, self._code, prepared, (*arguments, key, first))
            return
        host = self._host
        if host is None:  # float64: the device has counted this step already
            numbers = self.read()
            formula = dataclasses.replace(formula, lr=numbers.lr)
            host = _HostStep(formula, numbers.step, numbers.grad_scale, numbers.found_inf)
        if not host.skip:
            count, scale = host.step, host.grad_scale
            step(host.formula, master, moments, grad, param, step=count, grad_scale=scale, key=key, first=first)
