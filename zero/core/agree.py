"""Whether all ranks say the same: one small exchange, and a second one only where they do not."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from zero.core import comm
from zero.core.mesh import Axis
from zero.watchdog.hang_report import difference_text, first_difference

_LENGTH = 8  # bytes in front of a text, that say how many it has
_SHORT = 1024 - _LENGTH  # bytes of a text that come along with them


def agree(lines: Sequence[str], axis: Axis, device: torch.device, what: str, nothing: str = "nothing") -> None:
    """Raise RuntimeError on all ranks, with the first line that differs and who says what, unless all say the same.

    A collective over `axis`; its messages are on `device`. `what` stands in front of the error, with `{index}` for
    the index of the line; `nothing` is said of a rank whose lines have ended there.
    """
    data = "\n".join(line.replace("\n", " ") for line in lines).encode()
    digest = int.from_bytes(hashlib.blake2b(data, digest_size=7).digest(), "big")  # fits an int64
    mine = torch.tensor([digest, len(data)], dtype=torch.int64, device=device)
    hashes = comm.gather_scalars(mine, axis, "comparison").tolist()
    if all(one == hashes[0] for one in hashes):
        return
    lists = [text.split("\n") for text in everyone(data.decode(), axis, device)]
    index, there = first_difference(lists)
    raise RuntimeError(f"{what.format(index=index)}: {difference_text(there, nothing, axis.ranks)}")


def everyone(text: str, axis: Axis, device: torch.device) -> list[str]:
    """What each rank of the axis says, in their order; a collective, as `agree`. What is short takes one message."""
    data = text.encode()
    first = _told(len(data).to_bytes(_LENGTH, "little") + data[:_SHORT].ljust(_SHORT), axis, device)
    lengths = [int.from_bytes(row[:_LENGTH], "little") for row in first]
    longest = max(lengths)
    rows = _told(data.ljust(longest), axis, device) if longest > _SHORT else [row[_LENGTH:] for row in first]
    return [row[:length].decode() for row, length in zip(rows, lengths, strict=True)]


def _told(data: bytes, axis: Axis, device: torch.device) -> list[bytes]:
    """The bytes of each rank, equally many."""
    mine = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
    return [bytes(row.numpy()) for row in comm.gather_scalars(mine, axis, "comparison").cpu()]
