"""Values of each rank made known to all: one small exchange, and a second one for long values."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import torch

from zero.core import comm
from zero.core.comm import Axis, local_device
from zero.watchdog.hang_report import difference_text, first_difference

_AT_ONCE = 248  # bytes that travel with the length, before it is known who says more
_KINDS = (ValueError, OSError, RuntimeError)


def agree(
    value: Any, over: Axis, what: str = "", raises: Sequence[type[Exception]] = _KINDS, name: str = "comparison"
) -> list[Any]:
    """The values of all ranks of `over`, in their order: whatever JSON holds. Collective; `name` it, for messages.

    An exception as a `value` is raised on all ranks: here as it is, elsewhere as the first of `raises` that it is, else
    as the last, with `what` (if anything), the first rank that has one, and its text.
    """
    error = value if isinstance(value, BaseException) else None
    kind = next((at for at, each in enumerate(raises) if isinstance(error, each)), len(raises) - 1)
    mine = json.dumps([-1, value] if error is None else [kind, str(error)])
    said = [json.loads(text) for text in _texts(mine, over, name)]
    if error is not None:
        raise error
    for rank, (kind, text) in zip(over.ranks, said, strict=True):
        if kind >= 0:
            raise raises[kind](f"{what}{': ' if what else ''}rank {rank}: {text}")
    return [each for _, each in said]


def alike(
    lines: Sequence[str],
    over: Axis,
    what: str,
    nothing: str = "nothing",
    groups: Sequence[Sequence[int]] | None = None,
) -> None:
    """Raise RuntimeError on all ranks, with the first line that differs and who says what, unless all say the same.

    Collective. `what` stands in front of the error, with `{index}` for the index of the line; `nothing` is said of a
    rank whose lines have ended there. `groups`: places of ranks that must say the same; default all.
    """
    lines = [line.replace("\n", " ") for line in lines]
    digests = agree(digest_of(lines), over)
    groups = [range(over.size)] if groups is None else groups
    if differing := [group for group in groups if len({digests[place] for place in group}) > 1]:
        said = agree(lines, over)
        index, there = first_difference([said[place] for place in differing[0]])
        ranks = [over.ranks[place] for place in differing[0]]
        raise RuntimeError(f"{what.format(index=index)}: {difference_text(there, nothing, ranks)}")


def if_different(value: Any, over: Axis) -> list[Any] | None:
    """The values of all ranks, None where all are the same; of JSON that is long and seldom differs. Collective."""
    return None if len(set(agree(digest_of(value), over))) == 1 else agree(value, over)


def digest_of(value: Any) -> str:
    """A digest of whatever JSON holds."""
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=16).hexdigest()


def _texts(text: str, over: Axis, name: str) -> list[str]:
    data = text.encode()
    if over.size == 1:
        return [text]
    rows = _gathered(len(data).to_bytes(8, "little") + data[:_AT_ONCE].ljust(_AT_ONCE), over, name)
    lengths = [int.from_bytes(row[:8], "little") for row in rows]
    rows = [row[8:] for row in rows]
    if max(lengths) > _AT_ONCE:
        rows = _gathered(data.ljust(max(lengths)), over, name)
    return [row[:length].decode() for row, length in zip(rows, lengths, strict=True)]


def _gathered(data: bytes, over: Axis, name: str) -> list[bytes]:
    mine = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    rows = comm.gather_scalars(mine.to(local_device()) if over.native else mine, over, name)
    return [bytes(row.numpy()) for row in rows.cpu()]
