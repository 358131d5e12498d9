"""Packing tensors into a flat buffer and back, with cast and factor, and the sum of rows in row order."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from zero.kernels import cuda
from zero.kernels.checks import FLOATING, address_of, describe
from zero.kernels.native import DTYPE_CODES, load


def _native(
    tensors: Sequence[Tensor], flat: Tensor, offsets: Sequence[int]
) -> tuple[tuple[list[int], list[int], list[int], list[int]], tuple[int, int]] | None:
    """(addresses, dtype codes, numels, offsets), (address of flat, its code); None where no compiled kernel applies.

    Raises the ValueError of :class:`Bucket` that is due, if one is.
    """
    addresses, size, device = [address_of("flat", flat, FLOATING)], flat.numel(), flat.device
    if flat.ndim != 1:
        raise ValueError(f"flat: got {describe(flat)}; wanted 1-D")
    if len(tensors) != len(offsets):
        raise ValueError(f"offsets: got {len(offsets)} for {len(tensors)} tensors; wanted one each")
    for index, (tensor, offset) in enumerate(zip(tensors, offsets, strict=True)):
        addresses.append(address_of(f"tensors[{index}]", tensor, FLOATING, device=device))
        if offset < 0 or offset + tensor.numel() > size:
            raise ValueError(
                f"offsets[{index}]: got {offset} for {tensor.numel()} elements; wanted a span within flat's {size}"
            )
    codes = [DTYPE_CODES.get(tensor.dtype) for tensor in (flat, *tensors)]
    if None in codes or 0 in addresses:  # of an empty one
        return None
    return (addresses[1:], codes[1:], [t.numel() for t in tensors], list(offsets)), (addresses[0], codes[0])


@torch.no_grad()
def move_reference(
    tensors: Sequence[Tensor], flat: Tensor, offsets: Sequence[int], scale: float, to_flat: bool
) -> None:
    """:meth:`Bucket.pack`, or :meth:`Bucket.unpack`, as plain torch operations, on any device; the same bits."""
    for tensor, offset in zip(tensors, offsets, strict=True):
        span, whole = flat[offset : offset + tensor.numel()], tensor.view(-1)
        source, target = (whole, span) if to_flat else (span, whole)
        wide = torch.float64 if torch.float64 in (source.dtype, target.dtype) else torch.float32
        target.copy_(source if scale == 1.0 else source.to(wide) * scale)


# Elements of a tensor that one block of CUDA threads moves: kPiece of csrc/cuda_kernels.cuh.
PIECE = 8192


class Bucket:
    """Tensors and their places in a flat buffer, looked up once, to be packed and unpacked often.

    On a CUDA device that is a table in device memory, and packing is one launch that waits for nothing. The tensors and
    the buffer must stay where they are: their storages may not be released, resized or set to others.

    Args:
        tensors: contiguous, any shapes, each float32, bfloat16 or float16 (others run as plain torch), on one device,
            the buffer's. None overlaps another or the buffer.
        flat: shape [n].
        offsets: first element of each tensor in ``flat``, in elements. Spans must not overlap.

    Raises:
        ValueError: for a span outside ``flat``, tensors on different devices, or tensors that are not contiguous and
            floating or whose storage was released.
    """

    def __init__(self, tensors: Sequence[Tensor], flat: Tensor, offsets: Sequence[int]) -> None:
        self._native = _native(tensors, flat, offsets)
        self.tensors, self.flat, self.offsets = list(tensors), flat, list(offsets)
        self._addresses = self._addresses_now()
        dtypes = {flat.dtype, *(tensor.dtype for tensor in tensors)}
        compiled = dtypes <= DTYPE_CODES.keys() and flat.numel() > 0
        self._module = cuda.kernels(flat.device) if compiled else None
        self._table = self._upload() if self._module is not None else None

    def _addresses_now(self) -> list[int]:
        return [self.flat.data_ptr(), *(tensor.data_ptr() for tensor in self.tensors)]

    def _upload(self) -> tuple[Tensor, int]:
        """The table on the device, int64 words: a span for each tensor, then the pieces; and the number of pieces."""
        spans = [
            (tensor.data_ptr(), DTYPE_CODES[tensor.dtype], tensor.numel(), offset)
            for tensor, offset in zip(self.tensors, self.offsets, strict=True)
        ]
        pieces = [torch.zeros(0, 2, dtype=torch.int64)]
        for index, (_, _, numel, _) in enumerate(spans):
            first = torch.arange(0, numel, PIECE)
            pieces.append(torch.stack([torch.full_like(first, index), first], 1))
        words = torch.cat([torch.tensor(spans, dtype=torch.int64).view(-1), *(piece.view(-1) for piece in pieces)])
        return words.to(self.flat.device), sum(len(piece) for piece in pieces)

    def pack(self, scale: float = 1.0) -> None:
        """Write each tensor into the flat buffer, times ``scale``, cast to the dtype of the buffer.

        The product is taken in fp32 (in fp64 when a side is float64) and rounded to nearest, ties to even. What is
        between the spans is left alone.

        Raises:
            ValueError: where a tensor is no longer where it was when this object was made.
        """
        self._move(scale, True)

    def unpack(self, scale: float = 1.0) -> None:
        """Fill each tensor from the flat buffer: the inverse of :meth:`pack`, with the same rounding and errors.

        Spans may overlap.
        """
        self._move(scale, False)

    def _move(self, scale: float, to_flat: bool) -> None:
        if self._addresses_now() != self._addresses:
            raise ValueError(
                "tensors: got at least one (or flat) whose memory moved or was released since this Bucket was made; "
                "make a new one"
            )
        if self._module is not None and self._table is not None:
            words, pieces = self._table
            spans = words.data_ptr()
            flat, code = self.flat.data_ptr(), DTYPE_CODES[self.flat.dtype]
            arguments = spans, spans + 32 * len(self.tensors), pieces, flat, code, scale, to_flat
            cuda.launch(self._module.move, self.flat.device, *arguments)
            return
        module = load() if self._native is not None and self.flat.is_cpu else None
        if module is None:
            move_reference(self.tensors, self.flat, self.offsets, scale, to_flat)
        elif to_flat:
            module.pack(*self._native[0], *self._native[1], scale, torch.get_num_threads())
        else:
            module.unpack(*self._native[1], *self._native[0], scale, torch.get_num_threads())


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

    Args:
        rows: at least one tensor of shape [n], all float32, all bfloat16 or all float16 (rows of a matrix, or tensors
            of their own).
        out: shape [n], float32 (or float64, which runs as plain torch, summed in fp64). May be one of float32 rows,
            but must not overlap a row in part.
        accumulate: add to ``out`` rather than overwrite it.
        threads: how many compute it; default torch's.

    Raises:
        ValueError: for no rows, rows that differ in size, dtype or device, or are not contiguous and floating, or
            whose storage was released. Nothing was written then.
    """
    addresses, code = _row_addresses(rows, out), DTYPE_CODES.get(rows[0].dtype)
    if out.dtype is not torch.float32 or not sum_compiled(addresses, code, out, accumulate, threads):
        sum_rows_reference(rows, out, accumulate)


def sum_compiled(
    addresses: Sequence[int], code: int | None, out: Tensor, accumulate: bool, threads: int | None = None
) -> bool:
    """Have a kernel do it, where one does; whether it has.

    addresses: of out, then of the rows, which were checked; code: their dtype's, or None for one without kernels.
    """
    target, *sources = addresses
    if code is None or 0 in addresses:
        return False
    strides = {after - before for before, after in pairwise(sources)} or {0}
    into = target, out.numel(), accumulate
    if len(strides) == 1 and (module := cuda.kernels(out.device)) is not None:  # as received, or just two
        cuda.launch(module.sum_rows, out.device, sources[0], strides.pop(), len(sources), code, *into)
    elif out.is_cpu and (module := load()) is not None:
        module.sum_rows(sources, code, *into, threads or torch.get_num_threads())
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
