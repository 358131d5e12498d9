"""The promise: the bytes that leave a rank are counted, and are those that ZeRO says: 2 Psi, at stage 3 3 Psi."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from models import config, make_net, step

import zero

PER_STEP = {  # of the bytes of all parameters, half of which leave each of two ranks in one gather or reduction
    0: {"reduce": 1, "replica gather": 1},
    1: {"reduce": 1, "gather": 1},
    2: {"reduce": 1, "gather": 1},
    3: {"reduce": 1, "gather": 2},
}


def sent_in_a_step(stage: int) -> tuple[Counter[str], int, int, int]:
    """By direction, with the norm; what the counter says; the bytes of all parameters and of the last unit, padded."""
    engine: Any = zero.initialize(model=make_net(), config=config(stage, 2))[0]
    step(engine, 0)
    watchdog, sent, begin = engine._sharded.mesh.watchdog, Counter(), engine._sharded.mesh.watchdog.begin
    before = watchdog.status.sent

    def noted(*args: Any, **kwargs: Any) -> Any:
        collective = begin(*args, **kwargs)
        sent[collective.direction] += collective.sent
        return collective

    watchdog.begin = noted
    step(engine, 1)
    del watchdog.begin
    sizes = {unit.plan.anchor: unit.plan.layout.numel * 4 for unit in engine._sharded.units}
    counted = watchdog.status.sent - before
    engine.destroy()
    return sent, counted, sum(sizes.values()), sizes[""]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", PER_STEP)
def test_a_step_sends_what_the_paper_says(stage: int) -> None:
    sent, counted, whole, last = sent_in_a_step(stage)
    norm = sent.pop("gradient norm")
    assert 0 < norm < 1000
    wanted = {direction: times * whole // 2 for direction, times in PER_STEP[stage].items()}
    if stage == 3:  # the unit that forward uses last is the first of backward, and stays
        wanted["gather"] -= last // 2
    assert sent == wanted
    assert counted == sum(sent.values()) + norm
