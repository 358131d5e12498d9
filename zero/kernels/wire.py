"""8 bits for each element on the wire (ZeRO++, Wang et al. 2023): blocks of 64 neighbours share a scale.

A block has codes, int8, and a scale, bf16, the largest of its elements over 127. Code times scale is exact in fp32, so
every device decodes the same bits. A block with an element that is not finite reads as inf and NaN.

The codes of 8 blocks stand one after the other in a message, their 8 scales behind them; fewer blocks only at the end
of a part. A message is of one part, or of equal parts where it goes to several ranks or comes from them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zero.kernels import cuda
from zero.kernels.bucket import sum_compiled
from zero.kernels.checks import FLOATING, address_of, describe
from zero.kernels.native import DTYPE_CODES, load
from zero.plan.formats import WIRE_BLOCK, WIRE_GROUP, WIRE_RECORD, wire_nbytes

_LEAST = torch.finfo(torch.float32).tiny  # the scale of a block of zeros


def encode(values: Tensor, message: Tensor | None = None, parts: int = 1, error: Tensor | None = None) -> Tensor:
    """The message, uint8 [n / 64 * 66], of ``values`` [n], of any floating dtype; ValueError unless n fits the parts.

    It is written into ``message``, where given. What ``error`` holds, such a message as well, is added to the values
    first, and what the message then lacks of them is left there; of a block that is not finite, nothing.
    """
    source, device = address_of("values", values, FLOATING), values.device
    if values.ndim != 1 or values.numel() % (WIRE_BLOCK * parts):
        raise ValueError(f"values: got {describe(values)}; wanted 1-D, a multiple of {WIRE_BLOCK} x {parts} elements")
    kind = (torch.uint8,), (wire_nbytes(values.numel()),), device
    message = torch.empty(*kind[1], dtype=torch.uint8, device=device) if message is None else message
    target = address_of("message", message, *kind), 0 if error is None else address_of("error", error, *kind)
    code = DTYPE_CODES.get(values.dtype)
    arguments = source, code, values.numel(), *target, values.numel() // (WIRE_BLOCK * parts)
    if code is not None and (module := cuda.kernels(device)) is not None:
        cuda.launch(module.encode, device, *arguments)
    elif code is not None and values.is_cpu and (module := load()) is not None:
        module.encode(*arguments, torch.get_num_threads())
    else:
        encode_reference(values, message, parts, error)
    return message


@torch.no_grad()
def encode_reference(values: Tensor, message: Tensor, parts: int = 1, error: Tensor | None = None) -> None:
    """:func:`encode` into ``message`` as plain torch operations, on any device; the same bits, but of NaN as scale."""
    exact = values.float() if error is None else values.float() + _decoded(error, parts)
    blocks = exact.view(-1, WIRE_BLOCK)
    most = torch.full((), 127.0, device=values.device)  # on a GPU division by a number would be a multiplication
    scales = (blocks.abs().amax(1) / most).clamp_(min=_LEAST).bfloat16()
    codes = (blocks / scales.float().unsqueeze(1)).round_().clamp_(-127, 127).nan_to_num_(0.0).to(torch.int8)
    records = torch.cat((codes.view(torch.uint8), scales.view(torch.uint8).view(-1, 2)), 1)
    message[record_bytes(len(message), parts, values.device)] = records
    if error is not None:
        encode_reference((exact - _decoded(message, parts)).nan_to_num_(0.0, 0.0, 0.0), error, parts)


def decode(message: Tensor, out: Tensor, parts: int = 1) -> Tensor:
    """Write the elements of ``message``, uint8 [n / 64 * 66], into ``out`` [n], of any floating dtype; returns that."""
    sum_messages([message], out, False, parts)
    return out


def sum_messages(rows: Sequence[Tensor], out: Tensor, accumulate: bool, parts: int = 1) -> None:
    """As :func:`zero.kernels.bucket.sum_rows`, for messages: their elements are added in fp32, first to last."""
    addresses = [address_of("out", out, FLOATING)]
    for index, row in enumerate(rows):
        addresses.append(address_of(f"rows[{index}]", row, (torch.uint8,), (wire_nbytes(out.numel()),), out.device))
    if not sum_compiled(addresses, out.dtype, out, accumulate, part=out.numel() // (WIRE_BLOCK * parts)):
        sum_messages_reference(rows, out, accumulate, parts)


@torch.no_grad()
def sum_messages_reference(rows: Sequence[Tensor], out: Tensor, accumulate: bool, parts: int = 1) -> None:
    """:func:`sum_messages` as plain torch operations, on any device; the same bits."""
    total, *others = (_decoded(row, parts) for row in rows)
    for other in others:
        total += other
    out.copy_(out + total if accumulate else total)


def _decoded(message: Tensor, parts: int) -> Tensor:
    records = message[record_bytes(len(message), parts, message.device)]
    codes, scales = records.split((WIRE_BLOCK, 2), 1)
    return (codes.view(torch.int8) * scales.contiguous().view(torch.bfloat16).float()).view(-1)


def record_bytes(nbytes: int, parts: int, device: torch.device) -> Tensor:
    """Where in a message of `nbytes` each block has its 64 codes and the 2 bytes of its scale: int64 [blocks, 66]."""
    block = torch.arange(nbytes // WIRE_RECORD, device=device).unsqueeze(1)
    part = max(1, len(block) // parts)
    within = block % part % WIRE_GROUP
    size = (part - block % part + within).clamp(max=WIRE_GROUP)  # blocks of its group
    codes = within * WIRE_BLOCK + torch.arange(WIRE_BLOCK, device=device)
    scales = size * WIRE_BLOCK + within * 2 + torch.arange(2, device=device)
    return (block - within) * WIRE_RECORD + torch.cat((codes, scales), 1)
