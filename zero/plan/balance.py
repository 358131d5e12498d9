"""Numbers divided into lists: of about equal sums, or of sums that are not above a limit."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence


def karmarkar_karp(costs: Sequence[float], parts: int) -> list[list[int]]:
    """Indices of the costs, each above 0, in `parts` lists of about equal sums; the largest sum comes first.

    Largest differencing (Karmarkar and Karp, 1982): the two divisions whose parts differ most become one, in which the
    largest part of one joins the smallest of the other. No list is empty if there are as many costs as lists.
    """
    # A division has its parts as (sum, number, indices), the smallest first, without empty ones. The number is there to
    # decide between equal sums, on all ranks alike.
    heap = [(-cost, at, [(cost, at, [at])]) for at, cost in enumerate(costs)]
    heapq.heapify(heap)
    while len(heap) > 1:
        (_, number, one), (_, _, other) = heapq.heappop(heap), heapq.heappop(heap)
        if len(one) < len(other):
            one, other = other, one
        shared = max(0, len(one) + len(other) - parts)
        pairs = list(zip(one[:shared], reversed(other[:shared]), strict=True))
        del one[:shared]
        for part in [(mine[0] + theirs[0], mine[1], mine[2] + theirs[2]) for mine, theirs in pairs] + other[shared:]:
            insort(one, part)
        smallest = one[0][0] if len(one) == parts else 0
        heapq.heappush(heap, (smallest - one[-1][0], number, one))
    found = [indices for _, _, indices in reversed(heap[0][2])] if heap else []
    return found + [[] for _ in range(parts - len(found))]


def best_fit(sizes: Sequence[int], limit: int) -> list[list[int]]:
    """Indices of the sizes, none above `limit`, in lists of sums up to it: the largest first, each where least is left.

    As few lists as first-fit decreasing is known to need: at most 11/9 of the fewest, and one more.
    """
    lists: list[list[int]] = []
    room: list[tuple[int, int]] = []  # what is left in a list, and which list it is; in order
    for index in sorted(range(len(sizes)), key=lambda at: -sizes[at]):
        at = bisect_left(room, (sizes[index], 0))
        left, number = room.pop(at) if at < len(room) else (limit, len(lists))
        if number == len(lists):
            lists.append([])
        lists[number].append(index)
        insort(room, (left - sizes[index], number))
    return lists
