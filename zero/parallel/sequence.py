"""One batch of sequences that ranks share: who has which piece, and where documents begin."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby

import torch

from zero.core.comm import Axis
from zero.core.world import world_of_one
from zero.plan.sequences import Documents, begins, pieces


@dataclass(frozen=True)
class Sequence:
    """A batch of sequences over the ranks of `axis`.

    cut: the pieces of each rank, as positions in the whole; documents: of the rows that have the same, row after row,
    with how many rows these are.
    """

    axis: Axis
    by_rank: tuple[tuple[range, ...], ...]
    documents: tuple[tuple[int, Documents], ...]

    @property
    def length(self) -> int:
        """Positions of the whole sequence, padding included."""
        return self.documents[0][1][-1]

    @property
    def own(self) -> tuple[range, ...]:
        """The pieces of this rank."""
        return self.by_rank[self.axis.rank]

    @property
    def size(self) -> int:
        """Positions of each rank."""
        return self.length // len(self.by_rank)

    def rows(self) -> Iterator[tuple[slice, Documents]]:
        """The rows of a batch that have the same documents, and these."""
        start = 0
        for count, borders in self.documents:
            yield slice(start, start + count), borders
            start += count

    def piece(self, whole: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """This rank's positions of a tensor that has the whole sequence as dimension `dim`."""
        return torch.cat([whole.narrow(dim, each.start, len(each)) for each in self.own], dim)

    def at(self, positions: range) -> slice:
        """Where consecutive positions of one of this rank's pieces lie in its own tensors."""
        before = 0
        for piece in self.own:
            if piece.start <= positions.start < piece.stop:
                begin = before + positions.start - piece.start
                return slice(begin, begin + len(positions))
            before += len(piece)
        raise IndexError(f"positions {positions} are not on this rank")

    def parted(self) -> bool:
        """Whether a document begins inside of a piece of this rank."""
        marks = {begins(mark) for _, borders in self.documents for mark in borders}
        return any(mark in piece[1:] for mark in marks for piece in self.own)

    def alone(self) -> Sequence:
        """The whole sequence on this rank."""
        return replace(self, axis=world_of_one().point(), by_rank=pieces(self.length, 1, False))


def whole_sequence(rows: int, length: int, position_ids: torch.Tensor | None) -> Sequence:
    """Sequences that are on this rank, of one document each unless positions tell others."""
    one = [(0, length)] * rows
    documents = one if position_ids is None else documents_of(position_ids, None, rows, length)
    return Sequence(world_of_one().point(), pieces(length, 1, False), grouped(documents))


def documents_of(
    position_ids: torch.Tensor | None, mask: torch.Tensor | None, rows: int, length: int
) -> list[Documents]:
    """Where documents begin in each row, by positions that do not count on [rows or 1, length], and by a mask.

    mask [rows, length]: as of a tokenizer, 0 where nothing is, or numbers of documents. Raises ValueError where a
    document goes on behind padding.
    """
    starts = torch.zeros(rows, length, dtype=torch.bool)
    starts[:, :1] = True
    if position_ids is not None:
        starts[:, 1:] |= position_ids.cpu().diff(dim=1) != 1
    if mask is None:
        return [(*row.nonzero().flatten().tolist(), length) for row in starts]
    mask = mask.cpu().long()
    before, here = mask[:, :-1], mask[:, 1:]
    goes_on = (before == 0) & (here != 0) & (mask.cummax(1).values[:, :-1] == here) & ~starts[:, 1:]
    if goes_on.any():
        row, at = goes_on.nonzero()[0].tolist()
        raise ValueError(
            f"sequence_parallel_size: the attention_mask of row {row} has padding before position {at + 1}, inside a "
            "document; wanted padding in front of documents or behind them"
        )
    starts[:, 1:] = starts[:, 1:] & (here != 0) | (before != here)
    marks = [row.nonzero().flatten().tolist() for row in starts]
    return [(*(at if mask[row, at] else ~at for at in each), length) for row, each in enumerate(marks)]


def documents_of_lengths(borders: list[int], rows: int, length: int) -> list[Documents]:
    """Documents by cumulative lengths, as flash attention takes them: of one row that has them all."""
    if rows > 1 or borders[:1] != [0] or borders != sorted(set(borders)) or borders[-1] > length:
        raise ValueError(
            f"sequence_parallel_size: got cu_seq_lens_q {borders} with {rows} rows of {length}; wanted one row, and "
            "numbers that ascend from 0 to its length"
        )
    return [tuple(borders) if borders[-1] == length else (*borders, length)]


def grouped(documents: list[Documents]) -> tuple[tuple[int, Documents], ...]:
    """Documents of each row, as a Sequence has them."""
    return tuple((len(list(same)), borders) for borders, same in groupby(documents))
