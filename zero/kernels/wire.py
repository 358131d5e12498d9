"""8 bits for each element on the wire (ZeRO++, Wang et al. 2023): blocks of 64 neighbours share a scale.

A message is made of records: the codes of a block, int8, and its scale, bf16, the largest of its elements over 127.
Code times scale is exact in fp32, so every device decodes the same bits. A block with an element that is not finite
reads as inf and NaN.

Plain torch on any device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zero.plan.formats import WIRE_BLOCK, WIRE_RECORD

_LEAST = torch.finfo(torch.float32).tiny  # the scale of a block of zeros


@torch.no_grad()
def encode(values: Tensor) -> Tensor:
    """The message, uint8 [n / 64 * 66], of ``values``, fp32 [n], n a multiple of 64."""
    blocks = values.view(-1, WIRE_BLOCK)
    scales = (blocks.abs().amax(1, keepdim=True) / 127).clamp_(min=_LEAST).bfloat16()
    records = torch.empty(len(blocks), WIRE_RECORD, dtype=torch.uint8, device=values.device)
    records[:, :WIRE_BLOCK].view(torch.int8).copy_((blocks / scales.float()).round_().clamp_(-127, 127))
    records[:, WIRE_BLOCK:].view(torch.bfloat16).copy_(scales)
    return records.view(-1)


@torch.no_grad()
def decode(message: Tensor, out: Tensor) -> Tensor:
    """Write the elements of ``message``, uint8 [n / 64 * 66], into ``out`` [n], of any floating dtype; returns that."""
    records = message.view(-1, WIRE_RECORD)
    scales = records[:, WIRE_BLOCK:].view(torch.bfloat16).float()
    torch.mul(records[:, :WIRE_BLOCK].view(torch.int8), scales, out=out.view(-1, WIRE_BLOCK))
    return out


def sum_messages(rows: Sequence[Tensor], out: Tensor, accumulate: bool) -> None:
    """As :func:`zero.kernels.bucket.sum_rows`, of messages: their elements are added in fp32, first to last."""
    total = decode(rows[0], torch.empty_like(out) if accumulate else out)
    for row in rows[1:]:
        total += decode(row, torch.empty_like(out))
    if accumulate:
        out += total
