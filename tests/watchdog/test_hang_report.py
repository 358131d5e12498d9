"""The promise: from the ranks' own records a report says shortly who is where, and blames the right one."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from zero.watchdog.hang_detector import HangDetector
from zero.watchdog.hang_report import (
    Phase,
    Record,
    Seen,
    View,
    cause,
    cause_of_loss,
    clipped,
    difference_text,
    first_difference,
    hang_report,
    ranks_text,
    record_of,
    wanted,
    where,
)
from zero.watchdog.rank_status import Collective, FailedWait, RankStatus, Waiting

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


def test_a_record_survives_the_store() -> None:
    record = Record(3, 9, Phase.STEP, 4, 5, "a", "b", 6, 1.5, "ValueError: 'ü'", 2, (0, 7), True, 8)
    assert record_of(record.to_json()) == record
    assert record_of(record.to_json().encode()) == record


def test_ranks_that_wait_for_the_same_come_first_and_the_one_outside_is_described() -> None:
    outside = Record(2, steps=7, number=56, last="gather of unit 'head' (#56)")
    text = hang_report(view(waiting(1), outside, waiting(3, 58)), WAITS)
    assert text == (
        "ranks 1, 3: waiting for the same; "
        "rank 2: outside the engine since its step 7, last the gather of unit 'head' (#56)"
    )
    assert wanted(view(waiting(1), outside, waiting(3)), WAITS) == (2,)


def test_a_silent_rank_is_stopped_or_dead_and_one_that_never_spoke_is_named() -> None:
    seen = view(waiting(1), waiting(2), silent={2: 3.4}, world=5)
    text = hang_report(seen, WAITS)
    assert "rank 1: waiting for the same" in text
    assert "rank 2: not heard of for 3 s, stopped or dead (when last heard: waiting for the gather" in text
    assert text.endswith("ranks 3, 4: never heard of")
    assert wanted(seen, WAITS) == (2,)


def test_ranks_that_wait_for_different_units_are_told_what_to_do() -> None:
    remedy = "make the module around these blocks a leaf (zero_optimization.leaf_module) or name it in zero.units"
    other = replace(waiting(2), waits="reduce of unit 'head'")
    assert remedy in hang_report(view(waiting(1), other), WAITS)
    assert remedy not in hang_report(view(waiting(1), other, silent={2: 3.4}), WAITS), "it is stopped"
    assert remedy not in hang_report(view(waiting(1), waiting(2)), WAITS)
    assert remedy not in hang_report(view(replace(other, waits="outcome of writing")), WAITS)


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
    assert len(clipped("long " * 1000)) == 300
    assert clipped("one\ntwo") == "one"


@pytest.mark.parametrize(
    ("record", "text"),
    [
        (Record(1), "outside the engine since its start"),
        (Record(1, phase=Phase.BACKWARD, steps=1), "computing in backward after 1 step"),
        (Record(1, error="E: m", steps=2), "outside the engine since its step 2; earlier it raised E: m and went on"),
        (Record(1, error="E: m", fault=1), "raised E: m"),
        (Record(1, phase=Phase.ENDED, error="E: m", fault=1), "raised E: m"),
        (Record(1, phase=Phase.ENDED), "has ended its program after 0 steps"),
        (Record(1, phase=Phase.ENDED, error="E: m", steps=1), "has ended its program with E: m after 1 step"),
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


def test_the_first_exception_is_the_cause_not_those_that_followed() -> None:
    late = Record(1, error="KeyError: late", fault=2)
    early = Record(3, error="ValueError: early", fault=1)
    victim = Record(2, error="rank 3 raised", fault=3, gave_up=True, missing=(3,))
    assert cause(view(late, victim, early), 5) == "rank 3 raised ValueError: early"
    assert cause_of_loss(view(late, victim, early), 0.1) == "rank 3 raised ValueError: early"
    assert cause_of_loss(view(waiting(1), victim), 0.1) == "rank 2 gave up for want of rank 3: rank 3 raised"


def gives_up(status: RankStatus, lost: bool = True) -> None:
    """Have a detector look at a wait that is over its time-out; the wait fails, or else ends well, meanwhile."""
    waiting_for = Waiting(Collective("gather", "blocks.3", 58), time.monotonic() - 9.0)
    status.waiting = waiting_for

    def told() -> None:
        status.waiting = None
        status.failed_wait = FailedWait(waiting_for, "closed", time.monotonic()) if lost else None

    elsewhere = replace(waiting(0), waits="gather of unit '<root>'")
    store = SimpleNamespace(view=lambda: view(elsewhere), poke=told, keeps=False, reading=False)
    HangDetector(status, store, (), 8.0, device=None)._look(time.monotonic())  # type: ignore[arg-type]


def test_a_rank_that_gives_up_tells_of_its_own_exception_before() -> None:
    status = RankStatus(2)
    gives_up(status)
    assert status.gave_up.startswith("rank 2 has waited for the gather of unit 'blocks.3' (#58)")
    alone = RankStatus(2)
    alone.phase = Phase.FORWARD
    alone.fail(ValueError("bad sample"))
    alone.failing = False  # it went on with the next batch
    gives_up(alone)
    own = "rank 2 raised ValueError: bad sample in forward and went on; rank 2 has waited for the gather"
    assert alone.gave_up.startswith(own)
    assert cause(view(waiting(1), alone.record(1, 1)), 58).startswith(f"rank 2 gave up for want of rank 0: {own}")


def test_a_wait_that_ends_well_while_it_is_judged_leaves_no_trace() -> None:
    status = RankStatus(2)
    status.error = "ValueError: bad sample"
    gives_up(status, lost=False)
    assert (status.gave_up, status.error, status.failing) == ("", "ValueError: bad sample", False)


def test_a_lost_connection_waits_for_a_culprit_but_not_for_ever() -> None:
    assert cause_of_loss(view(waiting(1), waiting(2)), 1.0) == ""
    assert cause_of_loss(view(waiting(1), waiting(2), silent={2: 2.1}), 2.3).startswith("rank 2 gone: not heard of")
    assert cause_of_loss(view(waiting(1), waiting(2)), 2.5) != ""
    assert cause_of_loss(view(store=math.inf, world=3), 0.0).startswith("rank 0 is stopped or dead, and with it")
    assert wanted(view(store=math.inf, world=3), WAITS) == (0,)


def test_where_lists_differ() -> None:
    lists = [["a", "b", "c"], ["a", "b"], ["a", "b", "c"]]
    assert first_difference(lists) == (2, ["c", "", "c"])
    assert difference_text(["c", "", "c"], "nothing") == "ranks 0, 2: c; rank 1: nothing"
    assert first_difference([["a"], ["a"]]) == (-1, [])
    assert len(difference_text([f"line {rank}" * 100 for rank in range(4096)], "-")) < 2500
