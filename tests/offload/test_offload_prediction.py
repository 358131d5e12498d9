"""The promise: the predicted step of an offloaded run is what the pipeline can do, no more, and no less.

Never faster than any one worker; the sum of everything where nothing can overlap; the slowest worker where all can.
"""

from __future__ import annotations

import sys
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from zero.sizes.step_time import DEVICE, Pace, UnitTimes, predict

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

SECONDS = st.integers(0, 50).map(float)
UNITS = st.lists(st.builds(UnitTimes, *[SECONDS] * 15), min_size=1, max_size=6)


def all_of(units: list[UnitTimes], norm: float) -> float:
    """Every job of a step, one after the other."""
    jobs = sum(sum(unit) + unit.fetch for unit in units)
    beside = "read", "update", "write", "up", "bring", "back"
    updates = sum(getattr(unit, name) for unit in units if unit.stay for name in beside)
    return norm + jobs - updates  # what stays on the device is not updated by the host


@settings(deadline=None, max_examples=300)
@given(units=UNITS, norm=SECONDS, ahead=st.integers(1, 4), slots=st.integers(1, 4))
def test_between_the_slowest_worker_and_the_sum(units: list[UnitTimes], norm: float, ahead: int, slots: int) -> None:
    none = dict.fromkeys(("read", "update", "write", "up", "bring", "back"), 0.0)
    units = [unit._replace(**none) if unit.stay else unit for unit in units]
    found = predict(units, norm, Pace(ahead, slots))
    assert found.step >= max(found.busy.values())
    assert found.step >= found.busy["read"] + found.busy["write"], "one drive does both"
    assert found.step <= all_of(units, norm) + 1e-9


def test_updates_hide_behind_the_next_forward_unit_by_unit() -> None:
    """Four units, by hand: the host updates at once what the forward then needs, and is waited for once per unit."""
    units = [UnitTimes(forward=10.0, backward=20.0, update=10.0)] * 4
    assert predict(units).step == 10 + 4 * 30  # the first update; the others run beside the forward
    units = [UnitTimes(forward=10.0, backward=20.0, update=15.0)] * 4
    assert predict(units).step == 4 * 15 + 10 + 80  # the last update, and what comes after it
    found = predict(units)
    assert found.step - found.busy[DEVICE] == 4 * 15 + 10 - 40


def test_state_that_streams_hides_in_both_directions_two_units_at_a_time() -> None:
    assert predict([UnitTimes(forward=10.0, backward=20.0, bring=10.0, back=10.0)] * 4).step == 10 + 4 * 30
    slow = [UnitTimes(forward=10.0, backward=20.0, bring=10.0, back=30.0)] * 4
    assert predict(slow).step == 10 + 2 * 30 + 10 + 10 + 80  # the last unit waits until the second one has gone
    both = [UnitTimes(bring=10.0, back=10.0)] * 8
    assert predict(both).step <= 8 * 10 + 10, "both directions at once"


def test_a_drive_is_read_while_the_host_updates() -> None:
    units = [UnitTimes(backward=1.0, read=10.0, update=10.0)] * 8
    assert predict(units).step == 8 * 1 + 10 + 8 * 10  # the first read and all updates
    units = [UnitTimes(backward=1.0, read=10.0, update=2.0)] * 8
    assert predict(units).step == 8 * 1 + 8 * 10 + 2
    one_slot = predict([UnitTimes(backward=1.0, read=10.0, update=10.0)] * 8, pace=Pace(slots=1))
    assert one_slot.step == 8 * 1 + 8 * 20, "with one slot nothing is read ahead"


def test_fetches_run_one_use_ahead() -> None:
    units = [UnitTimes(forward=10.0, backward=10.0, fetch=4.0)] * 4
    assert predict(units).step == 4 + 8 * 10, "each but the first is fetched while the one before it is used"
    assert predict([unit._replace(fetch=12.0) for unit in units]).step == 8 * 12 + 10
