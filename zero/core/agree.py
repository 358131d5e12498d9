"""Whether all ranks say the same: one small exchange, and a second one only where they do not."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from zero.core import comm
from zero.core.world import Axis
from zero.watchdog.hang_report import difference_text, first_difference


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
    """What each rank of the axis says, in their order; a collective, as `agree`."""
    data = text.encode()
    length = torch.tensor([len(data)], dtype=torch.int64, device=device)
    lengths = comm.gather_scalars(length, axis, "comparison").flatten().tolist()
    mine = torch.frombuffer(bytearray(data.ljust(max(1, *lengths))), dtype=torch.uint8).to(device)
    rows = comm.gather_scalars(mine, axis, "comparison").cpu()
    return [bytes(row[:count].numpy()).decode() for row, count in zip(rows, lengths, strict=True)]
