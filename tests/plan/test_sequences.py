"""The promise: pieces of a sequence, and blocks of attention between them, cover what is visible once and no more."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zero.plan.sequences import ALL, CAUSAL, Documents, Step, pieces, ring


def steps(
    cut: tuple[tuple[range, ...], ...], documents: Documents, causal: bool, window: int
) -> list[tuple[Step, ...]]:
    return [ring(cut, rank, (documents,), causal, window) for rank in range(len(cut))]


def seen(found: list[tuple[Step, ...]]) -> list[tuple[int, int]]:
    """Every pair of query and key that a block computes and shows."""
    pairs = []
    for of_rank in found:
        for step in of_rank:
            for index, block in step.blocks:
                assert set(block.keys) <= set(step.receives[index][1])
                for query in block.queries:
                    for key in block.keys:
                        before = query - key
                        reach = 99 if block.visible == CAUSAL else block.visible
                        visible = block.visible == ALL or 0 <= before < reach
                        pairs += [(query, key)] * visible
    return pairs


@given(
    ranks=st.integers(1, 5),
    size=st.integers(1, 6),
    borders=st.sets(st.integers(1, 59), max_size=8),
    causal=st.booleans(),
    window=st.integers(0, 12),
    halves=st.booleans(),
    padding=st.sets(st.integers(1, 9), max_size=3),
)
def test_each_visible_pair_is_computed_once(
    ranks: int, size: int, borders: set[int], causal: bool, window: int, halves: bool, padding: set[int]
) -> None:
    length = ranks * size * (1 + halves)
    starts = [0, *sorted(at for at in borders if at < length)]
    documents = (*(~at if number in padding else at for number, at in enumerate(starts, 1)), length)
    window = window if causal else 0
    number = {at: sum(border <= at for border in starts) for at in range(length)}
    wanted = [
        (query, key)
        for query in range(length)
        for key in range(length)
        if number[query] == number[key]
        and number[key] not in padding
        and (not causal or key <= query)
        and (not window or query - key < window)
    ]
    cut = pieces(length, ranks, halves)
    assert sorted(at for own in cut for piece in own for at in piece) == list(range(length))
    found = steps(cut, documents, causal, window)
    assert sorted(seen(found)) == wanted
    for rank, of_rank in enumerate(found):
        for step in of_rank:  # the other side has the same plan
            (there,) = [each for each in found[step.to] if each.source == rank]
            assert step.sends == there.receives
            assert all(span for _, span in step.sends)


@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
def test_of_one_document_every_rank_sends_keys_to_every_other(ranks: int) -> None:
    length = 4 * ranks
    for found in steps(pieces(length, ranks, True), (0, length), True, 0):
        assert [bool(step.sends) for step in found[1:]] == [True] * (ranks - 1)
        # To those in front of it, half of its keys; a ring sends all of them to all.
        sent = sum(len(span) for step in found[1:] for _, span in step.sends)
        assert sent <= (ranks - 1) * length // ranks


def test_a_pack_without_a_document_across_a_border_sends_nothing() -> None:
    for found in steps(pieces(32, 4, True), (0, 3, 4, 8, 12, 15, 16, 20, 24, 28, 32), True, 0):
        assert not any(step.sends or step.receives for step in found[1:])


def test_of_a_document_across_a_border_only_its_own_keys_travel() -> None:
    first, *_ = steps(pieces(32, 2, False), (0, 13, 20, 32), True, 0)
    assert [step.sends for step in first[1:]] == [((0, range(13, 16)),)]


def test_a_window_sends_what_it_reaches() -> None:
    first, second, third = steps(pieces(30, 3, False), (0, 30), True, 4)
    assert [step.sends for step in first[1:]] == [((0, range(7, 10)),), ()]
    assert [step.sends for step in second[1:]] == [((0, range(17, 20)),), ()]
    assert not any(step.sends for step in third[1:])


@pytest.mark.parametrize("ranks", [2, 4, 64])
def test_halves_have_equal_causal_work(ranks: int) -> None:
    length = 8 * ranks
    work = [sum(1 for _ in seen([found])) for found in steps(pieces(length, ranks, True), (0, length), True, 0)[:3]]
    assert max(work) - min(work) == 0
