"""Packing tensors into a flat buffer, with cast and factor or added to it, and the sum of rows in row order."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from zero.kernels import cuda
from zero.kernels.checks import FLOATING, address_of, describe
from zero.kernels.native import DTYPE_CODES, load


def pack(
    tensors: Sequence[Tensor], flat: Tensor, offsets: Sequence[int], scale: float = 1.0, add: bool = False
) -> bool:
    """Set spans of the flat buffer to the tensors times `scale`, or add to them, in one pass; whether that was done.

    The bits are those of :func:`pack_reference`. It is done where the kernels are compiled for the buffer's device, for
    contiguous tensors of which it holds that one rounding gives the same bits as a cast, then a product or a sum.

    tensors: any shapes; none overlaps another or `flat` [n], of float32, bfloat16 or float16. offsets: of the first
    element of each in `flat`; spans must not overlap. Raises ValueError for one outside, before anything is written.
    """
    device, code, spans = flat.device, DTYPE_CODES.get(flat.dtype), []
    if code is None or not flat.is_contiguous() or (add and scale != 1.0):
        return False
    for tensor, offset in zip(tensors, offsets, strict=True):
        numel, dtype = tensor.numel(), tensor.dtype
        if offset < 0 or offset + numel > flat.numel():
            raise ValueError(f"offsets: got {offset} for {numel} elements; wanted a span within flat's {flat.numel()}")
        rounds_once = flat.dtype in (torch.float32, dtype) or (scale == 1.0 and not add)
        if not (rounds_once and dtype in DTYPE_CODES and tensor.device == device and tensor.layout is torch.strided):
            return False
        if not tensor.is_contiguous() or (numel and tensor.untyped_storage().nbytes() == 0):
            return False
        spans.append((tensor.data_ptr(), DTYPE_CODES[dtype], numel, offset))
    arguments = spans, flat.data_ptr(), code, scale, add
    if (module := cuda.kernels(device)) is not None:
        cuda.launch(module.pack, device, *arguments)
    elif flat.is_cpu and (module := load()) is not None:
        module.pack(*arguments, torch.get_num_threads())
    else:
        return False
    return True


@torch.no_grad()
def pack_reference(
    tensors: Sequence[Tensor], flat: Tensor, offsets: Sequence[int], scale: float = 1.0, add: bool = False
) -> None:
    """:func:`pack` as plain torch operations, on any device, for any dtypes."""
    for tensor, offset in zip(tensors, offsets, strict=True):
        span, cast = flat.narrow(0, offset, tensor.numel()), tensor.reshape(-1).to(flat.dtype)
        if add:
            span.add_(cast, alpha=scale)
        else:
            span.copy_(cast)
            span.mul_(scale)


def _row_addresses(rows: Sequence[Tensor], out: Tensor) -> list[int]:
    """Address of out, then of each row. Raises the ValueError of :func:`sum_rows` that is due, if one is."""
    addresses = [address_of("out", out, (torch.float32, torch.float64))]
    if out.ndim != 1:
        raise ValueError(f"out: got {describe(out)}; wanted 1-D")
    if len(rows) == 0:
        raise ValueError("rows: got none; wanted at least one")
    for index, row in enumerate(rows):
        addresses.append(address_of(f"rows[{index}]", row, FLOATING, out.shape, out.device))
        if row.dtype != rows[0].dtype:
            raise ValueError(f"rows[{index}]: got {describe(row)}; wanted {rows[0].dtype}, the dtype of rows[0]")
    return addresses


def sum_rows(rows: Sequence[Tensor], out: Tensor, accumulate: bool, threads: int | None = None) -> None:
    """Add the rows, first to last, in fp32: ``s = rows[0]; s += rows[1]; ...``; then ``out = out + s`` or ``out = s``.

    The order is fixed, so that the sum depends neither on how a buffer was cut nor on the number of threads.

    rows: at least one tensor [n], all float32, all bfloat16 or all float16 (rows of a matrix, or tensors of their own).
    out: [n], float32 (or float64, which runs as plain torch, summed in fp64). May be one of float32 rows, but must not
    overlap a row in part. threads: default torch's. Raises ValueError, before anything is written, for no rows, rows
    that differ in size, dtype or device, or are not contiguous and floating, or whose storage was released.
    """
    addresses = _row_addresses(rows, out)
    if out.dtype is not torch.float32 or not sum_compiled(addresses, rows[0].dtype, out, accumulate, threads):
        sum_rows_reference(rows, out, accumulate)


def sum_compiled(
    addresses: Sequence[int],
    dtype: torch.dtype,
    out: Tensor,
    accumulate: bool,
    threads: int | None = None,
    part: int = 0,
) -> bool:
    """Sum the rows by a kernel, if there is one; returns whether there was.

    addresses: of out, then of the rows, which were checked; dtype: of the rows. Where these are messages in 8 bits it
    is that of their sum, and `part` the number of blocks in a part of them.
    """
    (target, *sources), code = addresses, DTYPE_CODES.get(dtype)
    if code is None or 0 in addresses:
        return False
    strides = {after - before for before, after in pairwise(sources)} or {0}
    into = code, target, out.numel(), accumulate, part
    if len(strides) == 1 and (module := cuda.kernels(out.device)) is not None:  # as received, or just two
        cuda.launch(module.sum_rows, out.device, sources[0], strides.pop(), len(sources), *into)
    elif out.is_cpu and (module := load()) is not None:
        module.sum_rows(sources, *into, threads or torch.get_num_threads())
    else:
        return False
    return True


@torch.no_grad()
def sum_rows_reference(rows: Sequence[Tensor], out: Tensor, accumulate: bool) -> None:
    """:func:`sum_rows` as plain torch operations, on any device; the same arguments, errors and bits."""
    _row_addresses(rows, out)
    total = rows[0].to(out.dtype, copy=True)
    for row in rows[1:]:
        total += row.to(out.dtype)
    if accumulate:
        out += total
    else:
        out.copy_(total)
