"""The promise: from the ranks' own records a report says shortly who is where, and blames the right one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from zero.watchdog.hang_report import (
    Blocked,
    Phase,
    Record,
    Seen,
    View,
    blame,
    cause,
    clipped,
    deadlock,
    hang_report,
    ranks_text,
    record_of,
    where,
)

WAITS = "gather of unit 'blocks.3'"


def waiting(rank: int, number: int = 57) -> Record:
    return Record(rank, phase=Phase.FORWARD, steps=7, number=number, last="x", waits=WAITS, wait=number, seconds=4.0)


def view(*records: Record, silent: dict[int, float] | None = None, store: float = 0.0, world: int = 0) -> View:
    seen = {record.rank: Seen(record, (silent or {}).get(record.rank, 0.3)) for record in records}
    return View(seen, tuple(range(1, world)) or tuple(seen), 2.0, store, 0)


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([3], "rank 3"),
        ([1, 0], "ranks 0, 1"),
        ([5, 0, 1, 2], "ranks 0-2, 5"),
        (list(range(4096)), "ranks 0-4095"),
        (list(range(0, 40, 2)), "ranks 0, 2, 4, 6, 8, 10, 12, 14, ..."),
    ],
)
def test_ranks_in_words(ranks: list[int], text: str) -> None:
    assert ranks_text(ranks) == text


def test_one_rank_in_a_save_while_others_train_is_told_what_may_be_wrong() -> None:
    saving = Record(2, phase=Phase.SAVE, steps=7, number=56)
    text = hang_report(view(waiting(1), saving), WAITS)
    assert "rank 2: computing in save_checkpoint() after 7 steps" in text
    assert "save_checkpoint() was called on some ranks only" in text
    assert "different numbers of batches" in text
    assert "batches" not in hang_report(view(waiting(1), replace(saving, phase=Phase.STEP)), WAITS)


def test_a_report_stays_short_at_any_world_size() -> None:
    odd = [Record(rank, steps=rank, number=1) for rank in range(1, 1024)]
    assert len(hang_report(view(*odd), WAITS)) < 1000
    assert "elsewhere" in hang_report(view(*odd), WAITS)
    assert len(clipped("long " * 1000)) == 500
    assert clipped("one\ntwo") == "one"


@pytest.mark.parametrize(
    ("record", "text"),
    [
        (Record(1), "outside the engine since its start"),
        (Record(1, error="E: m", steps=2), "outside the engine since its step 2; earlier it raised E: m and went on"),
        (Record(1, phase=Phase.ENDED, error="E: m", fault=1), "raised E: m"),
        (Record(1, phase=Phase.ENDED), "has ended its program after 0 steps"),
        (Record(1, phase=Phase.DESTROYED, last="reduce"), "has let go of its engine after 0 steps, last the reduce"),
        (Record(1, error="because", fault=1, gave_up=True), "gave up: because"),
        (Record(1, 0, Phase.ENDED, error="it", fault=1, missing=(0,), gave_up=True), "gave up for want of rank 0: it"),
    ],
)
def test_where_a_rank_is(record: Record, text: str) -> None:
    assert where(record) == text


def test_a_rank_that_failed_ends_the_wait_of_others_only_if_it_has_not_sent_its_part() -> None:
    failed = Record(2, number=56, error="ValueError: bad", fault=1)
    assert cause(view(waiting(1), failed), 57) == "rank 2 raised ValueError: bad"
    assert cause(view(waiting(1), failed), 56) == ""
    went_on = Record(2, number=56, error="ValueError: bad")
    assert cause(view(waiting(1), went_on), 57) == ""
    ended = Record(2, number=56, phase=Phase.ENDED)
    why = cause(view(waiting(1), ended), 57)
    assert why.startswith("rank 2 has ended its program after 0 steps; perhaps ranks had different numbers of batches")
    died = replace(ended, error="ValueError: bad")
    assert cause(view(waiting(1), died), 57) == "rank 2 has ended its program with ValueError: bad after 0 steps"
    assert cause(view(waiting(1), ended), 56) == "", "it has ended well; somebody else is slow"


def test_only_ranks_of_which_each_waits_for_one_that_waits_too_are_known_to_wait_for_ever() -> None:
    def stuck(rank: int, *owes: tuple[int, float]) -> Record:
        return replace(waiting(rank), blocked=Blocked(1.0 + rank, 5, 1, (), owes))

    own, other = stuck(0, (1, 2.0)), stuck(1, (0, 1.0))
    assert deadlock(view(other), own) == {0: 1.0, 1: 2.0}
    assert deadlock(view(stuck(1, (0, 1.0), (2, 3.0)), stuck(2)), own) == {0: 1.0, 1: 2.0, 2: 3.0}
    assert not deadlock(view(stuck(1)), own), "it has sent its part, which may be on its way"
    assert not deadlock(view(stuck(1, (0, 0.5))), own), "that wait has ended"
    assert not deadlock(view(replace(other, blocked=None)), own), "it computes"
    assert blame(view(replace(other, forwards=1)), own, [0, 1]).startswith("rank 1 went on after a forward without")
    assert record_of(other.to_json()) == other
