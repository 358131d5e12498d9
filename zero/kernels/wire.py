"""8 bits for each element on the wire (ZeRO++, Wang et al. 2023): blocks of 64 neighbours share a scale.

A message is made of records: the codes of a block, int8, and its scale, bf16, the largest of its elements over 127.
Code times scale is exact in fp32, so every device decodes the same bits. A block with an element that is not finite
reads as inf and NaN.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zero.kernels import cuda
from zero.kernels.bucket import sum_compiled
from zero.kernels.checks import FLOATING, address_of, describe
from zero.kernels.native import DTYPE_CODES, RECORDS_TO, load
from zero.plan.formats import WIRE_BLOCK, WIRE_RECORD, wire_nbytes

_LEAST = torch.finfo(torch.float32).tiny  # the scale of a block of zeros


def encode(values: Tensor, message: Tensor | None = None) -> Tensor:
    """The message, uint8 [n / 64 * 66], of ``values``, fp32 [n]; ValueError unless n is a multiple of 64.

    It is written into ``message``, where given.
    """
    source, device = address_of("values", values, (torch.float32,)), values.device
    if values.ndim != 1 or values.numel() % WIRE_BLOCK:
        raise ValueError(f"values: got {describe(values)}; wanted 1-D, a multiple of {WIRE_BLOCK} elements")
    nbytes = wire_nbytes(values.numel())
    message = torch.empty(nbytes, dtype=torch.uint8, device=device) if message is None else message
    arguments = source, address_of("message", message, (torch.uint8,), (nbytes,), device), values.numel()
    if (module := cuda.kernels(device)) is not None:
        cuda.launch(module.encode, device, *arguments)
    elif values.is_cpu and (module := load()) is not None:
        module.encode(*arguments, torch.get_num_threads())
    else:
        encode_reference(values, message)
    return message


@torch.no_grad()
def encode_reference(values: Tensor, message: Tensor) -> None:
    """:func:`encode` into ``message`` as plain torch operations, on any device; the same bits, but of NaN as scale."""
    blocks, records = values.view(-1, WIRE_BLOCK), message.view(-1, WIRE_RECORD)
    most = torch.full((), 127.0, device=values.device)  # on a GPU division by a number would be a multiplication
    scales = (blocks.abs().amax(1, keepdim=True) / most).clamp_(min=_LEAST).bfloat16()
    codes = (blocks / scales.float()).round_().clamp_(-127, 127).nan_to_num_(0.0)
    records[:, :WIRE_BLOCK].view(torch.int8).copy_(codes)
    records[:, WIRE_BLOCK:].view(torch.bfloat16).copy_(scales)


def decode(message: Tensor, out: Tensor) -> Tensor:
    """Write the elements of ``message``, uint8 [n / 64 * 66], into ``out`` [n], of any floating dtype; returns that."""
    sum_messages([message], out, False)
    return out


def sum_messages(rows: Sequence[Tensor], out: Tensor, accumulate: bool) -> None:
    """As :func:`zero.kernels.bucket.sum_rows`, for messages: their elements are added in fp32, first to last."""
    addresses = [address_of("out", out, FLOATING)]
    for index, row in enumerate(rows):
        addresses.append(address_of(f"rows[{index}]", row, (torch.uint8,), (wire_nbytes(out.numel()),), out.device))
    code = DTYPE_CODES.get(out.dtype)
    if code is None or not sum_compiled(addresses, RECORDS_TO + code, out, accumulate):
        sum_messages_reference(rows, out, accumulate)


@torch.no_grad()
def sum_messages_reference(rows: Sequence[Tensor], out: Tensor, accumulate: bool) -> None:
    """:func:`sum_messages` as plain torch operations, on any device; the same bits."""
    parts = []
    for row in rows:
        records = row.view(-1, WIRE_RECORD)
        scales = records[:, WIRE_BLOCK:].clone().view(torch.bfloat16).float()  # from any address
        parts.append((records[:, :WIRE_BLOCK].view(torch.int8) * scales).view(-1))
    for part in parts[1:]:
        parts[0] += part
    out.copy_(out + parts[0] if accumulate else parts[0])
