"""From the shards of one world size to those of another: which rank reads which elements from whom."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from zero.plan.layout import Fragment, Layout


class Move(NamedTuple):
    """`numel` elements of parameter `name`: from `source_at` of shard `source` to `target_at` of shard `target`."""

    name: str
    source: int
    source_at: int
    target: int
    target_at: int
    numel: int


def moves(source: Layout, source_parts: int, target: Layout, target_parts: int) -> tuple[Move, ...]:
    """Every copy that turns `source_parts` shards of one layout into `target_parts` of another.

    Both layouts must hold the same parameters; raises ValueError that names what differs. Each element of
    each parameter of the target is written exactly once.
    """
    sizes = [{name: span.numel for name, span in layout.spans.items()} for layout in (source, target)]
    if sizes[0] != sizes[1]:
        differing = sorted(n for n in sizes[0].keys() | sizes[1].keys() if sizes[0].get(n) != sizes[1].get(n))
        raise ValueError(f"cannot reshard: these parameters differ or are on one side only: {differing}")
    source.shard(0, source_parts), target.shard(0, target_parts)  # refuse 0 parts, which no loop below would see
    pieces: dict[str, list[tuple[int, Fragment]]] = {}
    for rank in range(source_parts):
        for fragment in source.fragments(source.shard(rank, source_parts)):
            pieces.setdefault(fragment.name, []).append((rank, fragment))
    found: list[Move] = []
    for rank in range(target_parts):
        for wanted in target.fragments(target.shard(rank, target_parts)):
            found += _sources(pieces[wanted.name], rank, wanted)
    return tuple(found)


def _sources(pieces: Sequence[tuple[int, Fragment]], target: int, wanted: Fragment) -> list[Move]:
    found = []
    for source, held in pieces:
        start = max(held.start, wanted.start)
        numel = min(held.start + held.numel, wanted.start + wanted.numel) - start
        if numel > 0:
            found.append(
                Move(
                    wanted.name,
                    source,
                    held.at + start - held.start,
                    target,
                    wanted.at + start - wanted.start,
                    numel,
                )
            )
    return found
