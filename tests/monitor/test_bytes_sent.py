"""The promise: what ranks send is counted, by operation and unit, and is what ZeRO says: 2 Psi, at stage 3 3 Psi."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from models import config, make_net, step

import zero
from zero.log import logger

PER_STEP = {  # how often half of the bytes of all parameters leave each of two ranks
    0: {"reduce": 1, "replica gather": 1},
    1: {"reduce": 1, "gather": 1},
    2: {"reduce": 1, "gather": 1},
    3: {"reduce": 1, "gather": 2},
}
LOGGER = {"comms_logger": {"enabled": True}}


def sums(engine: Any, by_unit: bool = False) -> dict[str, tuple[int, int]]:
    """Count and bytes so far."""
    return {name: (each.count, each.sent) for name, each in engine.log_comms_summary(by_unit).items()}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", PER_STEP)
def test_a_step_sends_what_the_paper_says(stage: int) -> None:
    engine: Any = zero.initialize(model=make_net(), config=config(stage, 2, **LOGGER))[0]
    step(engine, 0)
    status, before, units_before = engine._sharded.world.watchdog.status, sums(engine), sums(engine, by_unit=True)
    counted = status.sent
    step(engine, 1)
    counted = status.sent - counted
    found = {name: (count - before[name][0], sent - before[name][1]) for name, (count, sent) in sums(engine).items()}
    by_unit = {name: sent - units_before[name][1] for name, (_, sent) in sums(engine, by_unit=True).items()}
    sizes = {unit.plan.name: unit.plan.layout.numel * 4 for unit in engine._sharded.units}
    rest = next(unit.plan.name for unit in engine._sharded.units if not unit.plan.anchor)
    engine.destroy()

    norm = found.pop("gradient norm")
    assert norm[0] == 1
    assert 0 < norm[1] < 1000
    wanted = {name: (times * len(sizes), times * sum(sizes.values()) // 2) for name, times in PER_STEP[stage].items()}
    if stage == 3:  # the unit that forward uses last is the first of backward, and stays
        count, sent = wanted["gather"]
        wanted["gather"] = count - 1, sent - sizes[rest] // 2
    assert found == wanted
    assert counted == norm[1] + sum(sent for _, sent in wanted.values())
    per_unit = sum(PER_STEP[stage].values())
    halves = {name: (per_unit - (stage == 3 and name == rest)) * size // 2 for name, size in sizes.items()}
    assert by_unit == halves | {"": norm[1]}


@pytest.mark.ranks(2)
def test_only_the_operations_that_were_asked_for() -> None:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    section = {"enabled": True, "prof_all": False, "prof_ops": ["reduce_scatter_tensor"], "verbose": True}
    engine: Any = zero.initialize(model=make_net(), config=config(2, 2, comms_logger=section))[0]
    logger.addHandler(handler)
    step(engine, 0)
    traffic = engine.log_comms_summary()
    logger.removeHandler(handler)
    assert list(traffic) == ["reduce"]
    assert traffic["reduce"].bus == traffic["reduce"].sent / traffic["reduce"].seconds > 0
    assert any("reduce of unit 'blocks.0'" in line for line in lines)
    assert not any("gather of unit" in line for line in lines)
    engine.destroy()


def test_without_the_log_there_is_no_summary() -> None:
    engine: Any = zero.initialize(model=make_net(), config=config(0, 1))[0]
    with pytest.raises(RuntimeError, match=r"set comms_logger\.enabled to true"):
        engine.log_comms_summary()
    engine.destroy()
